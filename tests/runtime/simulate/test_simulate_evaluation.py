"""Records of models that are evaluated together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

import gossamer
from gossamer import Experiment
from gossamer.results.observer import Observer

DIGITS: dict[str, Any] = {
    "nodes": 6,
    "task": {"name": "digits", "model": {"name": "mlp", "hidden": [12]}},
    "topology": "ring",
    "algorithm": "d-psgd",
    "evaluation": {"every_rounds": 1, "samples": 130},
    "stop": {"rounds": 2},
}


class Listening(Observer):
    """Keeps all messages to the user."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def play(out: Path, observer: Listening | None = None, **changes: Any) -> gossamer.Run:
    return gossamer.run(Experiment.of({**DIGITS, **changes}), out, observer=observer)


def test_auto_trainer_is_recorded_by_its_real_name(tmp_path: Path) -> None:
    observer = Listening()
    first = play(tmp_path, observer)
    assert first.experiment["engine"]["trainer"] == "fused"
    assert "trainer: fused" in observer.texts
    again = gossamer.run(Experiment.load(first.path / "experiment.yaml"), tmp_path)
    assert_frame_equal(first.metrics.drop("wall_s"), again.metrics.drop("wall_s"), check_exact=True)


@pytest.mark.parametrize("nodes", ["all", "average"])
def test_both_evaluators_agree(tmp_path: Path, nodes: str) -> None:
    settings: dict[str, Any] = {"evaluation": {"every_rounds": 1, "samples": 130, "nodes": nodes}}
    sequential, batched = (
        play(tmp_path, **settings, engine={"trainer": trainer}) for trainer in ("sequential", "batched")
    )
    columns = ["node", "round", "test_loss", "test_accuracy"]
    assert_frame_equal(sequential.metrics.select(columns), batched.metrics.select(columns), rel_tol=1e-4)


@pytest.mark.parametrize("limit", [{"bytes": 60_000}, {"bytes_per_node": 10_000, "bytes": 1e9}])
def test_run_ends_at_its_byte_limit(tmp_path: Path, limit: dict[str, Any]) -> None:
    run = play(tmp_path, stop=limit)
    sent = run.metrics.filter(node=0)["bytes_sent"].to_list()
    a_round = sent[1] - sent[0]  # by each of six nodes
    total = run.metrics.filter(run.metrics["node"] >= 0).group_by("node").last()["bytes_sent"].sum()
    assert run.status == "done"
    assert 60_000 <= total < 60_000 + 6 * a_round
    assert "end" in run.metrics["moment"].to_list()[-1]
