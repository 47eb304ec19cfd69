"""Another network, whose nodes' bandwidth is multiplied by factors that change with time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from jaxtyping import Float
from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    field_serializer,
    field_validator,
    model_validator,
)

from gossamer.config.registry import Component, build, register
from gossamer.errors import BadInput
from gossamer.network.network import Changing, Conditions, Network, Path
from gossamer.network.nodes import check_ranks, nested


class RateChange(Component):
    """What becomes of some nodes' bandwidth.

    Args:
        at_s: when, seconds of the engine's clock.
        factor: what the base's bandwidth is multiplied by from then on; 1 restores it.
        ranks: the nodes; null is all.
    """

    at_s: NonNegativeFloat
    factor: PositiveFloat
    ranks: tuple[NonNegativeInt, ...] | None = None


_Event = tuple[float, Conditions | RateChange]


@dataclass(frozen=True, eq=False)
class _Scaled(Conditions):
    """Conditions with a factor for each node: on its links, and on what a pair has for itself (the smaller one)."""

    rates: Float[np.ndarray, " links"]
    base: Conditions
    factors: Float[np.ndarray, " nodes"]

    def path(self, source: int, to: int) -> Path | None:
        path = self.base.path(source, to)
        if path is None or math.isinf(path.rate):
            return path
        return replace(path, rate=path.rate * float(min(self.factors[source], self.factors[to])))

    def common_latency(self) -> float | None:
        return self.base.common_latency()


@register("network", "varying")
class Varying(Changing):
    """Another network, whose nodes' bandwidth is multiplied by a factor that changes at given times.

    A node's uplink, its downlink and what it has for itself with another node are multiplied; links that nodes share
    stay as they are.

    Args:
        base: the other network; transfers share links as it says.
        rate_changes: the changes, in any order.
    """

    base: Network
    rate_changes: tuple[RateChange, ...]

    @model_validator(mode="before")
    @classmethod
    def _shares_as_its_base(cls, value: Any, info: Any) -> Any:  # a ValidationInfo: no run-time checks
        if not isinstance(value, dict) or "base" not in value:
            return value
        with nested("network"):
            base = build("network", value["base"], info.context)
        if not isinstance(base, Network):
            raise BadInput(f"network.base: {base.name_of()}; accepted: a network")
        if value.get("sharing", base.sharing) != base.sharing:
            raise BadInput(
                f"network.sharing: {value['sharing']!r}, but network.base.sharing is {base.sharing!r}; accepted: what"
                " the base says"
            )
        return {**value, "base": base, "sharing": base.sharing}

    @field_validator("rate_changes")
    @classmethod
    def _any(cls, value: tuple[RateChange, ...]) -> tuple[RateChange, ...]:
        # (Not by a minimal length, which leaves out the changes that are refused themselves.)
        if not value:
            raise ValueError("at least one change")
        return value

    @field_serializer("base")
    def _base_spec(self, base: Network) -> dict[str, Any]:
        return base.spec()

    def conditions(self, nodes: int, seed: int) -> Conditions:
        for number, change in enumerate(self.rate_changes):
            check_ranks(change.ranks or (), nodes, f"network.rate_changes.{number}.ranks")
        start = super().conditions(nodes, seed)
        own = [path.rate for rank in range(1, nodes) if (path := start.path(0, rank))]
        if np.isinf(start.rates[: 2 * nodes]).all() and np.isinf(own).all():
            raise BadInput(
                "network.base: nodes without limits; accepted: with bandwidths for factors to multiply"
            )
        return start

    def loses(self, nodes: int, seed: int) -> bool:
        return self.base.loses(nodes, seed)

    def _course(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        with nested("network"):
            base = self.base.conditions(nodes, seed)
        factors = np.ones(nodes)
        own: list[_Event] = sorted(((change.at_s, change) for change in self.rate_changes), key=itemgetter(0))
        start: list[_Event] = [(0.0, base)]
        events = merge(start, self.base.changes(nodes, seed), own, key=itemgetter(0))
        for at_s, together in groupby(events, key=itemgetter(0)):
            for _, event in together:
                if isinstance(event, Conditions):
                    base = event
                else:
                    factors = factors.copy()
                    factors[slice(None) if event.ranks is None else list(event.ranks)] = event.factor
            rates = base.rates.copy()
            rates[: 2 * nodes] *= np.tile(factors, 2)
            yield at_s, _Scaled(rates, base, factors)
