"""An experiment's network, applied to real traffic in user space, without root, at both ends of a connection.

A sender meters each chunk on its uplink before writing it. A receiver meters incoming bytes on its downlink
before acknowledging them, so that a slow downlink slows its senders down through the window, as in TCP. A
message is delivered one latency after its last byte has passed. Rates apply to the bytes that the traffic
counters count: frames with their headers.

Timers on a real machine fire a millisecond or more late, so bytes pass in bursts. A bucket continues from the
instant at which it should have continued, so delays do not accumulate."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from gossamer.network import Conditions, Network, Path, delivery
from gossamer.network.network import checked_changes

LATE_S = 0.02
"""Seconds by which timers and credit may be late without slowing a flow: a downlink acknowledges bytes this
long before their turn (but delivers no message early), and an uplink may continue from this long ago."""
CATCH_UP_S = 0.1
"""The same within a message, for a process that had to wait for a core. It catches up by at most one window,
ahead of the receiver's downlink."""
SLOWEST = 1.0
"""Bytes per second of a link whose rate is 0, so that waiting bytes continue when the rate changes."""


class Bucket:
    """A link that bytes pass one after another, at a rate in bytes per second (a token bucket of size 0)."""

    def __init__(self, rate: float = math.inf) -> None:
        self.rate = max(rate, SLOWEST)
        self.free = -math.inf
        """The instant at which all bytes taken so far have passed."""

    def take(self, nbytes: int, since: float) -> float:
        """Take some bytes that could pass from ``since`` on. Returns the instant when the last has passed."""
        self.free = max(self.free, since) + nbytes / self.rate
        return self.free

    def give_back(self, now: float) -> None:
        """Give back the bytes that were taken and have not passed by now."""
        self.free = min(self.free, now)

    def change(self, rate: float, now: float) -> None:
        """Set the rate, also for bytes that were taken and have not passed."""
        before, self.rate = self.rate, max(rate, SLOWEST)
        if self.free > now and before != self.rate:
            self.free = now + (self.free - now) * before / self.rate


