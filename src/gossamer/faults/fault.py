"""The base class of faults, their effects, and their schedule in a run, which is the same under both engines.
docs/faults.md describes all faults."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import count
from operator import attrgetter
from typing import Annotated, Literal

from pydantic import PlainSerializer, model_validator

from gossamer.config.ranges import PositiveSeconds, Seconds
from gossamer.config.registry import Component
from gossamer.errors import BadInput
from gossamer.network import ComputeProfile, Conditions, Network, Path, Slowdowns, SlowdownWindow
from gossamer.network.network import states_of
from gossamer.selector import FirstGraph, Selector, chosen

StartFrom = Literal["checkpoint", "initial", "neighbor"]
"""The model with which a node starts when it joins or returns: its newest checkpoint (or its initial model,
if it has none), its initial model, or the model of a neighbour."""

Nodes = Annotated[Selector, PlainSerializer(Selector.short)]
"""The nodes that a fault affects. Experiments are saved with the short form, if there is one."""


@dataclass(frozen=True, slots=True)
class FaultInterval:
    """An interval of the engine's clock in which a fault is active. It never ends if its end is ``math.inf``.
    ``kind`` is "crash", "leave" or "join" (a node is away), "freeze", or another name for the record.
    ``node`` is None if the fault does not concern a single node. ``start_from`` is the model with which a
    returning node starts. ``detail`` is for the record."""

    from_s: float
    to_s: float
    kind: str
    node: int | None = None
    start_from: StartFrom = "checkpoint"
    detail: str = ""

    def __post_init__(self) -> None:
        _check_times(self.kind, self.from_s, self.to_s)


def _check_times(kind: str, from_s: float, to_s: float) -> None:
    """Refuse an interval of a fault that is none, or begins before the run."""
    if not 0 <= from_s <= to_s:
        raise BadInput(f"faults: {kind} from {from_s} to {to_s} s; accepted: from 0 on, in this order")


@dataclass(frozen=True, slots=True)
class RoundCrash:
    """A crash of a node as soon as it has completed a number of rounds. It restarts ``after_s`` seconds
    later."""

    node: int
    round: int
    after_s: float
    start_from: StartFrom

    def now(self, now_s: float) -> FaultInterval:
        """The crash, at the time at which the node has completed the rounds."""
        return FaultInterval(now_s, now_s + self.after_s, "crash", self.node, self.start_from)


@dataclass(frozen=True, slots=True)
class LinkFault:
    """An interval in which links behave differently. ``path`` returns the modified path from one node to
    another (None if there is none), ``stopped`` has the numbers of links that carry nothing, and ``loses``
    tells whether messages may be lost."""

    from_s: float
    to_s: float
    path: Callable[[int, int, Path], Path | None] = lambda source, to, path: path
    stopped: tuple[int, ...] = ()
    loses: bool = True

    def __post_init__(self) -> None:
        _check_times("links", self.from_s, self.to_s)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The plan of a fault: its intervals by ``from_s`` (infinitely many if ``endless``), the nodes that may
    be away, crashes given by a round instead of a time, slowdowns of computations, and link faults."""

    intervals: Iterable[FaultInterval]
    affected: tuple[int, ...] = ()
    at_rounds: Sequence[RoundCrash] = ()
    slowdowns: Sequence[SlowdownWindow] = ()
    link_faults: Sequence[LinkFault] = ()
    endless: bool = False


class Fault(Component):
    """Base class of faults, which are the same under both engines. If a fault has a field ``nodes`` of type
    :data:`Nodes`, a run chooses these nodes once, and plans a copy whose ``nodes`` are their ranks."""

    @abstractmethod
    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        """The fault's plan for ``nodes`` nodes. ``field`` is the fault's field in the experiment; it appears
        in errors and, with the seed, is the key of the draws. BadInput if the fault does not fit the number
        of nodes."""


class TemporaryFault(Fault):
    """A fault with a start and an end (null is never), in seconds of the engine's clock."""

    from_s: Seconds = 0.0
    to_s: PositiveSeconds | None = None

    @model_validator(mode="after")
    def _check_order(self) -> TemporaryFault:
        if self.to_s is not None and self.to_s <= self.from_s:
            raise ValueError(f"to_s after from_s, {self.from_s:g}")
        return self

    @property
    def end_s(self) -> float:
        """The end of the fault; ``math.inf`` is never."""
        return math.inf if self.to_s is None else self.to_s


