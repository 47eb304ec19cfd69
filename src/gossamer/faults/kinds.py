"""The kinds of faults: nodes crash, leave, join, churn, slow down or freeze; networks lose messages or are partitioned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import merge
from itertools import count
from operator import attrgetter
from typing import Annotated, Literal

import numpy as np
import polars as pl
from msgspec import structs
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from gossamer.config.ranges import Factor, PositiveSeconds, Seconds
from gossamer.config.registry import FilePath, register
from gossamer.config.validation import accepting
from gossamer.errors import BadInput
from gossamer.faults.fault import (
    Fault,
    FaultInterval,
    FaultPlan,
    LinkFault,
    Nodes,
    RoundCrash,
    StartFrom,
    TemporaryFault,
    select_ranks,
)
from gossamer.network import Path, SlowdownWindow
from gossamer.network.inputs import check_rows, read_csv
from gossamer.randomness import generator
from gossamer.selector import check_ranks


def _absence(
    kind: str, ranks: tuple[int, ...], from_s: float, to_s: float, start_from: StartFrom = "checkpoint"
) -> FaultPlan:
    """A plan in which nodes are away for one interval."""
    return FaultPlan([FaultInterval(from_s, to_s, kind, rank, start_from) for rank in ranks], ranks)


@register("fault", "crash")
class Crash(Fault):
    """Nodes stop without notice. Unsent messages are lost."""

    nodes: Nodes
    at_s: Seconds | None = None
    at_round: PositiveInt | None = None
    restart_after_s: PositiveSeconds | None = None
    restart_from: Literal["checkpoint", "initial"] = "checkpoint"

    @model_validator(mode="after")
    def _time_or_round(self) -> Crash:
        if (self.at_s is None) == (self.at_round is None):
            raise ValueError("exactly one of at_s and at_round")
        return self

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        ranks = select_ranks(self.nodes, nodes, seed, field)
        after_s = math.inf if self.restart_after_s is None else self.restart_after_s
        if self.at_s is not None:
            return _absence("crash", ranks, self.at_s, self.at_s + after_s, self.restart_from)
        assert self.at_round is not None
        crashes = [RoundCrash(rank, self.at_round, after_s, self.restart_from) for rank in ranks]
        return FaultPlan([], ranks, at_rounds=crashes)


@register("fault", "leave")
class Leave(Fault):
    """Nodes complete their round, announce their departure, and leave for good. Their rows and models are
    complete."""

    nodes: Nodes
    at_s: Seconds

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        return _absence("leave", select_ranks(self.nodes, nodes, seed, field), self.at_s, math.inf)


@register("fault", "join")
class Join(Fault):
    """Nodes join during the run."""

    nodes: Nodes
    at_s: PositiveSeconds
    start_from: Literal["initial", "neighbor"] = "initial"

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        ranks = select_ranks(self.nodes, nodes, seed, field)
        return _absence("join", ranks, 0.0, self.at_s, self.start_from)


@register("fault", "churn")
class Churn(TemporaryFault):
    """Nodes come and go.

    At random, each node is alternately present and away, for exponentially distributed times. Alternatively,
    a schedule is read from a CSV file with the columns ``time_s,node,event``, where an event is crash, leave
    or join; a node whose first event is join is away until then."""

    nodes: Nodes = Field(default="all", validate_default=True)
    mean_up_s: PositiveSeconds | None = None
    mean_down_s: PositiveSeconds | None = None
    by: Literal["crash", "leave"] = "crash"
    restart_from: StartFrom = "checkpoint"
    path: FilePath | None = None

    @model_validator(mode="after")
    def _random_or_from_file(self) -> Churn:
        means = (self.mean_up_s, self.mean_down_s)
        if None in means if self.path is None else means != (None, None):
            raise ValueError("mean_up_s and mean_down_s, or path")
        drawn = (self.nodes.all, self.by, self.from_s, self.to_s)
        if self.path is not None and drawn != (True, "crash", 0, None):
            raise ValueError(
                "nodes, by, from_s and to_s with mean_up_s and mean_down_s; the file has its own"
            )
        return self

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        if self.path is not None:
            absences = self._read(nodes, field)
            return FaultPlan(absences, tuple(sorted({row.node for row in absences if row.node is not None})))
        ranks = select_ranks(self.nodes, nodes, seed, field)
        drawn = merge(*(self._draw(rank, seed, field) for rank in ranks), key=attrgetter("from_s"))
        return FaultPlan(drawn, ranks, endless=self.to_s is None)

    def _draw(self, rank: int, seed: int, field: str) -> Iterator[FaultInterval]:
        assert self.mean_up_s is not None
        assert self.mean_down_s is not None
        now = self.from_s
        for number in count():
            rng = generator(seed, f"{field}.churn", rank, number)
            gone = now + rng.exponential(self.mean_up_s)
            if gone >= self.end_s:
                return
            now = gone + rng.exponential(self.mean_down_s)
            yield FaultInterval(gone, now, self.by, rank, self.restart_from)

    def _read(self, nodes: int, field: str) -> list[FaultInterval]:
        assert self.path is not None
        where = f"{field}.path: {self.path}"
        columns = {"time_s": pl.Float64, "node": pl.Int64, "event": pl.String}
        table = read_csv(self.path, f"{field}.path", columns)
        check_rows(table, pl.all_horizontal(pl.all().is_not_null()), where, "three cells per line")
        check_ranks(table["node"], nodes, f"{where}, node")
        check_rows(
            table, pl.col("time_s") >= pl.col("time_s").cum_max().over("node"), where, "ascending times"
        )
        intervals: list[FaultInterval] = []
        away: dict[int, tuple[float, str]] = {}  # node -> the start of its absence, and the event
        present: set[int] = set()  # nodes that have had an event
        for time_s, node, event in table.rows():
            possible = ["join"] if node in away else ["crash", "leave"] if node in present else _EVENTS
            if event not in possible:
                problem = f"{event!r} of node {node} at {time_s:g} s"
                raise BadInput(f"{where}: {problem}; accepted: {' or '.join(possible)}")
            present.add(node)
            if event != "join":
                away[node] = time_s, event
                continue
            from_s, by = away.pop(node, (0.0, "join"))
            if time_s > from_s:
                intervals.append(FaultInterval(from_s, time_s, by, node, self.restart_from))
        intervals += [FaultInterval(from_s, math.inf, by, node) for node, (from_s, by) in away.items()]
        return sorted(intervals, key=attrgetter("from_s", "node"))


_EVENTS = ["crash", "join", "leave"]


@register("fault", "slow")
class Slow(TemporaryFault):
    """Computations take longer."""

    nodes: Nodes
    factor: Factor

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        ranks = select_ranks(self.nodes, nodes, seed, field)
        detail = f"computing takes {self.factor:g} times as long"
        return FaultPlan(
            [FaultInterval(self.from_s, self.end_s, "slowed", rank, detail=detail) for rank in ranks],
            slowdowns=[SlowdownWindow.unchecked(self.from_s, self.end_s, self.factor, ranks)],
        )


@register("fault", "freeze")
class Freeze(Fault):
    """Nodes stop, like a suspended process or a sleeping computer, and later continue where they stopped.

    If a node is frozen for longer than ``failures.detection_s``, its peers consider it dead until it
    continues."""

    nodes: Nodes
    at_s: Seconds
    for_s: PositiveSeconds

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        ranks, end_s = select_ranks(self.nodes, nodes, seed, field), self.at_s + self.for_s
        links = (*ranks, *(nodes + rank for rank in ranks))  # they carry nothing, but lose nothing
        return FaultPlan(
            [FaultInterval(self.at_s, end_s, "freeze", rank) for rank in ranks],
            slowdowns=[SlowdownWindow.unchecked(self.at_s, end_s, math.inf, ranks)],
            link_faults=[LinkFault(self.at_s, end_s, stopped=links, loses=False)],
        )


@register("fault", "loss")
class Loss(TemporaryFault):
    """Messages are lost at random, in addition to the network's own loss."""

    probability: float = Field(gt=0, le=1)
    nodes: Nodes = Field(default="all", validate_default=True)
    links: Annotated[
        tuple[tuple[NonNegativeInt, NonNegativeInt], ...] | None,
        accepting("a list of pairs of ranks from 0, [from, to] each"),
    ] = None

    @model_validator(mode="after")
    def _nodes_or_links(self) -> Loss:
        if self.links is not None and not self.nodes.all:
            raise ValueError("nodes or links")
        return self

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        for link in self.links or ():
            check_ranks(link, nodes, f"{field}.links")
        ranks = frozenset(select_ranks(self.nodes, nodes, seed, field))
        links = None if self.links is None else frozenset(self.links)
        survival = 1 - self.probability

        def lossy(source: int, to: int, path: Path) -> Path | None:
            hit = source in ranks or to in ranks if links is None else (source, to) in links
            return structs.replace(path, loss=1 - (1 - path.loss) * survival) if hit else path

        detail = f"messages are lost with probability {self.probability:g}"
        interval = FaultInterval(self.from_s, self.end_s, "loss", detail=detail)
        return FaultPlan([interval], link_faults=[LinkFault(self.from_s, self.end_s, lossy)])


@register("fault", "partition")
class NetworkPartition(TemporaryFault):
    """Messages between groups of nodes are lost, including those being sent when the partition starts. No
    node is considered dead."""

    groups: Annotated[
        tuple[tuple[NonNegativeInt, ...], ...] | Literal["halves"],
        accepting("a list of lists of ranks from 0, or 'halves'"),
    ] = "halves"

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        given = self.groups
        if given == "halves":
            given = (tuple(generator(seed, f"{field}.groups").permutation(nodes)[: nodes // 2].tolist()),)
        groups = [0] * nodes
        for number, group in enumerate(given):
            assert not isinstance(group, str)
            check_ranks(group, nodes, f"{field}.groups.{number}")
            for rank in group:
                if groups[rank]:
                    raise BadInput(f"{field}.groups: node {rank} is in two groups; accepted: at most one")
                groups[rank] = number + 1

        def within(source: int, to: int, path: Path) -> Path | None:
            return path if groups[source] == groups[to] else None

        detail = "groups of " + ", ".join(str(size) for size in np.bincount(groups) if size)
        interval = FaultInterval(self.from_s, self.end_s, "partition", detail=detail)
        return FaultPlan([interval], link_faults=[LinkFault(self.from_s, self.end_s, within)])
