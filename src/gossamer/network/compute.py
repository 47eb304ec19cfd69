"""Compute profiles: how long a local step takes on each node, in virtual time."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import Field

from gossamer.randomness import generator
from gossamer.registry import Component, register


class ComputeProfile(Component):
    """The duration of local steps. A gradient takes as long as a step; applying one takes no time."""

    @abstractmethod
    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        """Seconds that a node's local step number ``step`` takes; drawn, if at all, from keyed randomness."""

    def seconds(self, seed: int, rank: int, first_step: int, work: float) -> float:
        """Seconds of ``work`` local steps (a fraction for an evaluation) that begin with number
        ``first_step``."""
        whole = int(work)
        total = sum(self.step_seconds(seed, rank, first_step + k) for k in range(whole))
        return total + (work - whole) * (
            self.step_seconds(seed, rank, first_step + whole) if work > whole else 0.0
        )


@register("compute", "constant")
class Constant(ComputeProfile):
    """Every step takes the same time on every node.

    Args:
        seconds_per_step: that time.
    """

    seconds_per_step: float = Field(default=0.01, ge=0, allow_inf_nan=False)

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.seconds_per_step

    def seconds(self, seed: int, rank: int, first_step: int, work: float) -> float:
        return work * self.seconds_per_step


@register("compute", "log-normal")
class LogNormal(ComputeProfile):
    """Every step's time is drawn afresh: median times e^(sigma z), z standard normal.

    Args:
        median_seconds: the median time of a step.
        sigma: spread of the logarithm.
    """

    median_seconds: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    sigma: float = Field(default=0.5, ge=0, allow_inf_nan=False)

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.median_seconds * float(generator(seed, "compute", rank, step).lognormal(0.0, self.sigma))
