"""Messages of user code under both engines: every receiver gets its own copy of what was sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gossamer
from gossamer import Experiment, Run, RunFailed

NARROW = {"name": "uniform", "bandwidth_mbps": 8.0}


def play(out: Path, algorithm: Any, engine: str, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "nodes": 4,
        "task": {"name": "least-squares", "features": 4, "samples": 40, "test_samples": 20},
        "topology": "complete",
        "algorithm": algorithm,
        "batch_size": "full",
        "evaluation": {"every_rounds": 1},
        "engine": {"name": engine},
        "stop": {"rounds": 2},
    }
    return gossamer.run(Experiment.of({**settings, **changes}), out)


@pytest.mark.parametrize("engine", ["simulate", "simulate-narrow", "processes"])
def test_broadcast_receivers_have_their_own_containers(tmp_path: Path, engine: str) -> None:
    name, _, narrow = engine.partition("-")
    network = {"network": NARROW} if narrow else {}
    run = play(tmp_path, "user_algorithms:Scribbler", name, **network)
    rows = run.metrics.filter(run.metrics["round"] > 0, run.metrics["node"] >= 0)
    sent = {"list": [0, [1]], "inner": {"x": 0}}
    assert [json.loads(seen) for seen in rows["seen"]] == [sent] * 8


LARGE = {"name": "least-squares", "features": 100_000, "samples": 8, "test_samples": 4}


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_modifying_a_payload_being_sent_fails_the_run(tmp_path: Path, engine: str) -> None:
    with pytest.raises(RunFailed, match="modified in place") as caught:
        play(tmp_path, "user_algorithms:Overwriter", engine, task=LARGE, nodes=2)
    assert caught.value.node == 0
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("features", "yields"), [(4, 50), (100_000, 5)])
def test_modified_bytes_never_arrive_between_processes(tmp_path: Path, features: int, yields: int) -> None:
    """A payload that left before it was modified arrives unmodified; otherwise the run fails."""
    run, failure = None, None
    try:
        run = play(
            tmp_path,
            {"name": "user_algorithms:Overwriter", "yields": yields},
            "processes",
            task={**LARGE, "features": features},
            nodes=2,
            stop={"rounds": 1},
        )
    except RunFailed as error:
        failure = error
    if run is None:
        assert failure is not None
        assert failure.node == 0
        assert "modified in place" in str(failure)
    else:
        assert run.metrics.filter(node=1, round=1)["sevens"].to_list() == [0]


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_message_can_be_cancelled_twice(tmp_path: Path, engine: str) -> None:
    run = play(tmp_path, "user_algorithms:TakesBack", engine, nodes=2, network=NARROW)
    rows = run.metrics.filter(run.metrics["round"] > 0, run.metrics["node"] >= 0)
    assert [json.loads(answers) for answers in rows.filter(node=0)["answers"]] == [[True, True]] * 2
    assert [json.loads(answers) for answers in rows.filter(node=1)["answers"]] == [[0, 2]] * 2
