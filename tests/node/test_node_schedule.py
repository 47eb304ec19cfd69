"""Node: the learning rate over the rounds under the optimizer's schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer import Node
from gossamer.learning.learning_rate import CosineLearningRate
from scenario import LR, data, experiment, play, slope, wide

SCHEDULE = CosineLearningRate(rounds=5, warmup_rounds=2)
COSINE = {"name": "sgd", "lr": LR, "schedule": SCHEDULE}


async def rates(node: Node) -> list[float]:
    """The learning rate in each round; the node assigns one in round 3."""
    seen = []
    async for r in node.rounds():
        seen.append(node.lr)
        if r == 3:
            node.lr = 0.5
            await node.train()
            seen.append(node.lr)
    return seen


def test_learning_rate_follows_the_schedule_each_round(tmp_path: Path) -> None:
    played = play(tmp_path, rates, optimizer=COSINE, stop={"rounds": 8})
    scheduled = [LR * SCHEDULE.factor_at(r) for r in range(8)]
    assert played.values == {rank: [*scheduled[:4], 0.5, *scheduled[4:]] for rank in range(2)}


def test_assigned_learning_rate_stays_without_a_schedule(tmp_path: Path) -> None:
    played = play(tmp_path, rates, stop={"rounds": 6})
    assert played.values == {rank: [LR] * 4 + [0.5] * 3 for rank in range(2)}


@pytest.mark.parametrize("trainer", ["sequential", "batched"])
def test_training_steps_use_the_scheduled_learning_rate(tmp_path: Path, trainer: str) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        async for _ in node.rounds():
            await node.train(2)
        return start, node.parameters

    fields: dict[str, Any] = {
        "optimizer": {"name": "sgd", "lr": LR, "schedule": {"name": "exponential", "factor": 0.7}},
        "engine": {"name": "simulate", "trainer": trainer},
        "stop": {"rounds": 4},
    }
    played = play(tmp_path, script, **fields)
    for rank, (start, after) in played.values.items():
        x, y = data(experiment(script, **fields), rank)
        w = wide(start)
        for r in range(4):
            for _ in range(2):
                w = w - LR * 0.7**r * slope(x, y, w)
        np.testing.assert_allclose(wide(after), w, rtol=1e-5, atol=1e-6)
