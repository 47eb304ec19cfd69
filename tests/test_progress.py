from __future__ import annotations

from typing import Any

import pytest

from gossamer import Experiment
from gossamer.progress import Display, Lines
from gossamer.runtime.recording import NETWORK


def described(stop: dict[str, float]) -> Experiment:
    return Experiment.of(
        {"name": "t", "nodes": 4, "task": "digits", "algorithm": "d-psgd", "stop": stop}
        | {"optimizer": {"name": "sgd", "lr": 0.1}, "topology": "ring"}
    )


def tally(stop: dict[str, float]) -> Display:
    said = Display(described(stop))
    said.wall_s = 30.0
    return said


def test_what_is_done_goes_by_the_stop_rule_that_is_nearer() -> None:
    assert tally({"rounds": 10}).share(rounds=20, time_s=1.0) == 0.5
    assert tally({"time_s": 8}).share(rounds=20, time_s=2.0) == 0.25
    assert tally({"rounds": 10, "time_s": 8}).share(rounds=20, time_s=6.0) == 0.75
    assert tally({"rounds": 10}).share(rounds=99, time_s=0.0) == 1.0


def test_the_rest_takes_in_proportion_once_enough_is_done_to_tell() -> None:
    said = tally({"rounds": 10})
    assert said.left(0.25) == "90 s left"
    assert said.left(1.0) == "0 s left"
    # The thirty seconds until here were the start-up.
    assert said.left(0.01) == ""
    assert said.left(0.0) == ""


def row(node: int, round: int, moment: str, **values: float) -> dict[str, Any]:
    return {
        "node": node,
        "round": round,
        "moment": moment,
        "time_s": 2.0,
        "wall_s": 40.0,
        "bytes_sent": 500_000 * round,
        **values,
    }


@pytest.mark.parametrize(("moment", "rounds"), [("round", [5, 5]), ("tick 3", [7, 5]), ("end", [7, 5])])
def test_a_line_summarizes_all_nodes_at_one_evaluation_point(
    moment: str, rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(described({"rounds": 10}))
    lines.row(row(0, rounds[0], moment, test_accuracy=0.5))
    lines.row(row(1, 5, "tick 4", test_accuracy=0.0))  # belongs to a later line
    lines.row(row(1, rounds[1], moment, test_accuracy=0.7, train_loss=1.0))
    assert capsys.readouterr().err == ""
    lines.row(row(NETWORK, 5, moment, consensus_distance=0.25))
    sent = "5 MB" if moment == "round" else "6 MB"
    assert capsys.readouterr().err == (
        "round 5  virtual time 2 s  wall time 40.0 s  test accuracy 0.6000 (0.5000 to 0.7000)"
        f"  consensus distance 0.25  {sent} sent\n"
    )
