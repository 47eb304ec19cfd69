"""Small scripted protocols under the simulator: a test gives the script of every node and sees the result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float
from torch import Tensor

from gossamer import Experiment, Node, Run, run
from gossamer.algorithms import Algorithm
from gossamer.results.observer import Observer
from gossamer.runtime.setup import prepare

FEATURES = 3
"""P, the length of the least-squares task's parameter vector."""
LR = 0.1
MBPS = 8.0
"""A bandwidth of 10^6 bytes per second: a byte takes a microsecond."""

Script = Callable[[Node], Awaitable[Any]]

# Components hold data only, so they refer to scripts by index.
_scripts: list[tuple[Script, dict[int, Any]]] = []


class Scripted(Algorithm):
    """Runs the coroutine function of a test on every node, and keeps its return values."""

    tolerates_sampling: ClassVar[bool] = True
    mixes_models: ClassVar[bool] = True

    script: int
    limit: int = 2**40

    async def run(self, node: Node) -> None:
        script, values = _scripts[self.script]
        values[node.rank] = await script(node)

    def message_limit(self, P: int, nodes: int) -> int:
        return self.limit


@dataclass
class Played:
    """The result of a script: its return value on each rank, and the recorded run."""

    values: dict[int, Any]
    run: Run


def experiment(script: Script, nodes: int = 2, *, limit: int = 2**40, **fields: Any) -> Experiment:
    """Least squares with ``FEATURES`` parameters, full batches, one second per step, and free links."""
    _scripts.append((script, {}))
    defaults: dict[str, Any] = {
        "nodes": nodes,
        "task": {"name": "least-squares", "features": FEATURES, "samples": 8 * nodes, "test_samples": 20},
        "topology": "complete" if nodes > 1 else {"name": "complete", "allow_disconnected": True},
        "optimizer": {"name": "sgd", "lr": LR},
        "batch_size": "full",
        "compute": {"name": "constant", "seconds_per_step": 1.0},
        "evaluation": {"every_rounds": None},
        "stop": {"rounds": 1},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    algorithm = Scripted(script=len(_scripts) - 1, limit=limit)
    return Experiment.of({**defaults, "algorithm": algorithm, **fields})


def play(
    out: Path, script: Script, nodes: int = 2, *, observer: Observer | None = None, **fields: Any
) -> Played:
    """Run a script on every node; ``fields`` replace those of :func:`experiment`."""
    described = experiment(script, nodes, **fields)
    recorded = run(described, out, observer=observer, command=["test"])
    return Played(_scripts[-1][1], recorded)


def data(
    described: Experiment, rank: int
) -> tuple[Float[np.ndarray, "samples features"], Float[np.ndarray, " samples"]]:
    """A node's training data in double precision: inputs and targets."""
    setup = prepare(described)
    inputs, targets = setup.task.train
    chosen = setup.parts[rank]
    return inputs.double().numpy()[chosen], targets.double().numpy()[chosen, 0]


def slope(
    x: Float[np.ndarray, "samples features"], y: Float[np.ndarray, " samples"], w: Any
) -> Float[np.ndarray, " features"]:
    """The gradient of ||X w - y||^2 / 2S."""
    return np.asarray(x.T @ (x @ wide(w) - y) / len(y))


def descend(
    x: Float[np.ndarray, "samples features"],
    y: Float[np.ndarray, " samples"],
    w: Any,
    steps: int,
    lr: float = LR,
) -> Float[np.ndarray, " features"]:
    """Full-batch gradient descent from ``w``."""
    w = wide(w)
    for _ in range(steps):
        w = w - lr * slope(x, y, w)
    return w


def wide(w: Any) -> Float[np.ndarray, "..."]:
    """A vector in double precision."""
    return w.double().numpy() if isinstance(w, Tensor) else np.asarray(w, dtype=np.float64)
