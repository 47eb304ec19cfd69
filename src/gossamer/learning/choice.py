"""Which trainer is the faster one, by measurement before the run: both have the same mathematics, not the same
bits, so that one of them computes all of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gossamer.learning.batched import BatchedTrainer, can_batch
from gossamer.learning.trainer import SequentialTrainer, Trainer, TrainJob

MEASURED_NODES = 64
"""The most nodes whose first batch is used to measure..."""
MEASURED_VALUES = 1_500_000
"""...and fewer of large models, of which a few take long enough to tell."""
BOUND_S = 0.0025
"""A step of one node that takes this many seconds on a CPU is bound by its arithmetic or its memory, as those of
convolutional networks are. Then the batched trainer is not measured, which would take half a second and more: it could save
the calls of some hundred tensor operations, half a millisecond where the machine is not busy."""
FEW = 4
MUCH = 1.4
"""If a few nodes take this many times as long in one trainer, that settles it."""
LONG_S = 0.5
"""Seconds that need no further measurement."""


def choose(make: Callable[[type[Trainer]], Trainer], jobs: Sequence[TrainJob]) -> tuple[Trainer, str]:
    """The trainer that takes less time for some jobs, and what was found, in words.

    Args:
        make: builds a trainer.
        jobs: one step of each of some nodes.
    """
    jobs = jobs[: max(8, MEASURED_VALUES // len(jobs[0].start.parameters))]
    sequential = make(SequentialTrainer)
    if len(jobs) < 2 or not can_batch(sequential.module):
        return sequential, ""
    for job in jobs[:FEW]:  # which records, as the first steps of every shape do
        sequential.train([job])
    alone = _seconds(sequential, jobs, 1)
    if sequential.device_type == "cpu" and alone > BOUND_S:
        return sequential, f"trainer: sequential (a step takes {alone * 1e3:.1f} ms; no comparison)"
    batched = make(BatchedTrainer)
    try:
        batched.train(jobs[:FEW])
    except RuntimeError as error:  # vmap can't run every model (one that draws random numbers, say)
        return sequential, f"trainer: sequential (batched can't run this model: {str(error).splitlines()[0]})"
    # Where a few nodes are much slower together (convolutions), so are many.
    for count in (min(FEW, len(jobs)), len(jobs)):
        seconds = {trainer: _seconds(trainer, jobs, count) for trainer in (sequential, batched)}
        if seconds[batched] > MUCH * seconds[sequential]:
            break
    best = min(seconds, key=lambda trainer: seconds[trainer])
    said = ", ".join(f"{trainer.name} {taken * 1e3:.1f} ms" for trainer, taken in seconds.items())
    return best, f"trainer: {best.name} (a step of {count} nodes: {said})"


def _seconds(trainer: Trainer, jobs: Sequence[TrainJob], count: int) -> float:
    """Seconds of this many jobs: other ones, or in another order, each time, since the same step again is not recorded."""
    taken: list[float] = []
    for turn in range(1, 4):
        start = time.perf_counter()
        trainer.train([*jobs[turn:], *jobs[:turn]][:count])
        taken.append(time.perf_counter() - start)
        if taken[0] > LONG_S:
            break
    return min(taken)
