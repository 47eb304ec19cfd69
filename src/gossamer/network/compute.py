"""Compute profiles: how long a local step takes on each node, in virtual time."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from pydantic import Field, field_serializer, field_validator

from gossamer.config.registry import Component, build, register
from gossamer.network.nodes import nested
from gossamer.randomness import generator


class ComputeProfile(Component):
    """The duration of local steps. A gradient takes as long as a step; applying one takes no time.

    Most profiles say how long each step takes, wherever in time it lies. One whose durations depend on the time says so
    with ``depends_on_time`` and overrides :meth:`seconds`.
    """

    depends_on_time: ClassVar[bool] = False

    @abstractmethod
    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        """Seconds that a node's local step number ``step`` takes; drawn, if at all, from keyed randomness."""

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        """Seconds that a computation takes.

        Args:
            seed: the experiment's seed.
            rank: the node.
            first_step: number of the node's first local step in it.
            work: how many local steps it is worth (a fraction for an evaluation).
            start_s: when it begins, seconds of the engine's clock.
        """
        whole = int(work)
        total = sum(self.step_seconds(seed, rank, first_step + k) for k in range(whole))
        return total + (work - whole) * (
            self.step_seconds(seed, rank, first_step + whole) if work > whole else 0.0
        )

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        """This profile for so many nodes: what depends on their number, or is drawn once for a run, is settled.

        Raises:
            BadInput: for a profile that doesn't fit so many nodes; names the field.
        """
        return self


@register("compute", "constant")
class Constant(ComputeProfile):
    """Every step takes the same time on every node.

    Args:
        seconds_per_step: that time.
    """

    seconds_per_step: float = Field(default=0.01, ge=0, allow_inf_nan=False)

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.seconds_per_step

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
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


class Modified(ComputeProfile):
    """A profile that makes another one's steps slower or faster.

    Args:
        base: the other one; its durations must not depend on the time (a profile whose do has to be the outermost).
    """

    base: ComputeProfile = Field(default_factory=Constant)

    @field_validator("base", mode="before")
    @classmethod
    def _build_base(cls, value: Any, info: Any) -> Any:  # a ValidationInfo: no run-time checks
        with nested("compute"):
            base = build("compute", value, info.context)
        if isinstance(base, ComputeProfile) and base.depends_on_time:
            raise ValueError(
                "a profile that doesn't depend on the time; one that does goes around all others"
            )
        return base

    @field_serializer("base")
    def _base_spec(self, base: ComputeProfile) -> dict[str, Any]:
        return base.spec()

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        return self.model_copy(update={"base": self.settled_base(nodes, seed)})

    def settled_base(self, nodes: int, seed: int) -> ComputeProfile:
        """The other profile for so many nodes."""
        with nested("compute"):
            return self.base.settled(nodes, seed)