def select_ranks(
    selector: Selector, nodes: int, seed: int, field: str, graph: FirstGraph | None = None
) -> tuple[int, ...]:
    """The ranks of the nodes that a fault affects, ascending. Arguments and errors are as in :meth:`Fault.plan`, and
    ``graph`` is as in :func:`~gossamer.selector.chosen`."""
    return chosen(selector, nodes=nodes, seed=seed, field=f"{field}.nodes", graph=graph)


AWAY = ("crash", "leave", "join")
"""The kinds of intervals in which a node is away."""
END_EVENTS = {"freeze": "thaw", "partition": "healed", "loss": "loss-over", "slowed": "full-speed"}
"""The event at the end of an interval, by its kind. For intervals in which a node is away, it is "return"."""


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """The start or the end of a :class:`~gossamer.faults.fault.FaultInterval`. Engines carry out the events
    whose ``what`` is "crash", "leave", "join" (a node is away from now on), "return", "freeze" or "thaw";
    other events are only recorded."""

    time_s: float
    what: str
    node: int | None = None
    start_from: StartFrom = "checkpoint"
    detail: str = ""


class FaultSchedule:
    """The faults of an experiment, for a number of nodes. ``graph`` returns the graph of round 0, if it is needed; None if
    nodes sample their neighbours. BadInput for faults that do not fit these nodes.

    Attributes:
        chosen: the chosen nodes, by the field that chooses them.
        affected: the nodes that may be away at some point.
        at_rounds: node -> its crashes after a number of completed rounds.
        freezes: whether any node ever freezes.
        asks_neighbors: whether a node may start with the model of a neighbour.
        last_end_s: the end of all faults except the endless ones; ``math.inf`` if no fault is endless."""

    def __init__(
        self, faults: Sequence[Fault], nodes: int, seed: int, graph: FirstGraph | None = None
    ) -> None:
        self._faults, self._nodes, self._seed = list(faults), nodes, seed
        self.chosen: dict[str, tuple[int, ...]] = {}
        for number, fault in enumerate(faults):
            field, selector = f"faults.{number}", getattr(fault, "nodes", None)
            if isinstance(selector, Selector):
                ranks = self.chosen[f"{field}.nodes"] = select_ranks(selector, nodes, seed, field, graph)
                self._faults[number] = fault.model_copy(update={"nodes": Selector(ranks=ranks)})
        plans = self._plans()
        self.affected = frozenset(rank for plan in plans for rank in plan.affected)
        self.at_rounds: dict[int, list[RoundCrash]] = {}
        for crash in (crash for plan in plans for crash in plan.at_rounds):
            self.at_rounds.setdefault(crash.node, []).append(crash)
        self._slowdowns = [window for plan in plans for window in plan.slowdowns]
        self._link_faults = [fault for plan in plans for fault in plan.link_faults]
        self.freezes = any(fault.stopped for fault in self._link_faults)
        starts = [getattr(fault, field, None) for fault in faults for field in ("start_from", "restart_from")]
        self.asks_neighbors = "neighbor" in starts
        self.last_end_s = math.inf
        if any(plan.endless for plan in plans):
            finite = [interval for plan in plans if not plan.endless for interval in plan.intervals]
            times = [time_s for interval in finite for time_s in (interval.from_s, interval.to_s)]
            self.last_end_s = max(filter(math.isfinite, times), default=0.0)

    def _plans(self) -> list[FaultPlan]:
        numbered = enumerate(self._faults)
        return [fault.plan(self._nodes, self._seed, f"faults.{number}") for number, fault in numbered]

    def __bool__(self) -> bool:
        return bool(self._faults)

    def event_queue(self) -> FaultEventQueue:
        """All events of a run."""
        return FaultEventQueue(merge(*(plan.intervals for plan in self._plans()), key=attrgetter("from_s")))

    def network(self, base: Network, *, frozen: bool) -> Network:
        """A network under the faults; ``base`` itself if they do not change it. ``frozen`` tells whether the
        network holds back messages of frozen nodes."""
        link_faults = tuple(fault for fault in self._link_faults if frozen or not fault.stopped)
        if not link_faults:
            return base
        return FaultyNetwork(base=base, link_faults=link_faults, sharing=base.sharing)

    def compute(self, base: ComputeProfile, *, frozen: bool) -> ComputeProfile:
        """The compute profile of these nodes under the faults; ``base`` itself if they do not change it. ``frozen``
        tells whether the profile stops computations of frozen nodes. BadInput for a profile other than
        ``slowdowns`` that depends on the time."""
        windows = tuple(window for window in self._slowdowns if frozen or math.isfinite(window.factor))
        if not windows:
            return base
        if isinstance(base, Slowdowns):
            return base.model_copy(update={"windows": (*base.windows, *windows)})
        if base.depends_on_time:
            clash = f"{base.name_of()}, which depends on the time, with faults that slow nodes down or freeze them"
            raise BadInput(f"compute: {clash}; accepted: slowdowns, or a profile that does not depend on it")
        return Slowdowns.model_construct(base=base, windows=windows, random=None)

    def factor(self, rank: int, time_s: float) -> float:
        """The slowdown factor of a node that is not frozen at a given time."""
        windows = [window for window in self._slowdowns if window.from_s <= time_s < window.to_s]
        factors = [window.factor for window in windows if rank in (window.ranks or ())]
        return math.prod(filter(math.isfinite, factors))


