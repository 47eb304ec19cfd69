"""Networks whose bandwidth changes with time, according to a trace file or to factors at given times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby, product
from operator import attrgetter, itemgetter
from typing import Annotated, Any

import numpy as np
import polars as pl
from jaxtyping import Float
from msgspec import structs
from pydantic import Field, NonNegativeInt, model_validator

from gossamer.config.ranges import Factor, PositiveSeconds, Seconds
from gossamer.config.registry import Component, ComponentField, FilePath, build, register
from gossamer.errors import BadInput
from gossamer.network.inputs import check_rows, nested, read_csv
from gossamer.network.network import (
    BYTES_PER_MEGABIT,
    Access,
    Conditions,
    Network,
    Path,
    UniformNetwork,
    states_of,
)
from gossamer.selector import check_ranks


@register("network", "trace")
class Trace(UniformNetwork):
    """Uplinks and downlinks from a CSV file with the columns ``time_s``, ``rank``, ``uplink_mbps``, ``downlink_mbps``
    and, optionally, ``latency_ms``.

    A line applies from its time on, to one rank or to all ("*"); a blank cell leaves a value unchanged. The
    initial values are those of ``uniform``. ``latency_ms`` is the delay of a node's own link; the delays of
    both ends are added to ``latency_s``."""

    path: FilePath  # the file; .csv or .csv.gz. Times ascend, from 0
    # Period after which the trace starts again; null: the last values stay.
    repeat_s: PositiveSeconds | None = None

    def conditions(self, nodes: int, seed: int) -> Conditions:
        ranks, last = self._lines["node"].drop_nulls(), float(self._lines["time_s"][-1])
        check_ranks(ranks, nodes, f"network.path: {self.path}, rank")
        if self.repeat_s is not None and self.repeat_s <= last:
            accepted = f"more than the trace's last time, {last:g}"
            raise BadInput(f"network.repeat_s: {self.repeat_s:g}; accepted: {accepted}")
        return next(self._states(nodes, seed))[1]

    def loses(self, nodes: int, seed: int) -> bool:
        return self.loss > 0

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        first_rates = super().conditions(nodes, seed).rates
        lines: list[dict[str, Any]] = [{"time_s": 0.0}, *self._lines.to_dicts()]
        for repetition in [0] if self.repeat_s is None else count():
            rates, own = first_rates, np.zeros((3, nodes))
            start_s = repetition * (self.repeat_s or 0.0)
            for time_s, simultaneous in groupby(lines, key=itemgetter("time_s")):
                rates, own = rates.copy(), own.copy()
                columns = {"uplink": rates[:nodes], "downlink": rates[nodes:], "latency_s": own[0]}
                for line, (name, values) in product(simultaneous, columns.items()):
                    if (value := line.get(name)) is not None:
                        values[slice(None) if line["node"] is None else line["node"]] = value
                yield start_s + time_s, Access(rates, self.latency_s, self.jitter_s, self.loss, own)

    @cached_property
    def _lines(self) -> pl.DataFrame:
        """The lines of the trace. ``node`` is null for all nodes; other nulls leave a value unchanged."""
        rates = {"uplink_mbps": pl.Float64, "downlink_mbps": pl.Float64}
        columns = {"time_s": pl.Float64, "rank": pl.String, **rates, "latency_ms": pl.Float64}
        table = read_csv(self.path, "network.path", columns, optional=["latency_ms"])
        where, up, down = f"network.path: {self.path}", pl.col("uplink_mbps"), pl.col("downlink_mbps")
        check_rows(table, pl.col("time_s").is_not_null(), where, "a time in each line")
        check_rows(table, pl.col("time_s") >= pl.col("time_s").cum_max(), where, "ascending times")
        check_rows(table, (up > 0).fill_null(True) & (down > 0).fill_null(True), where, "rates above 0")
        node = pl.col("rank").cast(pl.Int64, strict=False)
        check_rows(table, (pl.col("rank") == "*") | (node >= 0), where, "a rank, or * for all")
        return table.select(
            "time_s",
            node=node,
            uplink=up * BYTES_PER_MEGABIT,
            downlink=down * BYTES_PER_MEGABIT,
            latency_s=pl.col("latency_ms") / 1000,
        )


class RateChange(Component):
    """A change of the bandwidth of some nodes."""

    at_s: Seconds  # time of the change, seconds of the engine's clock
    factor: Factor  # multiplier of the base's bandwidth from then on; 1 restores it
    ranks: tuple[NonNegativeInt, ...] | None = None  # the nodes; null is all


@dataclass(frozen=True, eq=False)
class _ScaledConditions(Conditions):
    """Conditions with a factor for each node. The rate of a path is multiplied by the smaller factor of its
    two ends."""

    rates: Float[np.ndarray, " links"]
    base: Conditions
    factors: Float[np.ndarray, " nodes"]

    def path(self, source: int, to: int) -> Path | None:
        path = self.base.path(source, to)
        if path is None or math.isinf(path.rate):
            return path
        return structs.replace(path, rate=path.rate * float(min(self.factors[source], self.factors[to])))

    def common_latency(self) -> float | None:
        return self.base.common_latency()


@register("network", "varying")
class Varying(Network):
    """Another network in which the nodes' bandwidth is multiplied by factors that change at given times.

    The factor multiplies a node's uplink, its downlink and the rates of its paths. Shared links do not change."""

    # The other network, which also determines how transfers share links.
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
            problem = f"{value['sharing']!r}, but network.base.sharing is {sharing!r}"
            raise BadInput(f"network.sharing: {problem}; accepted: the same")
        return {**value, "base": base, "sharing": sharing}

    def conditions(self, nodes: int, seed: int) -> Conditions:
        for number, change in enumerate(self.rate_changes):
            check_ranks(change.ranks or (), nodes, f"network.rate_changes.{number}.ranks")
        return next(self._states(nodes, seed))[1]

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
