"""What a node computes on its samples: the jobs, and what becomes of their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from gossamer.learning.batches import BatchStream
from gossamer.learning.computation import ApplyJob, Computation, ComputationKind, EvaluateJob
from gossamer.learning.trainer import GradientJob, TrainJob, TrainResult
from gossamer.messages.tags import Model
from gossamer.node.host import Host
from gossamer.node.model import OwnModel
from gossamer.node.setup import NodeSetup
from gossamer.randomness import torch_seed


class Learner:
    """One node's computations; the engine carries them out.

    Args:
        setup: the node.
        host: the engine.
        own: the model that steps are taken with.
        learned: told of the mean loss of steps that are committed, if they have one.
    """

    def __init__(self, setup: NodeSetup, host: Host, own: OwnModel, learned: Callable[[float], None]) -> None:
        self._setup, self._host, self._own, self._learned = setup, host, own, learned
        self._batches = BatchStream(setup.seed, setup.rank, setup.samples, setup.batch_size)

    async def train(self, first: int, steps: int, lr: float) -> float:
        """Take some local steps from the model as it is, of which the first has this number; gives their mean loss."""
        start = self._own.snapshot()
        batches = [self._batches.batch(first + k) for k in range(steps)]
        seed = self._seed(first)
        loss = await self._step(
            ComputationKind.TRAIN,
            start,
            lambda state: TrainJob(start, batches, lr, state, seed),
            first,
            steps,
        )
        return float(loss)

    async def apply(self, step: int, start: Model, gradient: Tensor, lr: float) -> None:
        """Take one step from the model as it is with a gradient [P]."""
        await self._step(
            ComputationKind.APPLY, start, lambda state: ApplyJob(start, gradient, lr, state), step, 0
        )

    async def _step(
        self, kind: ComputationKind, start: Model, job: Callable[[Any], Any], first: int, work: float
    ) -> float:
        """Have steps taken; gives their loss.

        Args:
            kind: what is computed.
            start: the model as it is now.
            job: makes it, given the optimizer's state, which earlier steps may still change.
            first: the number of the first step.
            work: how many steps it is worth.
        """
        own, before, reset = self._own, self._own.writes, self._own.take_reset()

        def commit(result: TrainResult) -> float:
            own.commit(result, start, before)
            if result.loss == result.loss:
                self._learned(result.loss)
            return result.loss

        try:
            loss: float = await self._compute(
                kind, lambda: job(own.state_for(start, reset)), commit, first, work
            )
        except asyncio.CancelledError:
            own.reset |= reset  # the next step that is asked for starts afresh instead
            raise
        return loss

    def indices(self, batch: int | Sequence[int] | Literal["full"]) -> Int[Tensor, " batch"]:
        """The samples of a batch of the stream, all of the node's samples, or some of them by position."""
        if isinstance(batch, int):
            return self._batches.batch(batch)
        own = torch.from_numpy(self._setup.samples)
        return own if batch == "full" else own[torch.tensor(list(batch), dtype=torch.int64)]

    async def gradient(self, step: int, model: Model, indices: Int[Tensor, " batch"]) -> Tensor:
        """The mean gradient [P] over some samples."""
        seed = self._seed(step)
        gradient: Tensor = await self._compute(
            ComputationKind.GRADIENT, lambda: GradientJob(model, indices, seed), lambda found: found, step, 1
        )
        return gradient

    async def evaluate(self, step: int, model: Model, on: str) -> dict[str, float]:
        """Evaluate a model on an evaluation set, or on the node's training samples (``train``)."""
        job = EvaluateJob(model, on, self._setup.samples)
        known = {**self._setup.test_samples, "train": len(self._setup.samples)}
        if on not in known:
            raise ValueError(f"evaluate(on={on!r}): accepted: {', '.join(known)}")
        samples = known[on]
        # A forward pass is about a third of a step's work.
        work = samples / max(self._batches.batch_size, 1) / 3
        result: dict[str, float] = await self._compute(
            ComputationKind.EVALUATE, lambda: job, lambda found: found, step, work
        )
        return result

    def _seed(self, step: int) -> int:
        return torch_seed(self._setup.seed, "train", self._setup.rank, step)

    async def _compute(
        self,
        kind: ComputationKind,
        prepare: Callable[[], Any],
        commit: Callable[[Any], Any],
        first: int,
        work: float,
    ) -> Any:
        return await self._host.compute(Computation(kind, self._setup.rank, first, work, prepare, commit))
