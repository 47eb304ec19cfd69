"""Computations of a node, as engines see them: the job, and what commits its result.

An engine decides when a computation runs and when its result is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from gossamer.learning.batched_evaluate import BatchedEvaluator
from gossamer.learning.evaluate import Evaluator, Found
from gossamer.learning.optimizer import State
from gossamer.learning.trainer import Trainer, TrainResult
from gossamer.messages.tags import Model


class ComputationKind(Enum):
    """Computations of one kind can share a batch."""

    TRAIN = "train"
    GRADIENT = "gradient"
    APPLY = "apply"
    EVALUATE = "evaluate"


@dataclass(eq=False, slots=True)
class Computation:
    """One await of a node that computes.

    Args:
        kind: decides which computations can share a batch.
        rank: the node.
        first_step: number of the node's first local step in it.
        work: its duration in local steps.
        prepare: returns the job; called when the node's earlier computations are done, since they hand on optimizer state.
        commit: takes the result at its due instant and returns the value of the await.
        cancelled: set when nobody waits for the result any more, which is then not committed.
    """

    kind: ComputationKind
    rank: int
    first_step: int
    work: float
    prepare: Callable[[], Any]
    commit: Callable[[Any], Any]
    cancelled: bool = False


@dataclass(frozen=True, eq=False)
class ApplyJob:
    """One optimizer step with a given gradient [P]."""

    start: Model
    gradient: Float[Tensor, " params"]
    lr: float
    state: State


@dataclass(frozen=True, eq=False)
class EvaluateJob:
    """Evaluation of a model on an evaluation set, or for ``train`` on a node's training samples (indices [n])."""

    model: Model
    on: str
    samples: Int[np.ndarray, " n"]


def execute(
    kind: ComputationKind, jobs: Sequence[Any], trainer: Trainer, evaluator: Evaluator | BatchedEvaluator
) -> list[Any]:
    """Run jobs of one kind; results in the jobs' order."""
    if kind is ComputationKind.TRAIN:
        return list(trainer.train(jobs))
    if kind is ComputationKind.GRADIENT:
        return list(trainer.gradient(jobs))
    if kind is ComputationKind.APPLY:
        return [_apply(job, trainer) for job in jobs]
    tested = {
        on: iter(evaluator.test_each([job.model for job in jobs if job.on == on], on))
        for on in dict.fromkeys(job.on for job in jobs)
        if on != "train"
    }
    return [
        evaluator.train(job.model, job.samples) if job.on == "train" else _given(next(tested[job.on]))
        for job in jobs
    ]


def _given(found: Found | Exception) -> Found:
    if isinstance(found, Exception):
        raise found
    return found


def _apply(job: ApplyJob, trainer: Trainer) -> TrainResult:
    parameters = trainer.rows.fresh()
    state = {name: value.clone() for name, value in job.state.items()}
    trainer.step(parameters, job.gradient.clone(), state, job.lr, job.start.parameters)
    return TrainResult(Model(parameters, job.start.buffers), state, float("nan"))
