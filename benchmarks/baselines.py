"""The loop that one would write oneself: a module and an optimizer a node, plain PyTorch, its defaults, no communication."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from gossamer.tasks import load_task
from gossamer.tasks.digits import Digits


def independent_loops(nodes: int, rounds: int, batch_size: int = 16, lr: float = 0.05) -> Callable[[], float]:
    """Seconds of ``rounds`` steps on each of ``nodes`` models, each on its own share of digits."""
    task = load_task(Digits(), None, 1)
    inputs, targets = task.train
    shares = np.array_split(np.random.default_rng(0).permutation(len(inputs)), nodes)

    def once() -> float:
        models = [task.model() for _ in range(nodes)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model in models]
        draw = np.random.default_rng(1)
        start = time.perf_counter()
        for _ in range(rounds):
            for model, optimizer, share in zip(models, optimizers, shares, strict=True):
                batch = torch.from_numpy(draw.choice(share, batch_size))
                optimizer.zero_grad()
                task.loss(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()
        return time.perf_counter() - start

    return once