class OrderedCalls:
    """Scheduled calls, made in the order in which they were added: none overtakes another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def add(self, instant: float, call: Callable[[], None]) -> None:
        """Make a call at an instant, or later, once all calls before it were made."""
        if self._waiting:
            instant = max(instant, self._waiting[-1][0])
        self._waiting.append((instant, call))
        if len(self._waiting) == 1:
            self._run()

    def _run(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._loop.time():
            self._waiting[0][1]()
            self._waiting.popleft()
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._run)


class _Piece(NamedTuple):
    """Bytes that wait for a downlink. Those of the lowest turn go first, in the order of arrival."""

    turn: int
    number: int
    nbytes: int
    since: float
    arrived_at: float
    taken: Callable[[], None]
    passes: Callable[[float], None] | None


class Downlink:
    """Lets all senders' bytes in at one rate. It never waits for one sender while it has another's bytes."""

    def __init__(self, rate: float, loop: asyncio.AbstractEventLoop) -> None:
        self._bucket = Bucket(rate)
        self._loop = loop
        self._queue: list[_Piece] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def enter(
        self,
        nbytes: int,
        since: float,
        turn: int,
        taken: Callable[[], None],
        passes: Callable[[float], None] | None = None,
    ) -> None:
        """Let some bytes pass that came in since an instant; of the waiting bytes, the lowest turn goes
        first. ``taken`` is called when they are about to pass, so that more may be sent. Then ``passes`` is
        called with the instant at which all of them have passed."""
        piece = _Piece(turn, next(self._numbers), nbytes, since, self._loop.time(), taken, passes)
        heapq.heappush(self._queue, piece)
        if self._timer is None:
            self._serve()

    def change(self, rate: float) -> None:
        """Set the rate."""
        self._bucket.change(rate, self._loop.time())
        self._serve()

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._bucket.rate == SLOWEST:
            return  # nothing passes until the rate changes
        while self._queue and self._bucket.free <= self._loop.time() + LATE_S:
            piece = heapq.heappop(self._queue)
            last_byte = max(self._bucket.take(piece.nbytes, piece.since), piece.arrived_at)
            piece.taken()
            if piece.passes is not None:
                piece.passes(last_byte)
        if self._queue and self._timer is None:
            self._timer = self._loop.call_at(self._bucket.free - LATE_S, self._serve)


class Shaper:
    """One node's part of a network; ``changed`` is called when the network has changed."""

    def __init__(
        self, rank: int, network: Network, nodes: int, seed: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._rank, self._nodes, self._seed, self._loop = rank, nodes, seed, loop
        self._one_at_a_time = network.sharing == "fifo"
        self._conditions = network.conditions(nodes, seed)
        self._changes = checked_changes(network, nodes, seed)
        self._to = rank  # the receiver of the message on the uplink
        self._lost = False  # whether that message is lost
        self._departed: defaultdict[int, int] = defaultdict(int)  # messages by receiver
        self._arrived: defaultdict[int, int] = defaultdict(int)  # messages by sender
        self._turns: dict[int, int] = {}  # of the incoming message from each sender
        self._next_turn = itertools.count()
        self._delays: defaultdict[int, OrderedCalls] = defaultdict(lambda: OrderedCalls(loop))  # by sender
        self.uplink = Bucket(self._rate(rank, None))
        self.downlink = Downlink(float(self._conditions.rates[nodes + rank]), loop)
        self.changed: Callable[[], None] = lambda: None

    @classmethod
    def of(
        cls, rank: int, network: Network, nodes: int, seed: int, loop: asyncio.AbstractEventLoop
    ) -> Shaper | None:
        return cls(rank, network, nodes, seed, loop) if is_limited(network, nodes, seed) else None

    def start(self, at: float) -> None:
        """Apply the network's changes. The run starts at this instant of the loop's clock."""
        for time_s, conditions in self._changes:
            if at + time_s > self._loop.time():
                self._loop.call_at(at + time_s, self._change, conditions, at)
                return
            self._apply(conditions)

    def _change(self, conditions: Conditions, start: float) -> None:
        self._apply(conditions)
        self.start(start)

    def _apply(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._meter(self._path(self._rank, self._to))
        self.downlink.change(float(conditions.rates[self._nodes + self._rank]))
        self.changed()

    def _path(self, source: int, to: int) -> Path | None:
        return None if source == to else self._conditions.path(source, to)

    def _rate(self, source: int, path: Path | None) -> float:
        """Bytes per second that the links before the receiver's downlink let through."""
        rates = self._conditions.rates
        if path is None:
            return float(rates[source])
        return min(path.rate, *(float(rates[link]) for link in (source, *path.links[:-1])))

    # --- the sender's end

    def depart(self, to: int) -> tuple[bool, float]:
        """Begin the next message on the uplink, to node ``to``. Returns whether the network loses it (after
        its time on the uplink), and the seconds from the moment when a byte passes the uplink to its
        acknowledgement."""
        path, self._to = self._path(self._rank, to), to
        latency = delivery(path, self._seed, self._rank, to, _next(self._departed, to, path))
        self._lost = latency is None
        self._meter(path)
        return self._lost, 2 * (latency or 0.0)

    def _meter(self, path: Path | None) -> None:
        """Set the uplink's rate for the message on it; a lost message is limited only by the uplink."""
        self._lost = self._lost or path is None
        self.uplink.change(self._rate(self._rank, None if self._lost else path), self._loop.time())

    def reaches(self, to: int) -> bool:
        return self._path(self._rank, to) is not None

    # --- the receiver's end

    def arrive(
        self,
        source: int,
        nbytes: int,
        taken: Callable[[], None],
        ends: bool,
        deliver: Callable[[], None] | None,
    ) -> None:
        """Take incoming bytes of one message. ``taken`` is called when the downlink takes them. If they are
        the last ones (``ends``), ``deliver`` is called when the message has arrived; None if it was
        cancelled."""
        # They left one after another at the sender's rate, the last of them now.
        path, now = self._path(source, self._rank), self._loop.time()
        since = now - nbytes / max(self._rate(source, path), SLOWEST)
        if source in self._turns:
            since -= CATCH_UP_S
        else:
            self._turns[source] = next(self._next_turn)
        turn = self._turns[source] if self._one_at_a_time else 0
        passes = None
        if ends:
            del self._turns[source]
            latency = self._latency(source, path)
            if deliver is not None:
                passes = partial(self._delay, source, latency, deliver)
        self.downlink.enter(nbytes, since, turn, taken, passes)

    def _latency(self, source: int, path: Path | None) -> float:
        """The latency of a sender's message, in seconds; 0 without a path, or with one that loses all.

        The lost messages before it are numbered too. A message that was cancelled before any of it left is
        unknown here, so later messages get each other's latencies."""
        latency = None if path is not None and path.loss < 1 else 0.0
        while latency is None:
            latency = delivery(path, self._seed, source, self._rank, _next(self._arrived, source, path))
        return latency

    def _delay(self, source: int, latency: float, deliver: Callable[[], None], instant: float) -> None:
        self._delays[source].add(instant + latency, deliver)


def _next(numbers: defaultdict[int, int], rank: int, path: Path | None) -> int:
    """A message's number among those of its pair of nodes. Only messages with random delivery are counted."""
    number = numbers[rank]
    numbers[rank] += path is None or path.loss > 0 or path.jitter_s > 0
    return number


def is_limited(network: Network, nodes: int, seed: int) -> bool:
    """Whether a network ever limits, delays or loses messages."""
    conditions = network.conditions(nodes, seed)
    return (
        not np.isinf(conditions.rates).all()
        or conditions.common_latency() != 0
        or next(network.changes(nodes, seed), None) is not None
    )


def simplified(network: Network, nodes: int, seed: int) -> list[str]:
    """Describe how the engine ``processes`` deviates from a network's description. Raises BadInput if the
    description does not fit this number of nodes."""
    texts = []
    if network.sharing not in ("fifo", "in-turn"):
        texts.append(
            f"network.sharing: the engine processes approximates {network.sharing}: a node sends one"
            " message at a time, and its downlink takes the bytes of several senders in turn"
        )
    if len(network.conditions(nodes, seed).rates) > 2 * nodes:
        texts.append(
            "network: under the engine processes, a link between uplinks and downlinks limits each"
            " message separately, and is not shared between nodes"
        )
    return texts
