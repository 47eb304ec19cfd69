"""Protocols that return before their last round: under both engines the record has their final models, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import gossamer
from gossamer import Experiment, Run
from gossamer.results.consensus import consensus_distance
from gossamer.results.finals import final_summary
from gossamer.results.observer import Observer
from gossamer.runtime.recording import EARLY

pytestmark = pytest.mark.usefixtures("no_process_is_left")

ENGINES = ["simulate", "processes"]
NODES, ROUNDS = 4, 10


class Listening(Observer):
    """Keeps messages to the user."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def play(out: Path, engine: str, listening: Listening, stop: dict[str, Any], **algorithm: Any) -> Run:
    settings = {
        "nodes": NODES,
        "task": {"name": "least-squares", "features": 4, "samples": 40, "test_samples": 20},
        "topology": "complete",
        "algorithm": {"name": "user_algorithms:Brief", **algorithm},
        "batch_size": "full",
        "compute": {"name": "constant", "seconds_per_step": 0.01},
        "evaluation": {"every_rounds": 5},
        "engine": {"name": engine, "trainer": "sequential"},
        "stop": stop,
    }
    return gossamer.run(Experiment.of(settings), out, observer=listening)


def check_end(run: Run) -> pl.DataFrame:
    """Check that the record ends with the final models of all nodes; gives their final rows."""
    assert run.status == "done"
    assert run.parameters is not None
    ends = run.metrics.filter(pl.col("moment").str.contains("end")).sort("node")
    assert ends["node"].to_list() == [-1, *range(NODES)]
    assert ends["consensus_distance"][0] == pytest.approx(consensus_distance(list(run.parameters)))
    final = final_summary(run).metrics["test_loss"]
    assert (final.count, final.mean) == (NODES, pytest.approx(ends["test_loss"][1:].mean()))
    return ends.filter(pl.col("node") >= 0)


def early(run: Run) -> list[str]:
    """The recorded remarks on nodes that returned early."""
    return run.events.filter(event="ended-early")["detail"].to_list()


@pytest.mark.parametrize("counted", [True, False])
def test_early_return_is_recorded_and_final_models_evaluated(tmp_path: Path, counted: bool) -> None:
    rows = []
    for engine in ENGINES:
        listening = Listening()
        run = play(tmp_path, engine, listening, {"rounds": ROUNDS}, counted=counted)
        assert early(run) == [EARLY]
        assert listening.texts.count(EARLY) == 1
        ends = check_end(run)
        assert ends["step"].to_list() == [3] * NODES
        assert ends["test_loss"].max() < run.metrics.filter(moment="round")["test_loss"].min()
        rows.append(ends)
    simulated, real = rows
    filled = [[name for name in ends.columns if ends[name].count()] for ends in rows]
    assert filled[0] == filled[1]
    columns = ["node", "round", "step", "moment", "train_loss", "test_loss", "bytes_sent"]
    assert simulated.select(columns).equals(real.select(columns))


@pytest.mark.parametrize("engine", ENGINES)
def test_early_and_completed_nodes_are_recorded_together(tmp_path: Path, engine: str) -> None:
    run = play(tmp_path, engine, Listening(), {"rounds": ROUNDS}, first=1)
    assert check_end(run)["round"].to_list() == [3, *[ROUNDS] * 3]
    assert early(run) == [EARLY]


@pytest.mark.parametrize("engine", ENGINES)
def test_sleeping_node_is_recorded_when_the_run_ends_by_time(tmp_path: Path, engine: str) -> None:
    run = play(tmp_path, engine, Listening(), {"rounds": ROUNDS, "time_s": 1.0}, first=1, sleeps=True)
    rounds = check_end(run)["round"].to_list()
    assert rounds == [3, *[ROUNDS] * 3] or engine == "processes"  # (which may be slower)
    assert early(run) == []  # node 0 had not returned


@pytest.mark.parametrize("engine", ENGINES)
def test_completed_run_has_no_separate_end_rows(tmp_path: Path, engine: str) -> None:
    run = play(tmp_path, engine, Listening(), {"rounds": ROUNDS}, first=0)
    assert set(run.metrics["moment"]) == {"round"}
    assert early(run) == []
