"""Links that all transfers share at once, max-min fairly.

Every ordered pair of nodes is a connection, on which messages follow one another. (With ``sharing: in-turn``
every node has one connection for all of its messages.) A connection with messages is a flow, modelled as a
fluid; its last bit arrives one latency after it left. Shares change when a flow begins, ends or is cancelled,
and when the network changes, but only once per instant.

An allocation is max-min fair if every flow crosses a full link on which no other flow has a larger share,
each in proportion to its weight (Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2). It is stored
as one level per link: the largest share that a flow of weight 1 can have there. Levels are the fixed point of

    sum_{f on l} w_f min(level_l, bound_f) = rate_l        (level_l is infinite if the link cannot be filled)

with bound_f the lowest level of the flow's other links, or its own limit if that is lower. A flow's share is
w_f times the lowest level of its links. When a flow starts or ends, a link is recomputed only if the bound of
one of its flows has changed below its level. Lower links come first, since a level depends only on lower
ones."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, TypeVar

from gossamer.messages.tags import WINDOW, Message, Sending
from gossamer.network import Path
from gossamer.runtime.simulate.core import NEVER_NS, NS, Order, ScheduledCall
from gossamer.runtime.simulate.links import NETWORK, ROUNDING_BYTES, Links, Transfer, duration_ns

MIN_RTT_S = 1e-4
"""Round-trip time of a path without latency, as on a local network; shares are proportional to its
inverse."""
UNKNOWN_RTT_S = 1.0  # the round-trip time without a path: TCP's assumption before the first answer (RFC 6298)
MANY_DUE = 1000  # predictions that are kept without removing outdated ones
CLOSE = 1e-12  # relative changes of a level up to this are rounding errors, and are ignored

_Levels = list[float]
_Bound = Callable[[_Levels], float]


@dataclass(eq=False, slots=True)
class Flow:
    """A flow that takes a share of some links."""

    links: tuple[int, ...] = ()
    weight: float = 1.0
    limit: float = math.inf  # its highest rate, bytes per second
    rate: float = 0.0  # its current rate
    shares: Callable[[_Levels], tuple[float, ...]] = tuple  # picks the levels of its links from all


F = TypeVar("F", bound=Flow)


class MaxMin(Generic[F]):
    """The shares of all flows over links with given rates, bytes per second."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = list(rates)
        self._levels: _Levels = [math.inf] * len(self._rates)
        self._flows: list[dict[F, _Bound]] = [{} for _ in self._rates]
        self._moved: dict[int, None] = {}  # links whose level may have changed
        self._new: dict[F, None] = {}
        self._weighted = False  # whether any flow has had a weight other than 1; filling is faster if not

    def add(self, flow: F) -> None:
        """Give a flow its share from the next :meth:`settle` on."""
        first = flow.links[0]  # twice, so that itemgetter gives a tuple even for one link
        flow.shares = itemgetter(first, *flow.links)
        for link in flow.links:
            self._flows[link][flow] = _bound(flow, link)
            self._moved[link] = None
        self._new[flow] = None
        self._weighted = self._weighted or flow.weight != 1

    def remove(self, flow: F) -> None:
        for link in flow.links:
            del self._flows[link][flow]
            self._moved[link] = None
        self._new.pop(flow, None)
        flow.rate = 0.0

    def change(self, rates: Sequence[float]) -> None:
        for link, (before, rate) in enumerate(zip(self._rates, rates, strict=True)):
            if before != rate:
                self._rates[link] = rate
                self._moved[link] = None

    def settle(self) -> list[tuple[F, float]]:
        """The flows whose rates have changed, with their new rates; the caller sets ``flow.rate``."""
        changed, self._new = self._new, {}
        levels, moved = self._levels, self._moved
        queue = [(levels[link], link) for link in moved]
        heapq.heapify(queue)
        while queue:
            _, link = heapq.heappop(queue)
            if link not in moved:
                continue
            del moved[link]
            before, level = levels[link], self._level(link)
            if level == before or before * (1 - CLOSE) <= level <= before * (1 + CLOSE) < math.inf:
                continue
            levels[link] = level
            lowest = min(before, level)
            for flow, bound in self._flows[link].items():
                if bound(levels) > lowest:  # otherwise another link decides, before and after
                    changed[flow] = None
                    for other in flow.links:
                        if other not in moved and levels[other] > lowest and other != link:
                            moved[other] = None
                            heapq.heappush(queue, (levels[other], other))
        rates = [(flow, min(flow.weight * min(flow.shares(levels)), flow.limit)) for flow in changed]
        return [(flow, rate) for flow, rate in rates if rate != flow.rate]

    def _level(self, link: int) -> float:
        """The level that fills a link: flows bounded below it get their bound, the others share the rest by
        weight."""
        flows, levels, room = self._flows[link], self._levels, self._rates[link]
        if math.isinf(room) or not flows:
            return math.inf
        if not self._weighted:
            shares = sorted([bound(levels) for bound in flows.values()])
            for sharing, share in zip(range(len(shares), 0, -1), shares, strict=True):
                if share * sharing >= room:
                    return max(room, 0.0) / sharing
                room -= share
            return math.inf
        bounds = sorted([(bound(levels), flow.weight) for flow, bound in flows.items()])
        weights = math.fsum([weight for _, weight in bounds])
        for bound, weight in bounds:
            if bound * weights >= room:
                return max(room, 0.0) / weights
            room -= bound * weight
            weights -= weight
        return math.inf


