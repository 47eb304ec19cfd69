"""Preparation of a run: invalid input is refused before any work starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import SMALL
from gossamer import Algorithm, BadInput, Experiment, Node, Task
from gossamer.runtime import setup
from gossamer.runtime.setup import prepare


class NoAlgorithm:
    """Not a subclass of Algorithm."""


class NotAsync(Algorithm):
    def run(self, node: Node) -> Any:
        return None


class Yields(Algorithm):
    async def run(self, node: Node) -> Any:
        yield node


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (NotAsync, "run() is not async, or has a yield"),
        (Yields, "run() is not async, or has a yield"),
    ],
)
def test_algorithm_run_must_be_a_coroutine(algorithm: type, reason: str) -> None:
    name = f"{algorithm.__module__}:{algorithm.__qualname__}"
    with pytest.raises(BadInput, match="accepted: async def run") as caught:
        prepare(Experiment.parse(SMALL, [f"algorithm={{name: '{name}'}}"]))
    assert str(caught.value).startswith(f"algorithm: '{name}': {reason}")


def play(node: Node) -> None:
    """A function in place of an algorithm."""


@pytest.mark.parametrize("algorithm", [NoAlgorithm, play])
def test_algorithm_must_be_a_subclass_of_algorithm(algorithm: Any) -> None:
    name = f"{algorithm.__module__}:{algorithm.__qualname__}"
    with pytest.raises(BadInput) as caught:
        Experiment.parse(SMALL, [f"algorithm={{name: '{name}'}}"])
    assert str(caught.value).startswith(f"algorithm '{name}': ")
    assert str(caught.value).endswith("; accepted: a subclass of gossamer's Algorithm")


def no_module() -> nn.Module:
    return None  # type: ignore[return-value]


def broken() -> nn.Module:
    raise ZeroDivisionError("no layers")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            no_module,
            "task.model: returns NoneType; accepted: a function that returns a fresh nn.Module at each call",
        ),
        (
            broken,
            r"task.model: ZeroDivisionError: no layers \(test_setup.py, line \d+\); accepted: a function that .*",
        ),
    ],
)
def test_model_factory_must_return_a_module(
    model: Callable[[], nn.Module], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = torch.zeros(8, 2), torch.zeros(8, 1)
    task = Task(model=model, train=pair, test=pair, loss=nn.functional.mse_loss)
    monkeypatch.setattr(setup, "load_task", lambda *_: task)
    with pytest.raises(BadInput, match=f"^{message}$"):
        prepare(Experiment.parse(SMALL))


def test_nodes_without_neighbours_are_named(tmp_path: Path) -> None:
    """A file whose ranks count from 1."""
    path = tmp_path / "edges.txt"
    path.write_text("1 2\n2 3\n3 4\n4 5\n5 1\n")
    fields: dict[str, Any] = {"nodes": 6, "task": "digits", "algorithm": "d-psgd", "stop": {"rounds": 1}}
    topology = {"name": "edge-list", "path": str(path), "allow_disconnected": True}
    notes = prepare(Experiment(**fields, topology=topology)).notes()
    assert "topology: nodes without neighbours: 0 (ranks count from 0)" in notes
    assert not any("neighbours" in note for note in prepare(Experiment(**fields, topology="ring")).notes())
    local = prepare(Experiment(**{**fields, "algorithm": "local"}, topology=topology)).notes()
    assert not any("neighbours" in note for note in local)
