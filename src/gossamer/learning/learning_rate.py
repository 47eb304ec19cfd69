"""Learning-rate schedules: factors of the learning rate, round by round.

The factors are those of torch.optim.lr_scheduler, with rounds instead of epochs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from itertools import pairwise
from typing import final

from pydantic import Field, model_validator

from gossamer.config.ranges import NonNegativeFloat32, PositiveShareFloat32, ShareFloat32
from gossamer.config.registry import Component, register
from gossamer.errors import BadInput


class LearningRateSchedule(Component):
    """Base class of schedules, which are pure functions of the round. A subclass implements
    :meth:`factor_after_warmup`."""

    # Rounds over which the factor first rises linearly to the schedule's first factor; the schedule's own rounds
    # count from there (gradual warm-up: Goyal et al., 2017).
    warmup_rounds: int = Field(default=0, ge=0)

    @final
    def factor_at(self, round: int) -> float:
        """The factor of a round, from 0."""
        if round < self.warmup_rounds:
            # The first factor is 1 / (w + 1), not 0, since a round with a learning rate of zero would be
            # wasted.
            return self.factor_after_warmup(0) * (round + 1) / (self.warmup_rounds + 1)
        return self.factor_after_warmup(round - self.warmup_rounds)

    @abstractmethod
    def factor_after_warmup(self, round: int) -> float:
        """The factor of a round, from 0, counted from the end of the warm-up."""


@register("schedule", "constant")
class ConstantLearningRate(LearningRateSchedule):
    """A factor of 1, after an optional warm-up of ``warmup_rounds``."""

    def factor_after_warmup(self, round: int) -> float:
        return 1.0


@register("schedule", "step")
class StepLearningRate(LearningRateSchedule):
    """Multiplied by ``factor`` once every ``every`` rounds, as torch's StepLR."""

    every: int = Field(ge=1)
    factor: PositiveShareFloat32 = 0.1

    def factor_after_warmup(self, round: int) -> float:
        return self.factor ** (round // self.every)


@register("schedule", "multi-step")
class MultiStepLearningRate(LearningRateSchedule):
    """Multiplied by ``factor`` at each milestone (rounds, ascending), as torch's MultiStepLR."""

    milestones: tuple[int, ...]
    factor: PositiveShareFloat32 = 0.1

    @model_validator(mode="after")
    def _ascending(self) -> MultiStepLearningRate:
        rounds = self.milestones
        if not rounds or rounds[0] < 1 or any(a >= b for a, b in pairwise(rounds)):
            accepted = "one or more rounds from 1 on, ascending"
            raise BadInput(f"optimizer.schedule.milestones: got {list(rounds)}; accepted: {accepted}")
        return self

    def factor_after_warmup(self, round: int) -> float:
        return self.factor ** bisect_right(self.milestones, round)


@register("schedule", "exponential")
class ExponentialLearningRate(LearningRateSchedule):
    """Multiplied by ``factor`` every round, as torch's ExponentialLR."""

    factor: PositiveShareFloat32

    def factor_after_warmup(self, round: int) -> float:
        return float(self.factor**round)


@register("schedule", "cosine")
class CosineLearningRate(LearningRateSchedule):
    """Falls to ``minimum`` along half a cosine of ``rounds`` rounds (Loshchilov and Hutter, 2017), as torch's
    CosineAnnealingLR, and then stays there, whereas torch's schedule would rise again."""

    rounds: int = Field(ge=1)
    minimum: ShareFloat32 = 0.0

    def factor_after_warmup(self, round: int) -> float:
        progress = min(round / self.rounds, 1.0)
        return self.minimum + (1 - self.minimum) * (1 + math.cos(math.pi * progress)) / 2


@register("schedule", "linear")
class LinearLearningRate(LearningRateSchedule):
    """Changes linearly from ``start`` to ``end`` over ``rounds`` rounds, then stays constant, as torch's
    LinearLR."""

    start: NonNegativeFloat32 = 1.0
    end: NonNegativeFloat32 = 0.0
    rounds: int = Field(ge=1)

    def factor_after_warmup(self, round: int) -> float:
        progress = min(round / self.rounds, 1.0)
        return self.start * (1 - progress) + self.end * progress
