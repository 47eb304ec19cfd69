"""Local variables that a resumed run would lose are said, once, where a checkpoint is asked for; under both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import Experiment
from gossamer.api import Silent

SETTINGS: dict[str, Any] = {
    "nodes": 3,
    "task": {"name": "least-squares", "features": 5, "samples": 60, "test_samples": 20},
    "topology": "complete",
    "batch_size": 6,
    "optimizer": {"name": "sgd", "lr": 0.05},
    "checkpoint": {"every_rounds": 4, "keep": 100},
    "evaluation": {"every_rounds": None},
    "stop": {"rounds": 4},
}


class Listener(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def settings(engine: str, kept: str, **changes: Any) -> Experiment:
    return Experiment.of(
        {
            **SETTINGS,
            "algorithm": {"name": "user_algorithms:Heavy", "kept": kept},
            "engine": {"name": engine, "trainer": "sequential"},
            **changes,
        }
    )


@pytest.mark.parametrize("engine", ["simulate", "processes"])
@pytest.mark.parametrize("kept", ["locals", "state"])
def test_what_a_resumed_run_loses_is_said(tmp_path: Path, engine: str, kept: str) -> None:
    listener = Listener()
    whole = gossamer.run(settings(engine, kept, stop={"rounds": 8}), tmp_path)
    half = gossamer.run(settings(engine, kept), tmp_path, observer=listener)
    details = half.events.filter(event="unsaved")["detail"].to_list()
    resumed = gossamer.resume(half.path, ["stop.rounds=8"])
    assert whole.parameters is not None
    assert resumed.parameters is not None
    lost = not torch.equal(whole.parameters, resumed.parameters)
    warnings = [text for text in listener.said if text.startswith("checkpoint: ")]
    assert details == warnings
    assert lost == bool(warnings) == (kept == "locals")
    if lost:
        [warning] = warnings
        assert warning.startswith(
            "checkpoint: momentum, recent, seen, steps, drawn, noise (user_algorithms.py, line "
        )


@pytest.mark.parametrize("asked", [True, False])
def test_nothing_is_said_where_nothing_is_lost(tmp_path: Path, asked: bool) -> None:
    """Of variables that refer to the node's model or hold what can't be saved; and of any without a checkpoint."""
    described = settings("simulate", "nothing") if asked else settings("simulate", "locals", checkpoint={})
    run = gossamer.run(described, tmp_path)
    assert run.events.filter(event="unsaved").is_empty()
