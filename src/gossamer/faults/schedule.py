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
from gossamer.faults.fault import Fault, FaultInterval, LinkFault, RoundCrash, StartFrom
from gossamer.faults.network_faults import FaultyNetwork, FrozenLinks
from gossamer.network import ComputeProfile, Network, Slowdowns, SlowdownWindow

AWAY = ("crash", "leave", "join")
"""The kinds of intervals in which a node is away."""
END_EVENTS = {"freeze": "thaw", "partition": "healed", "loss": "loss-over", "slowed": "full-speed"}
"""The event at the end of an interval, by its kind; for those in which a node is away it is "return"."""


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """The start or the end of an interval.

    Args:
        time_s: when, seconds of the engine's clock.
        what: "crash", "leave", "join" (a node is away from now on), "return", "freeze" or "thaw", which engines carry out;
            other events are only recorded.
        node: the node that it affects; None if it is not about one node.
        start_from: the model with which a node that returns starts.
        detail: a description, for the record.
    """

    time_s: float
    what: str
    node: int | None = None
    start_from: StartFrom = "checkpoint"
    detail: str = ""


class FaultSchedule:
    """The faults of an experiment, for a number of nodes.

    Args:
        faults: as the experiment lists them.
        nodes: number of nodes.
        seed: the experiment's seed.

    Attributes:
        affected: the nodes that may be away at some time.
        at_rounds: by node, its crashes after a number of completed rounds.
        asks_neighbors: whether a node may start with the model of a neighbour.
        settled_s: the end of all faults but the endless ones; ``math.inf`` if no fault is endless.

    Raises:
        BadInput: for faults that do not fit the number of nodes; names the field.
    """

    def __init__(self, faults: Sequence[Fault], nodes: int, seed: int) -> None:
        self._faults = [(fault, (nodes, seed, f"faults.{number}")) for number, fault in enumerate(faults)]
        self._nodes = nodes
        self.affected = frozenset(rank for fault, args in self._faults for rank in fault.affected(*args))
        self.at_rounds: dict[int, list[RoundCrash]] = {}
        self._slowdowns: list[SlowdownWindow] = []
        self._freezes: list[tuple[int, float, float]] = []  # node, from_s, to_s
        self._link_faults: list[LinkFault] = []
        for fault, args in self._faults:
            for crash in fault.at_rounds(*args):
                self.at_rounds.setdefault(crash.node, []).append(crash)
            self._slowdowns += fault.slowdowns(*args)
            self._link_faults += fault.link_faults(*args)
            for interval in fault.intervals(*args) if fault.freezes else ():
                assert interval.node is not None
                self._freezes.append((interval.node, interval.from_s, interval.to_s))
            next(fault.intervals(*args), None)  # raises if the fault does not fit
        self.asks_neighbors = any(
            "neighbor" in (getattr(fault, "start_from", None), getattr(fault, "restart_from", None))
            for fault, _ in self._faults
        )
        self.settled_s = self._settled() if any(fault.endless for fault in faults) else math.inf

    def _settled(self) -> float:
        finite = [fault.intervals(*args) for fault, args in self._faults if not fault.endless]
        ends = [time_s for intervals in finite for each in intervals for time_s in (each.from_s, each.to_s)]
        return max((time_s for time_s in ends if math.isfinite(time_s)), default=0.0)

    def __bool__(self) -> bool:
        return bool(self._faults)

    def event_queue(self) -> FaultEventQueue:
        """The events from the start on."""
        intervals = (fault.intervals(*args) for fault, args in self._faults)
        return FaultEventQueue(merge(*intervals, key=attrgetter("from_s")))

    def network(self, base: Network, *, frozen: bool) -> Network:
        """A network under the faults; ``base`` itself if they don't change it.

        Args:
            base: the network.
            frozen: whether it is the network that keeps messages from frozen nodes.
        """
        still = [FrozenLinks(rank, self._nodes, *interval) for rank, *interval in self._freezes if frozen]
        link_faults = (*self._link_faults, *still)
        if not link_faults:
            return base
        return FaultyNetwork(base=base, link_faults=link_faults, sharing=base.sharing)

    def compute(self, base: ComputeProfile, *, frozen: bool) -> ComputeProfile:
        """A settled compute profile under the faults; ``base`` itself if they don't change it.

        Args:
            base: the profile.
            frozen: whether it is the profile that stops computations of frozen nodes.

        Raises:
            BadInput: for a profile other than ``slowdowns`` that depends on the time.
        """
        windows = tuple(self._slowdowns)
        if frozen:
            windows += tuple(
                SlowdownWindow.unchecked(from_s, to_s, math.inf, (rank,))
                for rank, from_s, to_s in self._freezes
            )
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
        """The factor by which a node's computations take longer at some time."""
        return math.prod(
            window.factor
            for window in self._slowdowns
            if rank in (window.ranks or ()) and window.from_s <= time_s < window.to_s
        )


class FaultEventQueue:
    """The fault events of a run in order of time, and which nodes are away.

    A node is away as long as any of its intervals says so; the last of them says with which model it starts when it
    returns. Unforeseen intervals are added during the run (:meth:`add`).

    Args:
        intervals: by ``from_s``; may be infinite.
    """

    def __init__(self, intervals: Iterator[FaultInterval]) -> None:
        self._intervals = intervals
        self._heap: list[
            tuple[float, bool, int, int, FaultInterval]
        ] = []  # the bool: whether the interval ends
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
            if not ends:
                self._push(interval.to_s, True, interval)
            if interval is self._latest:
                self._take_next()
            event = self._end(interval, time_s) if ends else self._start(interval, time_s)
            if event is not None:
                yield event

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

    def _start(self, interval: FaultInterval, time_s: float) -> FaultEvent | None:
        if interval.node is not None:
            state = interval.node, _state(interval)
            self._active[state] += 1
            if interval.kind in AWAY and math.isinf(interval.to_s):
                self._gone_for_good.add(interval.node)
            if self._active[state] > 1:
                return None
        return FaultEvent(time_s, interval.kind, interval.node, interval.start_from, interval.detail)

    def _end(self, interval: FaultInterval, time_s: float) -> FaultEvent | None:
        if interval.node is not None:
            state = interval.node, _state(interval)
            self._active[state] -= 1
            if self._active[state]:
                return None
        what = "return" if interval.kind in AWAY else END_EVENTS.get(interval.kind, f"{interval.kind}-over")
        return FaultEvent(time_s, what, interval.node, interval.start_from)


def _state(interval: FaultInterval) -> str:
    return "away" if interval.kind in AWAY else interval.kind
