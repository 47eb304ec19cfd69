"""A network whose uplinks and downlinks follow a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import PositiveFloat

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.network.network import BYTES_PER_MEGABIT, Access, Changing, Conditions, Path, Uniform
from gossamer.network.nodes import check_ranks
from gossamer.network.tables import read_number, read_records


class _Record(NamedTuple):
    """A line of a trace: what it says of one node's link or (rank None) of all; None where it's silent."""

    time_s: float
    rank: int | None = None
    uplink: float | None = None
    downlink: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class _Delayed(Access):
    """Nodes whose own links delay messages too; seconds, float64 [nodes]."""

    delays_s: Float[np.ndarray, " nodes"]

    def path(self, source: int, to: int) -> Path | None:
        path = super().path(source, to)
        assert path is not None
        return replace(path, latency_s=self.latency_s + float(self.delays_s[source] + self.delays_s[to]))

    def common_latency(self) -> float | None:
        return None if self.delays_s.any() else super().common_latency()


@register("network", "trace")
class Trace(Changing, Uniform):
    """Uplinks and downlinks from a file: CSV with the columns ``time_s``, ``rank``, ``uplink_mbps``, ``downlink_mbps``
    and maybe ``latency_ms``.

    A line holds from its time on, for a rank or for all ("*"); a blank cell leaves things as they were, at first as
    ``uniform`` has them. ``latency_ms`` is the delay of a node's own link: both ends' add to a path's ``latency_s``.

    Args:
        path: the file; .csv or .csv.gz. Times ascend, from 0.
        repeat_s: the trace begins again, as at the start, every so many seconds; null: it goes on as it ends.
        latency_s: as the rest, see :class:`Uniform`.
    """

    path: FilePath
    repeat_s: PositiveFloat | None = None

    def conditions(self, nodes: int, seed: int) -> Conditions:
        records = self._records
        check_ranks((record.rank or 0 for record in records), nodes, f"network.path: {self.path}, rank")
        if self.repeat_s is not None and self.repeat_s <= records[-1].time_s:
            raise BadInput(
                f"network.repeat_s: {self.repeat_s:g}; accepted: more than the trace's last time, "
                f"{records[-1].time_s:g}"
            )
        return super().conditions(nodes, seed)

    def loses(self, nodes: int, seed: int) -> bool:
        return self.loss > 0

    def _course(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        at_first = Uniform.conditions(self, nodes, seed).rates
        for turn in [0] if self.repeat_s is None else count():
            rates, delays_s = at_first, np.zeros(nodes)
            begun_s = turn * (self.repeat_s or 0.0)
            for time_s, together in groupby([_Record(0.0), *self._records], key=attrgetter("time_s")):
                rates, delays_s = rates.copy(), delays_s.copy()
                for record in together:
                    of = slice(None) if record.rank is None else record.rank
                    for values, value in zip(
                        (rates[:nodes], rates[nodes:], delays_s), record[2:], strict=True
                    ):
                        if value is not None:
                            values[of] = value
                yield (
                    begun_s + time_s,
                    _Delayed(rates, self.latency_s, self.jitter_s, self.loss, delays_s=delays_s),
                )

    @cached_property
    def _records(self) -> list[_Record]:
        records: list[_Record] = []
        columns = ("time_s", "rank", "uplink_mbps", "downlink_mbps")
        for where, cells in read_records(self.path, "network.path", columns, ["latency_ms"]):
            last_s = records[-1].time_s if records else 0.0
            rank = cells["rank"]
            if rank != "*" and not rank.isdecimal():
                raise BadInput(f"{where}, rank: {rank!r}; accepted: a rank, or * for all")
            records.append(
                _Record(
                    read_number(cells["time_s"], f"{where}, time_s", least=last_s),
                    None if rank == "*" else int(rank),
                    _rate(cells["uplink_mbps"], f"{where}, uplink_mbps"),
                    _rate(cells["downlink_mbps"], f"{where}, downlink_mbps"),
                    _delay(cells.get("latency_ms", ""), f"{where}, latency_ms"),
                )
            )
        return records


def _rate(mbps: str, where: str) -> float | None:
    return BYTES_PER_MEGABIT * read_number(mbps, where, above=0) if mbps else None


def _delay(milliseconds: str, where: str) -> float | None:
    return read_number(milliseconds, where) / 1000 if milliseconds else None
