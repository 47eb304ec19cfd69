"""The network of an experiment, carried out on real traffic: in user space, without root, at both ends of a connection.

A sender meters each chunk on its uplink before it writes it; a receiver meters what came in on its downlink before it
acknowledges it, so that a slow downlink holds its senders back through the window, as TCP does. A message is
delivered when its last byte has passed, and its latency later. Rates hold for the bytes that traffic counts: frames,
headers included.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from gossamer.network import Conditions, Network, Path, delivery
from gossamer.runtime.processes.transport.metering import CATCH_UP_S, SLOWEST, Bucket, Downlink, Line, Loop


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

    def carried_seconds(self) -> tuple[float | None, float | None]:
        """Bytes that have passed the uplink, and the downlink, by now, by the rates that these had then; None of one that is
        unlimited."""
        up, down = (
            math.isinf(self._conditions.rates[link]) for link in (self._rank, self._nodes + self._rank)
        )
        return (
            None if up else self.uplink.used_seconds(self._loop.time()),
            None if down else self.downlink.used_seconds(),
        )

    # --- the sender's end

    def depart(self, to: int) -> Departure:
        """A message is about to leave: it's the next on the uplink."""
        path, self._to = self._path(self._rank, to), to
        latency = delivery(path, self._seed, self._rank, to, _next(self._departed, to, path))
        self._lost = latency is None
        self._meter(path)
        return Departure(self._lost, 2 * (latency or 0.0))

    def _meter(self, path: Path | None) -> None:
        """Let the uplink have the rate of the message on it, which is for a path; what is lost takes the uplink alone."""
        self._lost = self._lost or path is None
        rate, own = self._rate(self._rank, None if self._lost else path), self._rate(self._rank, None)
        self.uplink.change(rate, self._loop.time(), own)

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
            latency = delivery(path, self._seed, source, self._rank, _next(self._arrived, source, path))
        return latency

    def _delay(self, source: int, latency: float, deliver: Callable[[], None], instant: float) -> None:
        """A message has passed the downlink: it's delivered after its latency, and not before the one ahead of it."""
        self._delays.setdefault(source, Line(self._loop)).add(instant + latency, lambda _: deliver())


def _next(numbers: list[int], rank: int, path: Path | None) -> int:
    """A message's number among those of its pair of nodes; counted are those whose delivery is drawn."""
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
    if network.sharing not in ("fifo", "in-turn"):
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
