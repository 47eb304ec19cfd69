"""A network of sites, with a latency and a bandwidth between each pair of sites, read from files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FileSystemPath
from typing import Any, Literal

import numpy as np
import polars as pl
from jaxtyping import Float, Int
from pydantic import Field, model_validator

from gossamer.config.ranges import Mbps, Seconds
from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.network.inputs import LARGEST, for_each, read_cells
from gossamer.network.network import BYTES_PER_MEGABIT, Conditions, Network, Path, bytes_per_second

SHIPPED = {"aws-ten-regions": FileSystemPath(__file__).parent / "data" / "aws-ten-regions-mbps.csv"}
"""Matrices included in the package, by name."""
_Square = Float[np.ndarray, "sites sites"]


@dataclass(frozen=True, eq=False)
class _SiteConditions(Conditions):
    """Nodes at sites. A path depends only on the sites of its ends. If the nodes of two sites share one link,
    ``rates`` has a link for each ordered pair of sites, row by row; otherwise ``limit`` (bytes per second) is
    the rate of each path."""

    rates: Float[np.ndarray, " links"]
    site: Int[np.ndarray, " nodes"]
    latency_s: _Square
    limit: _Square
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

    A file is CSV (.csv or .csv.gz): a square of numbers, with or without names in the first row and the first
    column. The diagonal applies to nodes at the same site; if it is blank, the ``within_...`` parameters
    apply. ``bandwidth_mbps: aws-ten-regions`` is a file included in gossamer: ten AWS regions, as in the
    topology of DivShare's experiments (there with a latency of 1 ms)."""

    latency_ms: FilePath | None = None  # one-way delays, a CSV file; otherwise latency_s
    # 10^6 bits per second, a CSV file or "aws-ten-regions"; null is unlimited.
    bandwidth_mbps: Literal["aws-ten-regions"] | FilePath | None = None
    latency_s: Seconds = 0.0  # one-way delay between sites, instead of a file
    within_latency_s: Seconds = 0.0  # delay within a site
    within_bandwidth_mbps: Mbps | None = None  # bandwidth within a site; null is unlimited
    jitter_s: Seconds = 0.0  # standard deviation of every delay as drawn, seconds
    loss: float = Field(default=0.0, ge=0, lt=1)  # probability that a message is lost
    # "round-robin": node k is at site k modulo the number of sites. "blocks": the first nodes are at the
    # first site, and so on.
    placement: Literal["round-robin", "blocks"] = "round-robin"
    # Whether all nodes of two sites share the bandwidth between these; otherwise each pair of nodes has it.
    shared: bool = False
    # "error" refuses a pair of sites with a negative or blank value. "drop-sites" repeatedly removes the site
    # with the most such pairs (the last one in a tie) until none is left.
    unmeasured: Literal["error", "drop-sites"] = "error"
    # Of every node, or a list with one for each; null is unlimited.
    uplink_mbps: Mbps | tuple[Mbps, ...] | None = None
    downlink_mbps: Mbps | tuple[Mbps, ...] | None = None  # as uplink_mbps

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
        rates = np.concatenate([up, down, limit.ravel()] if self.shared else [up, down])
        site = rank % sites if self.placement == "round-robin" else rank * sites // nodes
        return _SiteConditions(rates, site, latency_s, limit, self.shared, self.jitter_s, self.loss)

    def _between_sites(self) -> tuple[_Square, _Square]:
        """Latency in seconds and bandwidth in bytes per second between the used sites."""
        tables: dict[str, _Square] = {}
        if self.latency_ms is not None:
            tables["latency_ms"] = _read_square(self.latency_ms, "network.latency_ms")
        if self.bandwidth_mbps is not None:
            file = SHIPPED.get(str(self.bandwidth_mbps), FileSystemPath(self.bandwidth_mbps))
            mbps = tables["bandwidth_mbps"] = _read_square(file, "network.bandwidth_mbps")
            mbps[mbps == 0] = math.nan
        sites, *others = map(len, tables.values())
        if others and others != [sites]:
            accepted = f"the {sites} sites of network.latency_ms, in the same order"
            raise BadInput(f"network.bandwidth_mbps: {others[0]} sites; accepted: {accepted}")
        kept = self._measured_sites(tables)
        within = np.eye(len(kept), dtype=bool)
        latency_s, limit = np.where(within, math.nan, self.latency_s), np.where(within, math.nan, math.inf)
        if "latency_ms" in tables:
            latency_s = tables["latency_ms"][np.ix_(kept, kept)] / 1000
        if "bandwidth_mbps" in tables:
            limit = tables["bandwidth_mbps"][np.ix_(kept, kept)] * BYTES_PER_MEGABIT
        latency_s[within & np.isnan(latency_s)] = self.within_latency_s
        limit[within & np.isnan(limit)] = bytes_per_second(self.within_bandwidth_mbps)
        return latency_s, limit

    def _measured_sites(self, tables: Mapping[str, _Square]) -> list[int]:
        """The sites to use, without those that lack values. BadInput if missing values are an error."""
        missing: Any = np.any([np.isnan(values) for values in tables.values()], axis=0)
        np.fill_diagonal(missing, False)
        if self.unmeasured == "error" and missing.any():
            row, column = np.argwhere(missing)[0].tolist()
            files = " and ".join(f"network.{field}: {getattr(self, field)}" for field in tables)
            problem = f"row {row + 1}, column {column + 1} of the numbers: blank or below 0"
            accepted = "a number for each pair of sites, or network.unmeasured: drop-sites"
            raise BadInput(f"{files}: {problem}; accepted: {accepted}")
        kept = list(range(len(missing)))
        while (unmeasured := missing[np.ix_(kept, kept)]).any():
            pairs = unmeasured.sum(0) + unmeasured.sum(1)
            del kept[np.flatnonzero(pairs == pairs.max())[-1]]
        return kept


def _read_square(path: FileSystemPath, field: str) -> _Square:
    """A square of numbers, with or without names of sites in the first row and column. Blank or negative
    values become NaN."""
    cells = read_cells(path, field, header=False).select(pl.all().str.strip_chars().replace("", None))
    numbers = cells.select(pl.all().cast(pl.Float64, strict=False))
    words = numbers.select(pl.all().is_null()).to_numpy() & cells.select(pl.all().is_not_null()).to_numpy()
    top, left = int(words[0, 1:].any()), int(words[1:, 0].any())
    if not (top or left) and len(cells) == cells.width:
        numbered = [None, *range(len(cells) - 1)]  # the names that pandas writes
        top = left = int(list(numbers.row(0)) == numbered == numbers.to_series(0).to_list())
        blank, same = np.isnan(numbers.to_numpy().diagonal()), numbers.row(0) == tuple(numbers.to_series(0))
        if not top and same and blank[0] and not blank[1:].any() and len(blank) > 1:
            problem = "only the first cell of the diagonal is blank, so the first line may have names"
            raise BadInput(f"{field}: {path}: {problem}; accepted: names that are words, or a whole diagonal")
    if words[top:, left:].any():
        raise BadInput(f"{field}: {path}: a word among the numbers; accepted: numbers, or blanks")
    matrix = numbers.to_numpy()[top:, left:]
    if not matrix.size or len(matrix) != matrix.shape[1] or (matrix > LARGEST).any():
        shape = " x ".join(map(str, matrix.shape))
        raise BadInput(
            f"{field}: {path}: {shape} numbers; accepted: a square matrix of numbers up to {LARGEST:g}, of one site or more"
        )
    return np.where(matrix >= 0, matrix, math.nan)
