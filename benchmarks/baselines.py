"""The loop that users would write: plain, fair PyTorch, with a module and an optimizer for each node."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.cores import cores
from gossamer.runtime.setup import Setup
from gossamer.tasks.task import Task


def loop(
    setup: Setup, rounds: int, *, mixing: bool, threads: int, device: str = "cpu"
) -> Callable[[], float]:
    """Measures the seconds of ``rounds`` steps of every node, each with one ``nn.Module`` and one
    ``torch.optim.SGD``.

    Args:
        setup: the experiment's data, parts and graph.
        rounds: steps of each node.
        mixing: average with the neighbours after each step, as a plain weighted sum of state dicts.
        threads: torch's threads.
        device: holds models and data.
    """
    task, nodes = setup.task, setup.experiment.nodes
    inputs, targets = (part.to(device) for part in task.train)
    graph = setup.topology.graph(0)
    neighbours = [graph.neighbors(rank) for rank in range(nodes)]

    def measure() -> float:
        torch.set_num_threads(threads)
        rng = np.random.default_rng(1)
        models = [task.model().to(device) for _ in range(nodes)]
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=setup.experiment.optimizer.lr) for model in models
        ]
        start = time.perf_counter()
        for _ in range(rounds):
            for model, optimizer, part in zip(models, optimizers, setup.parts, strict=True):
                batch = torch.from_numpy(rng.choice(part, setup.experiment.batch_size)).to(device)
                optimizer.zero_grad()
                task.loss(model(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if mixing:
                _mix(models, neighbours)
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return measure


def evaluating(task: Task, nodes: int) -> Callable[[], float]:
    """Measures the seconds for the loss and the metrics of many modules on the test set, in batches of a
    hundred, on all cores.

    Args:
        task: has the test set, the loss and the metrics.
        nodes: number of modules.
    """
    metrics = [task.loss, *task.metrics.values()]
    batches = list(zip(*(torch.split(part, 100) for part in task.test), strict=True))
    models = [task.model().eval() for _ in range(nodes)]

    @torch.no_grad()
    def measure() -> float:
        torch.set_num_threads(cores())
        start = time.perf_counter()
        for model in models:
            totals = [0.0] * len(metrics)
            for inputs, targets in batches:
                outputs = model(inputs)
                for number, metric in enumerate(metrics):
                    totals[number] += float(metric(outputs, targets)) * len(inputs)
        return time.perf_counter() - start

    return measure


@torch.no_grad()
def _mix(models: list[nn.Module], neighbours: list[tuple[int, ...]]) -> None:
    before: list[list[Tensor]] = [[p.clone() for p in model.parameters()] for model in models]
    for rank, model in enumerate(models):
        weight = 1 / (len(neighbours[rank]) + 1)
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(sum(before[peer][number] for peer in neighbours[rank]) * weight)  # type: ignore[arg-type]
            parameter.add_(before[rank][number], alpha=weight)
