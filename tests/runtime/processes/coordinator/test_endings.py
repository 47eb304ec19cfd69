"""How a run of real processes ends: gracefully, with nothing to cut that short; or because its record cannot be written."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pytest

import gossamer
from gossamer import Experiment, Run, RunFailed, api, load_run
from gossamer.fingerprint import Fingerprint, unknown
from gossamer.results import closing
from gossamer.results.checkpoints import newest
from gossamer.results.consensus import consensus_distance
from gossamer.results.folder import RunFolder
from gossamer.results.observer import Observer
from gossamer.runtime.outcome import Outcome

NODES = 4
EASY = 0.2
"""A test loss that is reached after a few rounds."""


def described(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": NODES,
        "task": {"name": "least-squares", "features": 3, "samples": 32},
        "topology": "complete",
        "algorithm": "d-psgd",
        "evaluation": {"every_rounds": 2},
        "engine": "processes",
        "stop": {"rounds": 1000},
    }
    return Experiment.of({**settings, **changes})


def check_end(run: Run, evaluated: int = NODES) -> None:
    """Check that all nodes ended gracefully, with a final model and, if evaluated, a final row."""
    assert run.status == "done"
    ends = run.metrics.filter(run.metrics["moment"].str.contains("end"))
    assert ends.filter(ends["node"] >= 0)["node"].sort().to_list() == list(range(NODES))
    assert ends["test_loss"].count() == evaluated
    assert run.parameters is not None
    assert bool(run.parameters.isfinite().all())
    assert bool((run.parameters != 0).any(dim=1).all())
    # The recorded end is that of the final models, and no row comes after it.
    [distance] = ends.filter(node=-1)["consensus_distance"].to_list()
    assert distance == pytest.approx(consensus_distance(list(run.parameters)))
    lasts = run.metrics.group_by("node").agg(pl.col("round").max()).sort("node")
    assert lasts.equals(ends.select("node", "round").sort("node"))


class Impatient(Observer):
    """Interrupts the run when its end has begun."""

    asked = False

    def row(self, row: Mapping[str, Any]) -> None:
        if "end" in row["moment"] and not self.asked:
            self.asked = True
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("no_process_is_left")
def test_second_target_and_interrupt_do_not_cut_an_end_short(tmp_path: Path) -> None:
    observer = Impatient()
    run = gossamer.run(
        described(
            evaluation={"every_rounds": 2, "nodes": [0]},
            stop={"rounds": 1000, "target": {"metric": "test_loss", "value": EASY}},
            checkpoint={"every_rounds": 5},
        ),
        tmp_path,
        observer=observer,
    )
    assert observer.asked
    check_end(run, evaluated=1)
    last = newest(run.path / "checkpoints")
    assert last is not None
    assert sorted(last.rounds) == list(range(NODES))


TALKER = """
from gossamer.algorithms import DPSGD


class Talker(DPSGD):
    async def run(self, node):
        print(node.rank)
        await super().run(node)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.usefixtures("no_process_is_left")
def test_node_with_unwritable_stdout_ends_normally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It must not act as a second supervisor, which would end the others."""
    (tmp_path / "talker.py").write_text(TALKER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # so that output is written when the node ends
    experiment = described(algorithm="talker:Talker", stop={"rounds": 4})
    stdout = os.dup(1)
    try:
        with Path("/dev/full").open("w") as full:
            os.dup2(full.fileno(), 1)
        run = gossamer.run(experiment, tmp_path / "runs")
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    assert run.status == "done"
    assert run.events.is_empty()
    assert run.parameters is not None
    assert bool(run.parameters.isfinite().all())
    assert "Traceback" not in capfd.readouterr().err


class Saboteur(Observer):
    """Blocks the path of a file that the supervisor has to write."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def start(self, description: Mapping[str, Any]) -> None:
        [segments] = self._out.glob("*/*/segments")
        (segments / "events-0.jsonl").mkdir()


@pytest.mark.usefixtures("no_process_is_left")
def test_unwritable_record_is_a_one_line_recorded_failure(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"events-0.jsonl can't be written: Is a directory$") as caught:
        gossamer.run(described(), tmp_path, observer=Saboteur(tmp_path))
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.folder is not None
    run = load_run(caught.value.folder)
    assert (run.status, run.error) == ("failed", str(caught.value))


def test_engine_is_closed_before_tables_are_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the user interrupts the run."""
    calls: list[str] = []

    class Interrupted:
        description: ClassVar[dict[str, Any]] = {}
        fingerprint: ClassVar[Fingerprint] = unknown()

        def run(self, *_: object) -> Outcome:
            raise KeyboardInterrupt

        def __enter__(self) -> Interrupted:
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("closed")

    def compact(folder: RunFolder) -> None:
        calls.append("tables")

    monkeypatch.setattr(api, "_engine", lambda *_: Interrupted())
    monkeypatch.setattr(closing, "compact", compact)
    with pytest.raises(KeyboardInterrupt):
        gossamer.run(described(), tmp_path)
    assert calls[:2] == ["closed", "tables"]
    assert load_run(tmp_path).status == "stopped"


class Slow(Observer):
    """Takes 20 ms for each row."""

    def row(self, row: Mapping[str, Any]) -> None:
        time.sleep(0.02)


def test_nodes_wait_for_a_slower_coordinator(tmp_path: Path) -> None:
    experiment = described(nodes=2, evaluation={"every_rounds": 1, "nodes": "average"}, stop={"rounds": 60})
    run = gossamer.run(experiment, tmp_path, observer=Slow(), command=["test"])
    # Otherwise models would pile up in the memory of the fork server.
    rows = run.metrics.filter(pl.col("node") >= 0)
    assert rows["wall_s"].max() > 0.02 * 0.9 * len(rows)