def _bound(flow: Flow, link: int) -> _Bound:
    """A flow's bound from its limit and all of its links but one."""
    others = [other for other in flow.links if other != link]
    limit = flow.limit / flow.weight
    if len(others) == 1 and math.isinf(limit):
        return itemgetter(others[0])
    return lambda levels: min([limit, *[levels[other] for other in others]])


@dataclass(eq=False, slots=True)
class _Connection(Flow):
    """The queued messages from one node to another, or to all others. The first one is being sent."""

    source: int = 0
    key: int = 0  # identifies it among the node's connections
    messages: deque[Transfer] = field(default_factory=deque)
    rest: float = 0.0  # bytes of the first message that had not left at since_ns
    since_ns: int = 0
    pause: int = 0  # the rest at which the next step is due: the last window, or 0
    due_ns: int = NEVER_NS  # when the next step is due, at the current rate

    def rest_at(self, time_ns: int) -> float:
        if time_ns == self.since_ns:
            return self.rest
        rest = self.rest - self.rate * ((time_ns - self.since_ns) / NS)
        return rest if rest > self.pause else self.pause

    def advance(self, time_ns: int) -> None:
        self.rest, self.since_ns = self.rest_at(time_ns), time_ns

    def gone_by(self, time_ns: int) -> int:
        """Whole bytes of the first message that have left by an instant."""
        return self.messages[0].size - math.ceil(self.rest_at(time_ns) - ROUNDING_BYTES)


