"""Faults of nodes: they crash, leave, join, come and go, compute slowly, or freeze."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import count
from operator import attrgetter
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.faults.fault import Fault, FaultInterval, Nodes, RoundCrash, check_order, end_of, select_ranks
from gossamer.network import SlowdownWindow
from gossamer.network.tables import read_number, read_records
from gossamer.randomness import generator


class _Absence(Fault):
    """A fault that takes some nodes away."""

    nodes: Nodes

    def affected(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        return select_ranks(self.nodes, nodes, seed, field)


@register("fault", "crash")
class Crash(_Absence):
    """Nodes stop without notice; what they have not sent is lost.

    Args:
        nodes: the nodes: ranks, a number or a fraction of the nodes (drawn), or "all".
        at_s: when, seconds of the engine's clock; or
        at_round: as soon as a node has completed this number of rounds for the first time.
        restart_after_s: seconds until they restart; null is never.
        restart_from: the model with which they restart: their newest checkpoint (without one, the initial model), or the
            initial model.
    """

    at_s: NonNegativeFloat | None = None
    at_round: PositiveInt | None = None
    restart_after_s: PositiveFloat | None = None
    restart_from: Literal["checkpoint", "initial"] = "checkpoint"

    @model_validator(mode="after")
    def _time_or_round(self) -> Crash:
        if (self.at_s is None) == (self.at_round is None):
            raise ValueError("exactly one of at_s and at_round")
        return self

    def intervals(self, nodes: int, seed: int, field: str) -> Iterator[FaultInterval]:
        ranks = self.affected(nodes, seed, field)
        if self.at_s is None:
            return iter(())
        to_s = self.at_s + end_of(self.restart_after_s)
        return iter([FaultInterval(self.at_s, to_s, "crash", rank, self.restart_from) for rank in ranks])

    def at_rounds(self, nodes: int, seed: int, field: str) -> Sequence[RoundCrash]:
        if self.at_round is None:
            return ()
        after_s = end_of(self.restart_after_s)
        ranks = self.affected(nodes, seed, field)
        return [RoundCrash(rank, self.at_round, after_s, self.restart_from) for rank in ranks]


@register("fault", "leave")
class Leave(_Absence):
    """Nodes complete their round, say goodbye, and are gone for good; their rows and models are complete.

    Args:
        nodes: the nodes: ranks, a number or a fraction of the nodes (drawn), or "all".
        at_s: when they are told to leave, seconds of the engine's clock.
    """

    at_s: NonNegativeFloat

    def intervals(self, nodes: int, seed: int, field: str) -> Iterator[FaultInterval]:
        ranks = self.affected(nodes, seed, field)
        return iter([FaultInterval(self.at_s, math.inf, "leave", rank) for rank in ranks])


@register("fault", "join")
class Join(_Absence):
    """Nodes join during the run.

    Args:
        nodes: the nodes: ranks, a number or a fraction of the nodes (drawn).
        at_s: when they join, seconds of the engine's clock.
        start_from: the model with which they start: "initial"; or "neighbor", that of the first neighbour that answers,
            which costs a message there and back.
    """

    at_s: PositiveFloat
    start_from: Literal["initial", "neighbor"] = "initial"

    def intervals(self, nodes: int, seed: int, field: str) -> Iterator[FaultInterval]:
        ranks = self.affected(nodes, seed, field)
        return iter([FaultInterval(0.0, self.at_s, "join", rank, self.start_from) for rank in ranks])


@register("fault", "churn")
class Churn(_Absence):
    """Nodes come and go.

    At random, each node is alternately present and away, for exponential times. Or by a schedule: a CSV file with the
    columns ``time_s,node,event``, where an event is crash, leave or join; a node whose first event is join is away before.

    Args:
        nodes: the nodes that come and go at random: ranks, a number or a fraction of the nodes (drawn), or "all".
        mean_up_s: mean time for which a node is present, seconds.
        mean_down_s: mean time for which it is away.
        by: how nodes go: "crash", or "leave" after completing a round.
        from_s: all nodes are present until then.
        to_s: no node goes from then on; those that are away return as drawn. Null is never.
        restart_from: the model with which nodes return: their newest checkpoint (without one, the initial model), the
            initial model, or the model of a neighbour.
        path: the schedule, in place of ``nodes`` and the two means.
    """

    nodes: Nodes = "all"
    mean_up_s: PositiveFloat | None = None
    mean_down_s: PositiveFloat | None = None
    by: Literal["crash", "leave"] = "crash"
    from_s: NonNegativeFloat = 0.0
    to_s: PositiveFloat | None = None
    restart_from: Literal["checkpoint", "initial", "neighbor"] = "checkpoint"
    path: FilePath | None = None

    @model_validator(mode="after")
    def _random_or_from_file(self) -> Churn:
        check_order(self.from_s, self.to_s)
        means = (self.mean_up_s, self.mean_down_s)
        if None in means if self.path is None else means != (None, None):
            raise ValueError("mean_up_s and mean_down_s, or path")
        return self

    @property
    def endless(self) -> bool:
        return self.path is None and self.to_s is None

    def intervals(self, nodes: int, seed: int, field: str) -> Iterator[FaultInterval]:
        if self.path is not None:
            return iter(self._read(nodes, field))
        ranks = self.affected(nodes, seed, field)
        return merge(*(self._draw(rank, seed, field) for rank in ranks), key=attrgetter("from_s"))

    def affected(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        if self.path is None:
            return super().affected(nodes, seed, field)
        return tuple(sorted({each.node for each in self._read(nodes, field) if each.node is not None}))

    def _draw(self, rank: int, seed: int, field: str) -> Iterator[FaultInterval]:
        assert self.mean_up_s is not None
        assert self.mean_down_s is not None
        now = self.from_s
        for number in count():
            rng = generator(seed, f"{field}.churn", rank, number)
            gone = now + rng.exponential(self.mean_up_s)
            if gone >= end_of(self.to_s):
                return
            now = gone + rng.exponential(self.mean_down_s)
            yield FaultInterval(gone, now, self.by, rank, self.restart_from)

    def _read(self, nodes: int, field: str) -> list[FaultInterval]:
        assert self.path is not None
        intervals: list[FaultInterval] = []
        away: dict[int, tuple[float, str]] = {}  # node -> since when, and by which event
        last: dict[int, float] = {}  # node -> time of its last event
        for where, cells in read_records(self.path, f"{field}.path", ("time_s", "node", "event")):
            time_s, rank = read_number(cells["time_s"], where), read_number(cells["node"], where)
            node, event = int(rank), cells["event"].strip()
            if rank != node or node >= nodes:
                raise BadInput(f"{where}: node {cells['node']}; accepted: ranks 0 to {nodes - 1}")
            if time_s < last.get(node, 0.0):
                raise BadInput(
                    f"{where}: {time_s:g} s, after an event of node {node} at {last[node]:g} s; accepted: ascending"
                )
            if event not in ("crash", "leave", "join"):
                raise BadInput(f"{where}: {event!r}; accepted: crash, join or leave")
            if event != "join" and node in away:
                raise BadInput(f"{where}: {event} of node {node}, which is away; accepted: join")
            if event == "join" and node not in away and node in last:
                raise BadInput(f"{where}: join of node {node}, which is present; accepted: crash or leave")
            if event == "join":
                from_s, by = away.pop(node, (0.0, "join"))
                if time_s > from_s:
                    intervals.append(FaultInterval(from_s, time_s, by, node, self.restart_from))
            else:
                away[node] = time_s, event
            last[node] = time_s
        intervals += [FaultInterval(from_s, math.inf, by, node) for node, (from_s, by) in away.items()]
        return sorted(intervals, key=attrgetter("from_s", "node"))


@register("fault", "slow")
class Slow(Fault):
    """Computations take longer.

    Args:
        nodes: the nodes: ranks, a number or a fraction of the nodes (drawn), or "all".
        factor: what the duration of a computation is multiplied by.
        from_s: when it starts, seconds of the engine's clock.
        to_s: when it ends; null is never.
    """

    nodes: Nodes
    factor: PositiveFloat
    from_s: NonNegativeFloat = 0.0
    to_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check_order(self) -> Slow:
        check_order(self.from_s, self.to_s)
        return self

    def intervals(self, nodes: int, seed: int, field: str) -> Iterator[FaultInterval]:
        detail, to_s = f"computing takes {self.factor:g} times as long", end_of(self.to_s)
        ranks = select_ranks(self.nodes, nodes, seed, field)
        return iter([FaultInterval(self.from_s, to_s, "slowed", rank, detail=detail) for rank in ranks])

    def slowdowns(self, nodes: int, seed: int, field: str) -> Sequence[SlowdownWindow]:
        ranks = select_ranks(self.nodes, nodes, seed, field)
        return [SlowdownWindow.unchecked(self.from_s, end_of(self.to_s), self.factor, ranks)]


@register("fault", "freeze")
class Freeze(Fault):
    """Nodes stop, like a suspended process or a sleeping computer, and later continue where they were.

    Its peers consider a node dead that is frozen for longer than ``failures.detection_s``, until it continues.

    Args:
        nodes: the nodes: ranks, a number or a fraction of the nodes (drawn), or "all".
        at_s: when, seconds of the engine's clock.
        for_s: for how long.
    """

    freezes: ClassVar[bool] = True

    nodes: Nodes
    at_s: NonNegativeFloat
    for_s: PositiveFloat

    def intervals(self, nodes: int, seed: int, field: str) -> Iterator[FaultInterval]:
        ranks = select_ranks(self.nodes, nodes, seed, field)
        return iter([FaultInterval(self.at_s, self.at_s + self.for_s, "freeze", rank) for rank in ranks])
