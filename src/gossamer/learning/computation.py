"""Computations of a node. The engine decides when a computation runs and when its result is due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from jaxtyping import Int

from gossamer.learning.evaluate import Evaluator
from gossamer.learning.trainer import BatchedTrainer, SequentialTrainer, Trainer
from gossamer.messages.tags import Model


class ComputationKind(Enum):
    """Computations of one kind can share a batch."""

    TRAIN = "train"
    GRADIENT = "gradient"
    APPLY = "apply"
    EVALUATE = "evaluate"
    ENCODE = "encode"  # only takes time: the codec has already done the work


@dataclass(eq=False, slots=True)
class Computation:
    """One awaited computation of a node, which takes ``work`` local steps from the node's step ``first_step``
    on."""

    kind: ComputationKind
    rank: int
    first_step: int
    work: float
    prepare: Callable[[], Any]
    """Returns the job. Called when the node's earlier computations are done, since they pass on optimizer
    state."""
    commit: Callable[[Any], Any]
    """Takes the result when it is due, and returns the value of the await."""


@dataclass(frozen=True, eq=False)
class EvaluateJob:
    """Evaluation of a model on an evaluation set or, for ``train``, on a node's training samples (indices
    [n])."""

    model: Model
    on: str
    samples: Int[np.ndarray, " n"]


def execute(kind: ComputationKind, jobs: Sequence[Any], trainer: Trainer, evaluator: Evaluator) -> list[Any]:
    """Run jobs of one kind. Results are in the order of the jobs."""
    if kind is ComputationKind.TRAIN:
        return list(trainer.train(jobs))
    if kind is ComputationKind.GRADIENT:
        return list(trainer.gradient(jobs))
    if kind is ComputationKind.APPLY:
        return list(trainer.apply(jobs))
    if kind is ComputationKind.ENCODE:
        return [None] * len(jobs)
    results: dict[int, Any] = {}
    for on in dict.fromkeys(job.on for job in jobs):
        numbers = [number for number, job in enumerate(jobs) if job.on == on]
        if on == "train":
            results |= {n: evaluator.train(jobs[n].model, jobs[n].samples) for n in numbers}
        else:
            metrics = evaluator.test_each([jobs[n].model for n in numbers], on)
            results |= zip(numbers, metrics, strict=True)
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    return [results[number] for number in range(len(jobs))]


def trainer_of(name: str) -> type[Trainer]:
    """The class of a trainer."""
    if name == "fused":
        from gossamer.learning.fused.trainer import FusedTrainer

        return FusedTrainer
    return {kind.name: kind for kind in (SequentialTrainer, BatchedTrainer)}[name]
