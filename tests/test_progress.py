from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import Experiment, Observer, RunFailed, progress
from gossamer.config import Processes, Simulate
from gossamer.progress import Display, Lines, watching
from gossamer.runtime.recording import NETWORK


def described(stop: dict[str, float]) -> Experiment:
    return Experiment.of(
        {"name": "t", "nodes": 4, "task": "digits", "algorithm": "d-psgd", "stop": stop}
        | {"optimizer": {"name": "sgd", "lr": 0.1}, "topology": "ring"}
    )


def tally(stop: dict[str, float]) -> Display:
    display = Display(described(stop))
    display.wall_s = 30.0
    return display


def test_progress_follows_nearest_stop_rule() -> None:
    assert tally({"rounds": 10}).share(rounds=20, time_s=1.0) == 0.5
    assert tally({"time_s": 8}).share(rounds=20, time_s=2.0) == 0.25
    assert tally({"rounds": 10, "time_s": 8}).share(rounds=20, time_s=6.0) == 0.75
    assert tally({"rounds": 10}).share(rounds=99, time_s=0.0) == 1.0


def test_remaining_time_is_extrapolated_after_start_up() -> None:
    display = tally({"rounds": 10})
    assert display.left(0.25) == "90 s left"
    assert display.left(1.0) == "0 s left"
    # The thirty seconds so far were the start-up.
    assert display.left(0.01) == ""
    assert display.left(0.0) == ""


def row(node: int, round: int, moment: str, **values: float) -> dict[str, Any]:
    return {
        "node": node,
        "round": round,
        "moment": moment,
        "time_s": 2.0,
        "wall_s": 40.0,
        "network_bytes": 1_000_000 * round,
        **values,
    }


@pytest.mark.parametrize(("moment", "rounds"), [("round", [5, 5]), ("tick 3", [7, 5]), ("end", [7, 5])])
def test_line_summarizes_all_nodes_at_one_evaluation(
    moment: str, rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(described({"rounds": 10}))
    lines.row(row(0, rounds[0], moment, test_accuracy=0.5))
    lines.row(row(1, 5, "tick 4", test_accuracy=0.0))  # belongs to a later line
    lines.row(row(1, rounds[1], moment, test_accuracy=0.7, train_loss=1.0))
    assert capsys.readouterr().err == ""
    lines.row(row(NETWORK, 5, moment, consensus_distance=0.25))
    sent = "5 MB" if moment == "round" else "7 MB"
    assert capsys.readouterr().err == (
        "round 5  virtual time 2 s  wall time 40.0 s  test accuracy 0.6000 (0.5000 to 0.7000)"
        f"  consensus distance 0.25  {sent} sent  40 s left\n"
    )


def test_time_of_a_line_is_that_of_the_server_and_not_of_its_clients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines(described({"rounds": 10}))
    lines.start({"nodes": 2, "parameters": 5, "outcome_ranks": [1]})
    lines.row(row(0, 5, "round", train_loss=1.0) | {"time_s": 0.0})
    lines.row(row(1, 5, "round", test_accuracy=0.7))
    lines.row(row(NETWORK, 5, "round"))
    assert capsys.readouterr().err.splitlines()[-1].startswith("round 5  virtual time 2 s  wall time")


def test_line_has_the_bytes_of_the_network_and_the_last_one_no_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines(described({"rounds": 10}))
    for round, nodes in ((5, 4), (10, 1)):
        for node in range(nodes):
            lines.row(row(node, round, "round", test_accuracy=0.5))
        lines.progress(rounds=20 + round - 5, time_s=2.0)
        lines.row(row(NETWORK, round, "round", consensus_distance=0.25))
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("5 MB sent  40 s left")
    assert last.endswith("10 MB sent  0 s left")


def test_lost_nodes_count_as_mean_progress_of_others(tmp_path: Path) -> None:
    class Rounds(Observer):
        def __init__(self) -> None:
            self.shares: list[int] = []

        def progress(self, rounds: int, time_s: float) -> None:
            self.shares.append(rounds)

    for engine in ("simulate", "processes"):
        experiment = Experiment.of(
            {
                "nodes": 4,
                "task": {"name": "least-squares", "features": 5, "samples": 80, "test_samples": 20},
                "algorithm": "d-psgd",
                "topology": "complete",
                "optimizer": {"name": "sgd", "lr": 0.01},
                "compute": {"name": "constant", "seconds_per_step": 0.1},
                "gather": {"lost_peer": "skip"},
                "faults": [{"name": "crash", "nodes": [2, 3], "at_round": 2}],
                "failures": {"detection_s": 0.1},
                "stop": {"rounds": 20},
                "engine": {"name": engine, **({"pace": True} if engine == "processes" else {})},
            }
        )
        seen = Rounds()
        assert gossamer.run(experiment, tmp_path / engine, observer=seen).status == "done"
        assert max(seen.shares) > 4 * 17


class Ends(Observer):
    """Ends the run once all nodes together have completed ten rounds."""

    def progress(self, rounds: int, time_s: float) -> None:
        self.stopping = rounds >= 10


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_observer_stops_run_in_another_thread(tmp_path: Path, engine: str) -> None:
    experiment = described({"rounds": 1_000_000}).model_copy(
        update={"engine": Simulate() if engine == "simulate" else Processes()}
    )
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(gossamer.run, experiment, tmp_path, observer=Ends()).result()
    assert run.status == "stopped"
    assert run.parameters is not None


def test_concurrent_runs_give_same_bits(tmp_path: Path) -> None:
    experiment = described({"rounds": 3}).model_copy(update={"engine": Simulate()})
    with ThreadPoolExecutor(3) as threads:
        runs = list(threads.map(lambda k: gossamer.run(experiment, tmp_path / str(k)), range(3)))
    alone = gossamer.run(experiment, tmp_path / "alone")
    assert alone.parameters is not None
    for run in runs:
        assert run.parameters is not None
        assert torch.equal(run.parameters, alone.parameters)


def test_failed_run_clears_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "on_live_terminal", lambda: True)

    def fails() -> None:
        with watching(described({"rounds": 3})) as bar:
            bar.progress(4, 1.0)
            raise RunFailed("it fails")

    with pytest.raises(RunFailed):
        fails()
    assert capsys.readouterr().err.rpartition("\r")[2] == ""
