from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gossamer.learning import trainer as module
from gossamer.learning.trainer import BatchedTrainer, Trainer, TrainJob, choose
from gossamer.messages.tags import Model


class Clock:
    """Time passes only while somebody trains."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Fake(Trainer):
    """A trainer that takes so many seconds for a call and for each of its jobs."""

    def __init__(self, kind: type[Any], clock: Clock, call_s: float, job_s: float, device_type: str) -> None:
        self.module = nn.Linear(2, 1)
        self.name, self.device_type = kind.name, device_type
        self._clock, self._call_s, self._job_s = clock, call_s, job_s

    def train(self, jobs: Any) -> Any:
        self._clock.now += self._call_s + self._job_s * len(jobs)
        return []

    def gradient(self, jobs: Any) -> Any:
        raise AssertionError("only steps are measured")


SLOW = (0.0, 0.005)
QUICK = (0.0, 0.0005)
TOGETHER = (0.001, 0.0001)


@pytest.mark.parametrize(
    ("sequential", "batched", "device", "chosen", "said"),
    [
        (QUICK, TOGETHER, "cpu", "batched", "batched 7.4 ms"),
        (QUICK, (0.001, 0.01), "cpu", "sequential", "a step of 4 nodes"),
        (SLOW, TOGETHER, "cpu", "sequential", "a step takes 5.0 ms"),
        (SLOW, TOGETHER, "cuda", "batched", "sequential 320.0 ms"),
    ],
    ids=[
        "together is faster",
        "together is slower",
        "nothing to save",
        "a GPU, where calls are what takes long",
    ],
)
def test_the_faster_one_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    sequential: tuple[float, float],
    batched: tuple[float, float],
    device: str,
    chosen: str,
    said: str,
) -> None:
    clock, made = Clock(), []

    def make(kind: type[Any]) -> Any:
        made.append(kind)
        return Fake(kind, clock, *(batched if kind is BatchedTrainer else sequential), device)

    monkeypatch.setattr(module, "time", clock)
    job = TrainJob(Model(torch.zeros(3), torch.zeros(0)), [torch.zeros(1, dtype=torch.int64)], 0.1, {}, 0)
    trainer, why = choose(make, [job] * 64)
    assert trainer.name == chosen
    assert said in why
    # What is chosen without a comparison costs none.
    assert (BatchedTrainer in made) == ("no comparison" not in why)