class FaultEventQueue:
    """The fault events of a run in the order of time, and the nodes that are away.

    A node is away during any of its intervals; the last of them determines the model with which it starts
    when it returns. There may be infinitely many intervals, sorted by ``from_s``; unforeseen ones are added
    during the run (:meth:`add`)."""

    def __init__(self, intervals: Iterator[FaultInterval]) -> None:
        self._intervals = intervals
        # (time_s, whether the interval ends then, node, number, interval)
        self._heap: list[tuple[float, bool, int, int, FaultInterval]] = []
        self._latest: FaultInterval | None = None  # the last interval taken from ``intervals``
        self._numbers = count()
        self._active: Counter[tuple[int, str]] = Counter()
        self._gone_for_good: set[int] = set()
        self._take_next()

    @property
    def next_s(self) -> float:
        """The time of the next event; ``math.inf`` is never."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now_s: float) -> Iterator[FaultEvent]:
        """Remove and return the events up to now."""
        while self._heap and self._heap[0][0] <= now_s:
            time_s, ends, _, _, interval = heapq.heappop(self._heap)
            node, away = interval.node, interval.kind in AWAY
            if not ends:
                self._push(interval.to_s, True, interval)
                if interval is self._latest:
                    self._take_next()
                if node is not None and away and math.isinf(interval.to_s):
                    self._gone_for_good.add(node)
            if node is not None:
                state = node, "away" if away else interval.kind
                self._active[state] += -1 if ends else 1
                if self._active[state] != (not ends):
                    continue  # another interval has the same effect
            what, detail = interval.kind, interval.detail
            if ends:
                what, detail = "return" if away else END_EVENTS.get(what, f"{what}-over"), ""
            yield FaultEvent(time_s, what, node, interval.start_from, detail)

    def add(self, interval: FaultInterval) -> None:
        """Add an interval that starts now or later."""
        self._push(interval.from_s, False, interval)

    def returns(self, node: int) -> bool:
        """Whether a node is away and known to return."""
        return self._active[node, "away"] > 0 and node not in self._gone_for_good

    def _take_next(self) -> None:
        self._latest = next(self._intervals, None)
        if self._latest is not None:
            self._push(self._latest.from_s, False, self._latest)

    def _push(self, time_s: float, ends: bool, interval: FaultInterval) -> None:
        if math.isfinite(time_s):
            rank = -1 if interval.node is None else interval.node
            heapq.heappush(self._heap, (time_s, ends, rank, next(self._numbers), interval))


class FaultyNetwork(Network):
    """A network under link faults. Transfers share links as in ``base``. Experiments can't name it."""

    base: Network
    link_faults: tuple[LinkFault, ...]

    def conditions(self, nodes: int, seed: int) -> Conditions:
        return next(self._states(nodes, seed))[1]

    def loses(self, nodes: int, seed: int) -> bool:
        return self.base.loses(nodes, seed) or any(fault.loses for fault in self.link_faults)

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        ends = {end for fault in self.link_faults for end in (fault.from_s, fault.to_s) if math.isfinite(end)}
        for time_s, base in states_of(self.base, nodes, seed, ends):
            active = [fault for fault in self.link_faults if fault.from_s <= time_s < fault.to_s]
            yield time_s, _FaultyConditions(base, active) if active else base


class _FaultyConditions(Conditions):
    def __init__(self, base: Conditions, active: Sequence[LinkFault]) -> None:
        self._base, self._active = base, active
        self.rates = base.rates.copy()
        self.rates[[link for fault in active for link in fault.stopped]] = 0.0

    def path(self, source: int, to: int) -> Path | None:
        path = self._base.path(source, to)
        for fault in self._active:
            path = path and fault.path(source, to, path)
        return path
