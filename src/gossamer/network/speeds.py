"""Compute profiles of nodes that differ: each has a speed of its own, for the whole run."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from gossamer.config.registry import register
from gossamer.network.compute import ComputeProfile, Constant, Modified
from gossamer.network.nodes import SomeNodes, for_each
from gossamer.randomness import generator


@register("compute", "per-node")
class PerNode(Modified):
    """Every node takes as long as the base times a factor of its own: exactly one of the last three parameters.

    Args:
        base: another compute profile.
        seconds_per_step: seconds of a step, a number for each node; without a base.
        factors: a number for each node.
        sigma: factors are drawn, once for the run: e^(sigma z), z standard normal.
    """

    seconds_per_step: tuple[NonNegativeFloat, ...] | None = None
    factors: tuple[PositiveFloat, ...] | None = None
    sigma: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_of_three(self) -> PerNode:
        if [self.seconds_per_step, self.factors, self.sigma].count(None) != 2:
            raise ValueError("exactly one of seconds_per_step, factors and sigma")
        if self.seconds_per_step is not None and self.base != Constant():
            raise ValueError("seconds_per_step without a base, or a base with factors or sigma")
        return self

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        for field in ("seconds_per_step", "factors"):
            for_each(getattr(self, field), nodes, f"compute.{field}")
        settled = super().settled(nodes, seed)
        if self.sigma is None:
            return settled
        drawn = (generator(seed, "compute.factor", rank).lognormal(0.0, self.sigma) for rank in range(nodes))
        return settled.model_copy(update={"factors": tuple(map(float, drawn)), "sigma": None})

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        if self.seconds_per_step is not None:
            return self.seconds_per_step[rank]
        return self._factor(rank) * self.base.step_seconds(seed, rank, step)

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        if self.seconds_per_step is not None:
            return work * self.seconds_per_step[rank]
        return self._factor(rank) * self.base.seconds(seed, rank, first_step, work, start_s)

    def _factor(self, rank: int) -> float:
        assert self.factors is not None, "settled() draws them"
        return self.factors[rank]


@register("compute", "stragglers")
class SlowNodes(Modified, SomeNodes):
    """Some nodes take ``factor`` times as long as the base, the others as long: exactly one of ``count``, ``fraction``
    and ``ranks``.

    Args:
        base: another compute profile.
        factor: how many times as long.
        count: so many nodes are slow.
        fraction: this share of the nodes is slow, rounded to the nearest number.
        ranks: these nodes are slow.
        which: of ``count`` or ``fraction``: "drawn" by the experiment's seed, or the "first" ranks.
    """

    factor: PositiveFloat = 5.0

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        chosen, base = self.chosen(nodes, seed, "compute"), self.settled_base(nodes, seed)
        return self.model_copy(update={"base": base, "ranks": chosen, "count": None, "fraction": None})

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self._factor(rank) * self.base.step_seconds(seed, rank, step)

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        return self._factor(rank) * self.base.seconds(seed, rank, first_step, work, start_s)

    def _factor(self, rank: int) -> float:
        assert self.ranks is not None, "settled() says which nodes are slow"
        return self.factor if rank in self.ranks else 1.0
