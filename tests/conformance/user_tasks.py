"""Tasks as a user writes them: outside the package, named "user_tasks:function" or "user_tasks:Class"."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer import Task
from gossamer.randomness import generator
from gossamer.tasks.task import TaskSource

FEATURES = 6


def half_mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().mean()


def _data(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = generator(seed, "user-task")
    x = rng.standard_normal((samples, FEATURES)).astype("float32")
    y = x @ rng.standard_normal((FEATURES, 1)).astype("float32")
    return torch.from_numpy(x), torch.from_numpy(y)


class Plane(TaskSource):
    """A linear regression as a class."""

    samples: int = 40

    def load(self, data_root: Path | None, seed: int) -> Task:
        return Task(
            model=lambda: nn.Linear(FEATURES, 1, bias=False),
            train=_data(self.samples, seed),
            test=_data(20, seed + 1),
            loss=half_mean_square,
            metrics={"spread": lambda outputs, targets: (outputs - targets).abs().mean()},
        )


def batch_norm(samples: int = 64) -> Task:
    """A model with buffers."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    return Task(model=model, train=_data(samples, 1), test=_data(20, 2), loss=half_mean_square)


def frozen(samples: int = 64) -> Task:
    """A model with 9 trained values behind about 15,000 frozen ones."""

    def model() -> nn.Module:
        features = nn.Sequential(nn.Linear(FEATURES, 1000), nn.Tanh(), nn.Linear(1000, 8, bias=False))
        return nn.Sequential(features.requires_grad_(False), nn.Linear(8, 1))

    return Task(model=model, train=_data(samples, 1), test=_data(20, 2), loss=half_mean_square)


def poisoned(samples: int = 40, owners: int = 4, bad: int = 2) -> Task:
    """A loss that raises on one sample of one owner, which has neither the highest nor the lowest target."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        # A branch on a value fails under vmap: for the sequential trainer only.
        if bool((targets == 0).any()):
            raise OverflowError("a target beyond all measure")
        return half_mean_square(outputs, targets)

    x, y = _data(samples, 1)
    groups = torch.arange(samples) % owners
    y[samples - owners + bad] = 0.0
    return Task(
        model=lambda: nn.Linear(FEATURES, 1), train=(x, y), test=_data(20, 2), loss=loss, groups=groups
    )


def refuses_to_fork() -> Task:
    """A model that can be made only in the process that loads the data."""
    home = os.getpid()

    def model() -> nn.Module:
        if os.getpid() != home:
            raise ConnectionError("the licence server is down")
        return nn.Linear(FEATURES, 1)

    return Task(model=model, train=_data(40, 1), test=_data(20, 2), loss=half_mean_square)


def touchy(samples: int = 40) -> Task:
    """A metric that raises on large outputs."""

    def within(outputs: Tensor, targets: Tensor) -> Tensor:
        if not bool((outputs.abs() < 1e5).all()):
            raise OverflowError("an output beyond all measure")
        return (outputs - targets).abs().mean()

    return Task(
        model=lambda: nn.Linear(FEATURES, 1),
        train=_data(samples, 1),
        test=_data(20, 2),
        loss=half_mean_square,
        metrics={"within": within},
    )


def thoughtful(seconds: float = 5.0) -> Task:
    """A slow metric, except for the first model that a process evaluates."""
    evaluated = 0

    def patience(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal evaluated
        evaluated += 1
        if evaluated > 1:
            time.sleep(seconds)
        return (outputs - targets).abs().mean()

    return Task(
        model=lambda: nn.Linear(FEATURES, 1),
        train=_data(40, 1),
        test=_data(20, 2),
        loss=half_mean_square,
        metrics={"patience": patience},
    )


def raises() -> Task:
    """A task function that raises."""
    raise ZeroDivisionError("the shelf is empty")


def slow_to_fork(folder: str, seconds: float = 3.0) -> Task:
    """A first model that is slow, and leaves a file, in any process but the one that loads the data."""
    home = os.getpid()

    def model() -> nn.Module:
        note = Path(folder) / f"starting-{os.getpid()}"
        if os.getpid() != home and not note.exists():
            note.touch()
            time.sleep(seconds)
        return nn.Linear(FEATURES, 1)

    return Task(model=model, train=_data(40, 1), test=_data(20, 2), loss=half_mean_square)
