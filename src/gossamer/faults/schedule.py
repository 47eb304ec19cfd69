"""All faults of an experiment: what happens when. Both engines carry out the same schedule."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import count
from operator import attrgetter

from gossamer.errors import BadInput
from gossamer.faults.fault import Fault, FaultInterval, FaultPlan, LinkFault, RoundCrash, StartFrom
from gossamer.network import ComputeProfile, Conditions, Network, Path, Slowdowns
from gossamer.network.network import Changing, states_of

AWAY = ("crash", "leave", "join")
"""The kinds of intervals in which a node is away."""
END_EVENTS = {"freeze": "thaw", "partition": "healed", "loss": "loss-over", "slowed": "full-speed"}
"""The event at the end of an interval, by its kind; for those in which a node is away it is "return"."""


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """The start or the end of a :class:`~gossamer.faults.fault.FaultInterval`. ``what`` is "crash", "leave", "join" (a node
    is away from now on), "return", "freeze" or "thaw", which engines carry out; other events are only recorded."""

    time_s: float
    what: str
    node: int | None = None
    start_from: StartFrom = "checkpoint"
    detail: str = ""


class FaultSchedule:
    """The faults of an experiment, for a number of nodes.

    Attributes:
        affected: the nodes that may be away at some time.
        at_rounds: by node, its crashes after a number of completed rounds.
        freezes: whether any node ever freezes.
        asks_neighbors: whether a node may start with the model of a neighbour.
        settled_s: the end of all faults but the endless ones; ``math.inf`` if no fault is endless.

    Raises:
        BadInput: for faults that do not fit the number of nodes; names the field.
    """

    def __init__(self, faults: Sequence[Fault], nodes: int, seed: int) -> None:
        self._faults, self._nodes, self._seed = faults, nodes, seed
        plans = self._plans()
        self.affected = frozenset(rank for plan in plans for rank in plan.affected)
        self.at_rounds: dict[int, list[RoundCrash]] = {}
        for crash in (crash for plan in plans for crash in plan.at_rounds):
            self.at_rounds.setdefault(crash.node, []).append(crash)
        self._slowdowns = [window for plan in plans for window in plan.slowdowns]
        self._link_faults = [fault for plan in plans for fault in plan.link_faults]
        finite = [each for plan in plans if not plan.endless for each in plan.intervals]
        self.freezes = any(fault.stopped for fault in self._link_faults)
        self.asks_neighbors = any(
            "neighbor" in (getattr(fault, "start_from", None), getattr(fault, "restart_from", None))
            for fault in faults
        )
        self.settled_s = math.inf
        if any(plan.endless for plan in plans):
            ends = [time_s for each in finite for time_s in (each.from_s, each.to_s) if math.isfinite(time_s)]
            self.settled_s = max(ends, default=0.0)

    def _plans(self) -> list[FaultPlan]:
        each = enumerate(self._faults)
        return [fault.plan(self._nodes, self._seed, f"faults.{number}") for number, fault in each]

    def __bool__(self) -> bool:
        return bool(self._faults)

    def event_queue(self) -> FaultEventQueue:
        """The events from the start on."""
        return FaultEventQueue(merge(*(plan.intervals for plan in self._plans()), key=attrgetter("from_s")))

    def network(self, base: Network, *, frozen: bool) -> Network:
        """A network under the faults; ``base`` itself if they don't change it. ``frozen`` says whether it is the network that
        keeps messages from frozen nodes."""
        link_faults = tuple(fault for fault in self._link_faults if frozen or not fault.stopped)
        if not link_faults:
            return base
        return FaultyNetwork(base=base, link_faults=link_faults, sharing=base.sharing)

    def compute(self, base: ComputeProfile, *, frozen: bool) -> ComputeProfile:
        """A settled compute profile under the faults; ``base`` itself if they don't change it. ``frozen`` says whether it is
        the profile that stops computations of frozen nodes. A profile other than ``slowdowns`` that depends on the time is
        bad input."""
        windows = tuple(each for each in self._slowdowns if frozen or math.isfinite(each.factor))
        if not windows:
            return base
        if isinstance(base, Slowdowns):
            return base.model_copy(update={"windows": (*base.windows, *windows)})
        if base.depends_on_time:
            raise BadInput(
                f"compute: {base.name_of()}, which depends on the time, with faults that slow nodes down or freeze them;"
                " accepted: slowdowns, or a profile that does not depend on the time"
            )
        return Slowdowns.model_construct(base=base, windows=windows, random=None)

    def factor(self, rank: int, time_s: float) -> float:
        """The factor by which the computations of a node that is not frozen take longer at some time."""
        return math.prod(
            window.factor
            for window in self._slowdowns
            if rank in (window.ranks or ())
            and window.from_s <= time_s < window.to_s
            and math.isfinite(window.factor)
        )


class FaultEventQueue:
    """The fault events of a run in order of time, and which nodes are away.

    A node is away as long as any of its intervals says so; the last of them says with which model it starts when it
    returns. The intervals, by ``from_s``, may be infinite; unforeseen ones are added during the run (:meth:`add`).
    """

    def __init__(self, intervals: Iterator[FaultInterval]) -> None:
        self._intervals = intervals
        # time_s, whether the interval ends then, node, number
        self._heap: list[tuple[float, bool, int, int, FaultInterval]] = []
        self._latest: FaultInterval | None = None  # the last one taken from ``intervals``
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
                    continue  # another interval says the same
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


class FaultyNetwork(Changing):
    """A network under link faults; transfers share links as ``base`` says. No experiment names it."""

    base: Network
    link_faults: tuple[LinkFault, ...]

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
