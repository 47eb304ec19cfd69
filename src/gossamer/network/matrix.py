"""A network of sites, with a latency and a bandwidth between each two of them, from files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path as FileSystemPath
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.network.network import BYTES_PER_MEGABIT, Conditions, Network, Path, bytes_per_second
from gossamer.network.nodes import for_each
from gossamer.network.tables import read_square

SHIPPED = {"aws-ten-regions": FileSystemPath(__file__).parent / "data" / "aws-ten-regions-mbps.csv"}
"""Matrices that come with the package, by name."""


@dataclass(frozen=True, eq=False)
class _SiteConditions(Conditions):
    """Nodes at sites: a path depends on the sites of its ends only.

    Args:
        rates: uplinks, downlinks and, if ``shared``, a link for each ordered pair of sites, row by row.
        site: the site of each node.
        latency_s: between sites, seconds.
        limit: bytes per second between sites.
        shared: whether all nodes of two sites share one link; else the limit applies to each pair of nodes.
    """

    rates: Float[np.ndarray, " links"]
    site: Int[np.ndarray, " nodes"]
    latency_s: Float[np.ndarray, "sites sites"]
    limit: Float[np.ndarray, "sites sites"]
    shared: bool
    jitter_s: float
    loss: float

    def path(self, source: int, to: int) -> Path | None:
        nodes, sites = len(self.site), len(self.limit)
        origin, dest = int(self.site[source]), int(self.site[to])
        latency_s, limit = float(self.latency_s[origin, dest]), float(self.limit[origin, dest])
        if self.shared and math.isfinite(limit):
            links = (source, 2 * nodes + origin * sites + dest, nodes + to)
            return Path(links, latency_s, self.jitter_s, self.loss)
        return Path((source, nodes + to), latency_s, self.jitter_s, self.loss, limit)

    def loses(self, nodes: int) -> bool:
        return self.loss > 0


@register("network", "matrix")
class Matrix(Network):
    """Nodes at sites, with a latency and a bandwidth for each ordered pair of sites (row: from, column: to).

    A file is CSV (.csv or .csv.gz): a square of numbers, with or without names in the first row and the first column. The
    diagonal applies to nodes of one site; if it is blank, the ``within_...`` parameters do. ``bandwidth_mbps:
    aws-ten-regions`` is a file that comes with gossamer: ten AWS regions, as in the topology of DivShare's experiments
    (there with a latency of 1 ms).

    Args:
        latency_ms: one-way delays, a CSV file; or else ``latency_s``.
        bandwidth_mbps: 10^6 bits per second, a CSV file or "aws-ten-regions"; null is unlimited.
        latency_s: one-way delay between sites, in place of a file.
        within_latency_s: delay within a site.
        within_bandwidth_mbps: bandwidth within a site; null is unlimited.
        jitter_s: standard deviation of every delay, seconds.
        loss: probability that a message is lost.
        placement: node k is at site k mod their number ("round-robin"), or the first nodes are at the first site, and so on
            ("blocks").
        shared: whether all nodes of two sites share the bandwidth between them; else each pair of nodes has it.
        unmeasured: a pair of sites with a negative or blank value is an "error"; "drop-sites" repeatedly removes the site
            with the most such pairs (of several, the last), until none is left.
        uplink_mbps: of every node, or a list with one for each; null is unlimited.
        downlink_mbps: as ``uplink_mbps``.
    """

    latency_ms: FilePath | None = None
    bandwidth_mbps: Literal["aws-ten-regions"] | FilePath | None = None
    latency_s: NonNegativeFloat = 0.0
    within_latency_s: NonNegativeFloat = 0.0
    within_bandwidth_mbps: PositiveFloat | None = None
    jitter_s: NonNegativeFloat = 0.0
    loss: float = Field(default=0.0, ge=0, lt=1)
    placement: Literal["round-robin", "blocks"] = "round-robin"
    shared: bool = False
    unmeasured: Literal["error", "drop-sites"] = "error"
    uplink_mbps: PositiveFloat | tuple[PositiveFloat, ...] | None = None
    downlink_mbps: PositiveFloat | tuple[PositiveFloat, ...] | None = None

    @model_validator(mode="after")
    def _check_files(self) -> Matrix:
        if self.latency_ms is None and self.bandwidth_mbps is None:
            raise ValueError("latency_ms, bandwidth_mbps, or both")
        if self.latency_ms is not None and self.latency_s > 0:
            raise ValueError("latency_ms or latency_s, not both")
        return self

    def conditions(self, nodes: int, seed: int) -> Conditions:
        latency_s, limit = self._between_sites()
        sites = len(limit)
        rank = np.arange(nodes)
        up = for_each(self.uplink_mbps, nodes, "network.uplink_mbps") * BYTES_PER_MEGABIT
        down = for_each(self.downlink_mbps, nodes, "network.downlink_mbps") * BYTES_PER_MEGABIT
        return _SiteConditions(
            rates=np.concatenate([up, down, limit.ravel()] if self.shared else [up, down]),
            site=rank % sites if self.placement == "round-robin" else rank * sites // nodes,
            latency_s=latency_s,
            limit=limit,
            shared=self.shared,
            jitter_s=self.jitter_s,
            loss=self.loss,
        )

    def _between_sites(self) -> tuple[Float[np.ndarray, "sites sites"], Float[np.ndarray, "sites sites"]]:
        """Seconds and bytes per second between the sites that are used."""
        latency = None if self.latency_ms is None else _Table(self.latency_ms, "network.latency_ms")
        bandwidth = None
        if self.bandwidth_mbps is not None:
            file = SHIPPED.get(str(self.bandwidth_mbps), FileSystemPath(self.bandwidth_mbps))
            bandwidth = _Table(file, "network.bandwidth_mbps")
            bandwidth.values[bandwidth.values == 0] = math.nan
        tables = [table for table in (latency, bandwidth) if table is not None]
        _check_same_sites(tables)
        kept = self._measured_sites(tables)
        within = np.eye(len(kept), dtype=bool)
        if latency is not None:
            latency_s = latency.values[np.ix_(kept, kept)] / 1000
        else:
            latency_s = np.where(within, math.nan, self.latency_s)
        if bandwidth is not None:
            limit = bandwidth.values[np.ix_(kept, kept)] * BYTES_PER_MEGABIT
        else:
            limit = np.where(within, math.nan, math.inf)
        latency_s[within & np.isnan(latency_s)] = self.within_latency_s
        limit[within & np.isnan(limit)] = bytes_per_second(self.within_bandwidth_mbps)
        return latency_s, limit

    def _measured_sites(self, tables: list[_Table]) -> Int[np.ndarray, " sites"]:
        if self.unmeasured == "error":
            for table in tables:
                table.check_complete()
        missing = tables[0].missing | tables[-1].missing
        kept = np.arange(len(missing))
        while missing.any():
            pairs = missing.sum(0) + missing.sum(1)
            worst = len(pairs) - 1 - int(np.argmax(pairs[::-1]))
            kept = np.delete(kept, worst)
            missing = np.delete(np.delete(missing, worst, 0), worst, 1)
        return kept


class _Table:
    """The numbers of a file; NaN for pairs that were not measured.

    Args:
        path: the file.
        field: the experiment's field that names it.
    """

    def __init__(self, path: FileSystemPath, field: str) -> None:
        self._where = f"{field}: {path}"
        self.names, self.values = read_square(path, field)
        self.values[self.values < 0] = math.nan

    @property
    def missing(self) -> Bool[np.ndarray, "sites sites"]:
        """The pairs of different sites without a value."""
        missing: Bool[np.ndarray, "sites sites"] = np.isnan(self.values)
        np.fill_diagonal(missing, False)
        return missing

    def check_complete(self) -> None:
        """Raise BadInput if a pair of different sites has no value."""
        pairs = np.argwhere(self.missing)
        if len(pairs):
            row, column = pairs[0].tolist()
            named = f" (from {self.names[row]} to {self.names[column]})" if self.names else ""
            raise BadInput(
                f"{self._where}: row {row + 1}, column {column + 1} of the numbers{named}, the first of {len(pairs)}:"
                " blank or below 0; accepted: a number for each two sites, or network.unmeasured: drop-sites"
            )


def _check_same_sites(tables: list[_Table]) -> None:
    first, last = tables[0], tables[-1]
    if len(first.values) != len(last.values) or (first.names and last.names and first.names != last.names):
        raise BadInput(
            f"network.bandwidth_mbps: {len(last.values)} sites; accepted: the {len(first.values)} sites of"
            " network.latency_ms, in the same order"
        )