class FairLinks(Links):
    """Links that all connections share at once: equally with ``sharing: fair`` and ``in-turn``; with
    ``rtt-fair`` by the inverse of the path's round-trip time (twice its latency, at least
    :data:`MIN_RTT_S`)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._by_rtt = self._network.sharing == "rtt-fair"
        self._in_turn = self._network.sharing == "in-turn"
        self._connections: list[dict[int, _Connection]] = [{} for _ in range(self._nodes)]
        self._shares: MaxMin[_Connection] = MaxMin(self.rates)
        self._due: list[tuple[int, int, int]] = []  # a heap: due_ns, source and key of connections
        self._due_at_most = MANY_DUE
        self._next: ScheduledCall | None = None
        self._next_ns = 0

    # --- connections

    def _queue(self, source: int, messages: Sequence[tuple[Message, int]], size: int) -> list[Sending]:
        transfers: list[Sending] = []
        for message, to in messages:
            transfers.append(transfer := Transfer(self, message, to, size, size))
            key = 0 if self._in_turn else to
            connection = self._connections[source].get(key)
            if connection is None:
                connection = self._connections[source][key] = _Connection(source=source, key=key)
            connection.messages.append(transfer)
            if len(connection.messages) == 1:
                self._begin(connection)
                self._update_at(self.core.now_ns)
        return transfers

    def _begin(self, connection: _Connection) -> None:
        transfer = connection.messages[0]
        connection.rest, connection.since_ns = float(transfer.size), self.core.now_ns
        connection.pause = WINDOW if transfer.size > WINDOW else 0
        path = self._leave(transfer, self.core.now_ns)
        self._route(connection, path, transfer.lost)

    def _route(self, connection: _Connection, path: Path | None, lost: bool) -> None:
        """Route a connection. A lost message uses only its uplink."""
        links: tuple[int, ...] = (connection.source,)
        weight, limit = 1.0, math.inf
        if path is not None and not lost:
            links, limit = path.links, path.rate
        if self._by_rtt:
            weight = 1 / (UNKNOWN_RTT_S if path is None else max(2 * path.latency_s, MIN_RTT_S))
        if (links, weight, limit) != (connection.links, connection.weight, connection.limit):
            if connection.links:
                self._shares.remove(connection)
            connection.links, connection.weight, connection.limit = links, weight, limit
            self._shares.add(connection)
            self._update_at(self.core.now_ns)
        self._predict(connection)

    def _end(self, connection: _Connection) -> None:
        connection.messages.popleft()
        if connection.messages:
            self._begin(connection)
        else:
            connection.due_ns = NEVER_NS
            del self._connections[connection.source][connection.key]
            self._shares.remove(connection)

    # --- time

    def _predict(self, connection: _Connection) -> None:
        rest = connection.rest - connection.pause
        connection.due_ns = due_ns = connection.since_ns + duration_ns(rest, connection.rate)
        heapq.heappush(self._due, (due_ns, connection.source, connection.key))
        transfer, per_ns = (
            connection.messages[0],
            0.0 if math.isinf(connection.rate) else connection.rate / NS,
        )
        self._sent.flow(transfer, 0, transfer.size - connection.rest, per_ns, connection.since_ns)

    def _update_at(self, time_ns: int) -> None:
        if self._next is not None:
            if self._next_ns <= time_ns:
                return
            self._next.cancel()
        self._next, self._next_ns = self.core.at(time_ns, Order.ARRIVAL, NETWORK, self._update), time_ns

    def _update(self) -> None:
        """Take the steps that are due, update all shares, and schedule the next update."""
        now = self.core.now_ns
        while (due := self._first_due()) is not None and due.due_ns <= now:
            heapq.heappop(self._due)
            self._step(due)
        for connection, rate in self._shares.settle():
            connection.advance(now)
            connection.rate = rate
            self._predict(connection)
        self._next, due = None, self._first_due()
        if len(self._due) > self._due_at_most:  # most predictions are outdated
            self._due = sorted((flow.due_ns, flow.source, flow.key) for flow in self._all())
            self._due_at_most = MANY_DUE + 4 * len(self._due)
        if due is not None:
            self._update_at(due.due_ns)

    def _first_due(self) -> _Connection | None:
        due = self._due
        while due:
            due_ns, source, key = due[0]
            connection = self._connections[source].get(key)
            if connection is not None and connection.due_ns == due_ns:
                return connection
            heapq.heappop(due)  # an outdated prediction
        return None

    def _step(self, connection: _Connection) -> None:
        now, transfer = self.core.now_ns, connection.messages[0]
        if connection.pause:  # all but the last window has left; its acknowledgement takes a round trip
            connection.rest, connection.since_ns, connection.pause = float(connection.pause), now, 0
            self._predict(connection)
            if not transfer.lost:
                transfer.accept_at(now + 2 * transfer.latency_ns)
            return
        transfer.end_ns = now
        self._left(transfer)
        self._sent.stop(transfer, transfer.size)
        if transfer.lost:
            transfer.accept_at(now)
        else:
            self._travel(transfer)
        self._end(connection)

    def _travel(self, transfer: Transfer) -> None:
        arrival_ns = self.core.now_ns + transfer.latency_ns
        self.core.at(arrival_ns, Order.DELIVERY, transfer.message.source, self._finish, transfer)

    # --- changes of the plan

    def _withdraw(self, transfer: Transfer) -> bool:
        if transfer.end_ns <= self.core.now_ns:
            return False
        key = 0 if self._in_turn else transfer.to
        connection = self._connections[transfer.message.source][key]
        if connection.messages[0] is not transfer:
            connection.messages.remove(transfer)
            return True
        gone = connection.gone_by(self.core.now_ns)
        self._interrupt(transfer, gone)
        self._sent.stop(transfer, gone)
        if gone and not transfer.lost:
            self._travel(transfer)
        self._end(connection)
        self._update_at(self.core.now_ns)
        return True

    def _changed(self, before: list[float]) -> None:
        now = self.core.now_ns
        for connection in self._all():
            transfer = connection.messages[0]
            path = self._conditions.path(connection.source, transfer.to)
            transfer.lost = transfer.lost or path is None
            connection.advance(now)
            self._route(connection, path, transfer.lost)
        self._shares.change(self.rates)
        self._update_at(now)

    def _all(self) -> Iterator[_Connection]:
        for connections in self._connections:
            yield from connections.values()

    def _waiting(self, rank: int) -> Sequence[Transfer]:
        connections = self._connections[rank].values()
        return [transfer for connection in connections for transfer in connection.messages]

    def _leaving(self, rank: int) -> Iterable[tuple[Transfer, int]]:
        now = self.core.now_ns
        for connection in self._connections[rank].values():
            yield connection.messages[0], connection.gone_by(now)
