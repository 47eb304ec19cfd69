"""The network of an experiment, carried out on real traffic: in user space, without root, at both ends of a connection.

A sender meters each chunk on its uplink before it writes it; a receiver meters what came in on its downlink before it
acknowledges it, so that a slow downlink holds its senders back through the window, as TCP does. A message is
delivered when its last byte has passed, and its latency later. Rates hold for the bytes that traffic counts: frames,
headers included.

What a real machine adds comes on top: timers are late by a millisecond or more, and then bytes pass in bursts. A
bucket goes on from where it should have been, so lateness doesn't add up.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gossamer.network import Conditions, Network, Path
from gossamer.network.fate import fate

LATE_S = 0.02
"""Seconds by which timers and credit may be late without slowing a flow: a downlink acknowledges bytes so much before their
turn (what it delivers isn't early), and an uplink goes on from so long ago."""
CATCH_UP_S = 0.1
"""The same within a message, for a process that had to wait for a core. What is caught up is at most a window ahead of the
receiver's downlink."""
SLOWEST = 1.0
"""Bytes a second of a link whose rate is 0: what waits there goes on when the rate changes."""


@runtime_checkable
class Loop(Protocol):
    """What is asked of an event loop."""

    def time(self) -> float:
        """Seconds of a monotonic clock."""

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call at an instant of that clock, or a little later."""


class Bucket:
    """A link: bytes pass it one after another at a rate (a token bucket that holds nothing).

    Args:
        rate: bytes a second.
    """

    def __init__(self, rate: float = math.inf) -> None:
        self.rate = max(rate, SLOWEST)
        self.free = -math.inf
        """When all that was taken has passed."""
        self._taken_s = 0.0

    def take(self, nbytes: int, since: float) -> float:
        """The instant at which the last of some bytes has passed, if the first could have done so from ``since`` on."""
        self._taken_s += nbytes / self.rate
        self.free = max(self.free, since) + nbytes / self.rate
        return self.free

    def give_back(self, now: float) -> None:
        """What was taken and has not passed by now won't."""
        if self.free > now:
            self._taken_s -= self.free - now
            self.free = now

    def busy_seconds(self, now: float) -> float:
        """For how long something has passed by now."""
        return self._taken_s - max(self.free - now, 0.0)

    def change(self, rate: float, now: float) -> float:
        """Another rate from now on, also for what was taken and has not passed; gives the ratio of its times."""
        rate = max(rate, SLOWEST)
        stretch = 1.0 if rate == self.rate else self.rate / rate
        self.rate = rate
        if self.free > now:
            left = self.free - now
            self._taken_s += left * (stretch - 1)
            self.free = now + left * stretch
        return stretch


class Line:
    """Calls that are due at an instant each, made in the order in which they were added: none overtakes another."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[float, Callable[[float], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, instant: float, call: Callable[[float], None]) -> None:
        """Make a call, with its instant, when that has come and all calls before it are made."""
        if self._waiting:
            instant = max(instant, self._waiting[-1][0])
        self._waiting.append((instant, call))
        if self._timer is None:
            self._run()

    def stretch(self, factor: float, now: float) -> None:
        """Multiply the time that is left for each call."""
        self._waiting = deque(
            (now + (instant - now) * factor if instant > now else instant, call)
            for instant, call in self._waiting
        )
        self._run()

    def clear(self) -> None:
        """Make no call any more."""
        self._waiting.clear()
        self._run()

    def _run(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._waiting[0][0] <= self._loop.time():
            instant, call = self._waiting.popleft()
            call(instant)
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_at(self._waiting[0][0], self._run)


@dataclass(order=True, slots=True)
class _Waiting:
    """Some bytes before a downlink."""

    order: tuple[int, int]
    nbytes: int
    since: float
    here: float
    taken: Callable[[], None]
    passed: Callable[[float], None] | None


class Downlink:
    """What a receiver takes in, from all its senders, at one rate.

    Whatever is here when the link is free passes in order of its turn; the link never waits for one sender while
    another's bytes are here.

    Args:
        rate: bytes a second.
        loop: the clock.
    """

    def __init__(self, rate: float, loop: Loop) -> None:
        self._bucket = Bucket(rate)
        self._loop = loop
        self._queue: list[_Waiting] = []
        self._numbers = itertools.count()
        self._passing = Line(loop)
        self._timer: asyncio.TimerHandle | None = None

    def enter(
        self,
        nbytes: int,
        since: float,
        turn: int,
        taken: Callable[[], None],
        passed: Callable[[float], None] | None = None,
    ) -> None:
        """Let some bytes pass.

        Args:
            nbytes: how many came in.
            since: when the first of them did.
            turn: what has the lowest goes first; of equal ones, what came first.
            taken: called when they are about to pass: their place may be filled again.
            passed: called when the last of them has passed, with that instant.
        """
        order = turn, next(self._numbers)
        heapq.heappush(self._queue, _Waiting(order, nbytes, since, self._loop.time(), taken, passed))
        if self._timer is None:
            self._serve()

    def change(self, rate: float) -> None:
        """Another rate from now on."""
        now = self._loop.time()
        self._passing.stretch(self._bucket.change(rate, now), now)
        self._serve()

    def clear(self) -> None:
        """Let nothing pass any more."""
        self._queue.clear()
        self._passing.clear()
        self._serve()

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue and self._bucket.free <= self._loop.time() + LATE_S:
            first = heapq.heappop(self._queue)
            last_byte = max(self._bucket.take(first.nbytes, first.since), first.here)
            first.taken()
            if first.passed is not None:
                self._passing.add(last_byte, first.passed)
        if self._queue and self._timer is None:
            self._timer = self._loop.call_at(self._bucket.free - LATE_S, self._serve)


@dataclass(frozen=True, slots=True)
class Departure:
    """What the network does to one message, as its sender knows when it begins.

    Args:
        lost: it takes its time on the uplink, and doesn't arrive.
        round_trip_s: seconds that an acknowledgement is under way, after its message's way there.
    """

    lost: bool
    round_trip_s: float


class Shaper:
    """One node's part of a network.

    Made by :meth:`of`; :meth:`start` begins its changes, :meth:`close` ends everything.

    Args:
        rank: the node.
        network: the description.
        nodes: their number.
        seed: the experiment's.
        loop: the clock.
    """

    def __init__(self, rank: int, network: Network, nodes: int, seed: int, loop: Loop) -> None:
        self._rank, self._nodes, self._seed, self._loop = rank, nodes, seed, loop
        self._one_at_a_time = network.sharing == "fifo"
        self._conditions = network.conditions(nodes, seed)
        self._changes = network.changes(nodes, seed)
        self._change_timer: asyncio.TimerHandle | None = None
        self._to = rank  # whom the message on the uplink is for
        self._lost = False  # whether that one will be
        self._departed = [0] * nodes  # messages by receiver, and by sender
        self._arrived = [0] * nodes
        self._turns: dict[int, int] = {}  # of the message that comes in from each sender
        self._next_turn = itertools.count()
        self._delays: dict[int, Line] = {}
        self.uplink = Bucket(self._rate(rank, None))
        self.downlink = Downlink(float(self._conditions.rates[nodes + rank]), loop)
        self.changed: Callable[[], None] = lambda: None
        """Called when the network has changed."""

    @classmethod
    def of(cls, rank: int, network: Network, nodes: int, seed: int, loop: Loop) -> Shaper | None:
        """A node's part of a network; None where messages take the time that they take."""
        return cls(rank, network, nodes, seed, loop) if is_limited(network, nodes, seed) else None

    def start(self, at: float) -> None:
        """The run's start, on the loop's clock: the network changes from then on."""
        self._await_change(at)

    def close(self) -> None:
        """Deliver nothing any more."""
        if self._change_timer is not None:
            self._change_timer.cancel()
        self.downlink.clear()
        for line in self._delays.values():
            line.clear()

    def _await_change(self, start: float) -> None:
        while (change := next(self._changes, None)) is not None:
            time_s, conditions = change
            if start + time_s > self._loop.time():
                self._change_timer = self._loop.call_at(start + time_s, self._change, conditions, start)
                return
            self._become(conditions)

    def _change(self, conditions: Conditions, start: float) -> None:
        self._become(conditions)
        self._await_change(start)

    def _become(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._meter(self._path(self._rank, self._to))
        self.downlink.change(float(conditions.rates[self._nodes + self._rank]))
        self.changed()

    def _path(self, source: int, to: int) -> Path | None:
        return None if source == to else self._conditions.path(source, to)

    def _rate(self, source: int, path: Path | None) -> float:
        """Bytes a second that a sender and what lies before the receiver's downlink let through."""
        if path is None:
            return float(self._conditions.rates[source])
        return min(path.rate, *(float(self._conditions.rates[link]) for link in (source, *path.links[:-1])))

    # --- the sender's end

    def sending_seconds(self) -> float:
        """For how long the uplink has carried something by now."""
        return self.uplink.busy_seconds(self._loop.time())

    def depart(self, to: int) -> Departure:
        """A message is about to leave: it's the next on the uplink."""
        path, self._to = self._path(self._rank, to), to
        latency = fate(path, self._seed, self._rank, to, _next(self._departed, to, path))
        self._lost = latency is None
        self._meter(path)
        return Departure(self._lost, 2 * (latency or 0.0))

    def _meter(self, path: Path | None) -> None:
        """Let the uplink have the rate of the message on it, which is for a path; what is lost takes the uplink alone."""
        self._lost = self._lost or path is None
        self.uplink.change(self._rate(self._rank, None if self._lost else path), self._loop.time())

    def reaches(self, to: int) -> bool:
        """Whether there is a path to a node; a message that is leaving when it goes is lost."""
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
        """Bytes came in from a sender, of one message.

        Args:
            source: the sender.
            nbytes: how many.
            taken: called when the downlink takes them.
            ends: whether they are the message's last.
            deliver: called when the message has arrived; None if it hasn't yet, or won't.
        """
        # They left one after another, at the sender's rate, and the last of them now.
        path, now = self._path(source, self._rank), self._loop.time()
        since = now - nbytes / max(self._rate(source, path), SLOWEST)
        if source in self._turns:
            since -= CATCH_UP_S
        else:
            self._turns[source] = next(self._next_turn)
        turn = self._turns[source] if self._one_at_a_time else 0
        passed = None
        if ends:
            del self._turns[source]
            latency = self._latency(source, path)
            if deliver is not None:
                passed = partial(self._delay, source, latency, deliver)
        self.downlink.enter(nbytes, since, turn, taken, passed)

    def _latency(self, source: int, path: Path | None) -> float:
        """Seconds that a sender's message is under way. Those before it that were lost are numbered too; one that was
        taken back before any of it had left isn't known here, and those after it get each other's latencies. Where there
        is no path any more, by which only lost ones leave, there's none.
        """
        latency = None if path is not None and path.loss < 1 else 0.0
        while latency is None:
            latency = fate(path, self._seed, source, self._rank, _next(self._arrived, source, path))
        return latency

    def _delay(self, source: int, latency: float, deliver: Callable[[], None], instant: float) -> None:
        """A message has passed the downlink: it's delivered after its latency, and not before the one ahead of it."""
        self._delays.setdefault(source, Line(self._loop)).add(instant + latency, lambda _: deliver())


def _next(numbers: list[int], rank: int, path: Path | None) -> int:
    """A message's number among those of its pair of nodes; counted are those whose fate is drawn."""
    number = numbers[rank]
    numbers[rank] += path is None or path.loss > 0 or path.jitter_s > 0
    return number


def is_limited(network: Network, nodes: int, seed: int) -> bool:
    """Whether a network ever does anything to a message."""
    conditions = network.conditions(nodes, seed)
    return (
        not np.isinf(conditions.rates).all()
        or conditions.common_latency() != 0
        or next(network.changes(nodes, seed), None) is not None
    )


def simplified(network: Network, nodes: int, seed: int) -> list[str]:
    """What of a network the engine ``processes`` does otherwise than described, in words.

    Raises:
        BadInput: for a description that doesn't fit so many nodes.
    """
    texts = []
    conditions = network.conditions(nodes, seed)
    if network.sharing != "fifo":
        texts.append(
            f"network.sharing: the engine processes comes near to {network.sharing}: a node sends one message at a time,"
            " and its downlink takes what several send it by turns"
        )
    if len(conditions.rates) > 2 * nodes:
        texts.append(
            "network: under the engine processes, a link between uplinks and downlinks limits each message by itself, and"
            " isn't shared by those of several nodes"
        )
    return texts
