from __future__ import annotations

from gossamer import Experiment
from gossamer.progress import Tally


def tally(stop: dict[str, float]) -> Tally:
    said = Tally(
        Experiment.of(
            {"name": "t", "nodes": 4, "task": "digits", "algorithm": "d-psgd", "stop": stop}
            | {"optimizer": {"name": "sgd", "lr": 0.1}, "topology": "ring"}
        )
    )
    said.wall = lambda: 30.0
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
