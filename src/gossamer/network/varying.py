"""Networks whose bandwidth changes with time: by a trace file, or by factors at given times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, groupby
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from gossamer.config.registry import Component, ComponentField, FilePath, build, register
from gossamer.errors import BadInput
from gossamer.network.inputs import check_ranks, nested, read_records
from gossamer.network.network import (
    BYTES_PER_MEGABIT,
    Access,
    Conditions,
    Network,
    Path,
    Uniform,
    states_of,
)


class _Line(NamedTuple):
    """A line of a trace about the link of one node or (rank None) of all; None leaves a value unchanged."""

    time_s: float
    rank: int | None = None
    uplink: float | None = None
    downlink: float | None = None
    latency_s: float | None = None


@register("network", "trace")
class Trace(Uniform):
    """Uplinks and downlinks from a CSV file with the columns ``time_s``, ``rank``, ``uplink_mbps``, ``downlink_mbps``
    and, optionally, ``latency_ms``.

    A line applies from its time on, to a rank or to all ("*"); a blank cell leaves a value unchanged. The first values are
    those of ``uniform``. ``latency_ms`` is the delay of a node's own link; those of both ends are added to ``latency_s``."""

    path: FilePath  # the file; .csv or .csv.gz. Times ascend, from 0
    # Period after which the trace starts again, with its first values; null: its last values stay.
    repeat_s: PositiveFloat | None = None

    def conditions(self, nodes: int, seed: int) -> Conditions:
        check_ranks((line.rank or 0 for line in self._lines), nodes, f"network.path: {self.path}, rank")
        last = self._lines[-1].time_s
        if self.repeat_s is not None and self.repeat_s <= last:
            accepted = f"more than the trace's last time, {last:g}"
            raise BadInput(f"network.repeat_s: {self.repeat_s:g}; accepted: {accepted}")
        return next(self._states(nodes, seed))[1]

    def loses(self, nodes: int, seed: int) -> bool:
        return self.loss > 0

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        first_rates = super().conditions(nodes, seed).rates
        for repetition in [0] if self.repeat_s is None else count():
            rates, own = first_rates, np.zeros((3, nodes))
            start_s = repetition * (self.repeat_s or 0.0)
            for time_s, simultaneous in groupby([_Line(0.0), *self._lines], key=attrgetter("time_s")):
                rates, own = rates.copy(), own.copy()
                for line in simultaneous:
                    ranks = slice(None) if line.rank is None else line.rank
                    for values, value in zip((rates[:nodes], rates[nodes:], own[0]), line[2:], strict=True):
                        if value is not None:
                            values[ranks] = value
                yield start_s + time_s, Access(rates, self.latency_s, self.jitter_s, self.loss, own)

    @cached_property
    def _lines(self) -> list[_Line]:
        found: list[_Line] = []
        columns = ("time_s", "rank", "uplink_mbps", "downlink_mbps")
        for record in read_records(self.path, "network.path", columns, ["latency_ms"]):
            rank = record["rank"]
            if rank != "*" and not rank.isdecimal():
                raise BadInput(f"{record.where}, rank: {rank!r}; accepted: a rank, or * for all")
            up, down = (
                BYTES_PER_MEGABIT * record.number(column, above=0) if record[column] else None
                for column in columns[2:]
            )
            delay_s = record.number("latency_ms") / 1000 if record["latency_ms"] else None
            time_s = record.number("time_s", least=found[-1].time_s if found else 0.0)
            found.append(_Line(time_s, None if rank == "*" else int(rank), up, down, delay_s))
        return found


class RateChange(Component):
    """A change of the bandwidth of some nodes."""

    at_s: NonNegativeFloat  # when, seconds of the engine's clock
    factor: PositiveFloat  # what the base's bandwidth is multiplied by from then on; 1 restores it
    ranks: tuple[NonNegativeInt, ...] | None = None  # the nodes; null is all


@dataclass(frozen=True, eq=False)
class _ScaledConditions(Conditions):
    """Conditions with a factor for each node; the rate of a path is multiplied by the smaller factor of its ends."""

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
class Varying(Network):
    """Another network, whose nodes' bandwidth is multiplied by factors that change at given times.

    The factor multiplies a node's uplink, its downlink, and the rates of its paths; links that nodes share do not change."""

    # The other network; transfers share links as it says.
    base: Annotated[Network, ComponentField("network", "network.base")]
    rate_changes: Annotated[tuple[RateChange, ...], Field(min_length=1)]  # the changes, in any order

    @model_validator(mode="before")
    @classmethod
    def _take_sharing_of_base(cls, value: Any, info: Any) -> Any:
        if "base" not in value:
            return value
        base = build("network", value["base"], info.context, "network.base")
        sharing = getattr(base, "sharing", None)
        if value.get("sharing", sharing) != sharing:
            found = f"{value['sharing']!r}, but network.base.sharing is {sharing!r}"
            raise BadInput(f"network.sharing: {found}; accepted: the same")
        return {**value, "base": base, "sharing": sharing}

    def conditions(self, nodes: int, seed: int) -> Conditions:
        for number, change in enumerate(self.rate_changes):
            check_ranks(change.ranks or (), nodes, f"network.rate_changes.{number}.ranks")
        start = next(self._states(nodes, seed))[1]
        path_rates = [path.rate for rank in range(1, nodes) if (path := start.path(0, rank))]
        if np.isinf(start.rates[: 2 * nodes]).all() and np.isinf(path_rates).all():
            raise BadInput("network.base: nodes without limits; accepted: bandwidths for factors to multiply")
        return start

    def loses(self, nodes: int, seed: int) -> bool:
        return self.base.loses(nodes, seed)

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        changes = sorted(self.rate_changes, key=attrgetter("at_s"))
        with nested("network"):
            for time_s, base in states_of(self.base, nodes, seed, [change.at_s for change in changes]):
                factors = np.ones(nodes)
                for change in changes:
                    if change.at_s <= time_s:
                        factors[slice(None) if change.ranks is None else list(change.ranks)] = change.factor
                rates = base.rates.copy()
                rates[: 2 * nodes] *= np.tile(factors, 2)
                yield time_s, _ScaledConditions(rates, base, factors)
