"""Links in virtual time: messages in flight, and everything that does not depend on how links are shared.

A message leaves its node bit by bit, and its first bit arrives after the latency. How fast its bits leave
depends on the sharing: see :mod:`fifo` and :mod:`fair`. Sizes are those of the wire format."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from gossamer.errors import RunFailed
from gossamer.messages import encode, framed_bytes, freeze, wire_bytes
from gossamer.messages.tags import WINDOW, Message, Model, Payload, Sending, Traffic
from gossamer.network import Conditions, Network, Path, delivery
from gossamer.network.network import checked_changes
from gossamer.node.expectations import Form
from gossamer.node.waiting import Slot, resolve
from gossamer.runtime.simulate.core import NEVER_NS, NS, Core, Order, ScheduledCall, to_ns
from gossamer.runtime.simulate.counters import NodeCounters, columns, total_of, traffic_of
from gossamer.runtime.simulate.flights import Flights
from gossamer.runtime.simulate.sent import SentBytes

NETWORK = -1  # the rank of the network's own events, which come before those of nodes
ROUNDING_BYTES = 1e-6  # more than the rounding errors of a message's progress, and much less than a byte

Watch = Callable[[int, int, float, float, int], None]
"""Called with source, receiver, start, end (seconds) and bytes of a transfer that has ended."""


@dataclass(eq=False, slots=True)
class Transfer(Sending):
    """A message in flight to one node."""

    links: Links
    message: Message
    to: int
    size: int  # bytes on the wire
    carried: int  # bytes that leave: all, or those that had left when it was cancelled
    start_ns: int = NEVER_NS  # when its first bit left, or will leave
    end_ns: int = NEVER_NS  # when its last bit left, or will leave at the current rate
    latency_ns: int = 0  # from end_ns until its arrival
    lost: bool = False  # by the network
    drawn: bool = False  # whether its loss and latency were drawn
    cancelled: bool = False  # by its sender
    accepted_ns: int | None = None  # when at most one window of it is unacknowledged, if known
    waiters: list[Slot] | None = None
    wake: ScheduledCall | None = None

    def __await__(self) -> Generator[Any, None, None]:
        # A message that the network loses is accepted when it has left.
        if self.done():
            return
        slot = self.links.core.slot()
        self.waiters = [*(self.waiters or ()), slot]
        if self.accepted_ns is not None:
            self.accept_at(self.accepted_ns)
        yield from slot.__await__()

    def done(self) -> bool:
        accepted_ns = self.accepted_ns
        return self.cancelled or (accepted_ns is not None and accepted_ns <= self.links.core.now_ns)

    def cancel(self) -> bool:
        return self.links.cancel(self)

    def accept_at(self, time_ns: int) -> None:
        """Plan the instant of acceptance; replaces an earlier plan."""
        self.accepted_ns = time_ns
        if self.wake is not None:
            self.wake.cancel()
            self.wake = None
        if self.waiters:
            core, source = self.links.core, self.message.source
            if core.now_ns < self.start_ns < NEVER_NS:  # its sender's timers set until then come first
                self.wake = core.at(self.start_ns, Order.ARRIVAL, source, self._begin)
            else:
                self.wake = core.at(time_ns, Order.TIMER, source, self.accept)

    def _begin(self) -> None:
        assert self.accepted_ns is not None
        self.accept_at(self.accepted_ns)

    def accept(self) -> None:
        for slot in self.waiters or ():
            resolve(slot)
        self.waiters = None


class Sent(Sending):
    """Messages that left at the instant of the call, so that none can be cancelled."""

    __slots__ = ("_accepted_ns", "_core", "_source")

    def __init__(self, core: Core, source: int, accepted_ns: int) -> None:
        self._core, self._source, self._accepted_ns = core, source, accepted_ns

    def __await__(self) -> Generator[Any, None, None]:
        if not self.done():
            slot = self._core.slot()
            self._core.at(self._accepted_ns, Order.TIMER, self._source, resolve, slot)
            yield from slot.__await__()

    def done(self) -> bool:
        return self._accepted_ns <= self._core.now_ns

    def cancel(self) -> bool:
        return False


@lru_cache(maxsize=1024)
def duration_ns(size: float, bytes_per_second: float) -> int:
    """The duration of ``size`` bytes at a rate, at most :data:`~gossamer.runtime.simulate.core.NEVER_NS`: the
    clock ends before they have left, unless the rate changes."""
    duration = size / bytes_per_second * NS if bytes_per_second > 0 else NEVER_NS
    return round(duration) if duration < NEVER_NS else NEVER_NS


@lru_cache(maxsize=1024, typed=True)
def _vector_bytes(tag: tuple[str | int, ...], is_model: bool, dtype: torch.dtype, shape: torch.Size) -> int:
    """Bytes on the wire of the most frequent payloads: a tensor, or a model without buffers."""
    tensor = torch.empty(shape, dtype=dtype)
    return wire_bytes(tag, Model(tensor) if is_model else tensor)


class Links(ABC):
    """All links of a network, and the messages on them.

    Args:
        limit: size of the largest message that receivers accept, bytes.
        arrive: called with a rank and a message that has reached this node.
        watch: called for each transfer after it has left its sender or was cancelled, possibly later.

    Attributes:
        flights: tracks the messages in flight, if the run makes checkpoints.
        recipients: by rank, what is called with each message that has reached this node: ``arrive`` for this rank, unless
            it is replaced.
        only_latency_ns: the common latency of all pairs, if nothing else delays messages; otherwise None.
        rates: of all links now, bytes per second."""

    def __init__(
        self,
        core: Core,
        network: Network,
        nodes: int,
        seed: int,
        limit: int,
        arrive: Callable[[int, Message], None],
        watch: Watch | None = None,
    ) -> None:
        self.core = core
        self.flights: Flights | None = None
        self._network, self._nodes, self._seed = network, nodes, seed
        self.recipients: list[Callable[[Message], object]] = [partial(arrive, rank) for rank in range(nodes)]
        self._watch = watch
        self._largest = framed_bytes(limit)
        self._counters = counters = columns(nodes)
        self._bytes_sent, self._messages_sent = counters["bytes_sent"], counters["messages_sent"]
        self._bytes_received, self._messages_received = (
            counters["bytes_received"],
            counters["messages_received"],
        )
        self._messages_lost = counters["messages_lost"]
        self._sent = SentBytes()
        # For each uplink and downlink: the time for which it was in use, and the bytes already counted in it.
        self._busy_s, self._included = [0.0] * (2 * nodes), [0] * (2 * nodes)
        self._on_the_way = [0] * nodes  # messages of each node that were sent and have not landed
        self._absences: dict[int, float] = {}  # by rank: messages sent to it before this time are lost
        self._landed_callbacks: dict[int, Callable[[], None]] = {}
        self._draws: dict[tuple[int, int], int] = {}  # the number of draws of loss and jitter, by pair
        self._last_bits: dict[tuple[int, int], int] = {}  # arrival of a pair's latest message
        self._conditions = network.conditions(nodes, seed)
        self._changes = checked_changes(network, nodes, seed)
        while (change := next(self._changes, None)) is not None and change[0] <= 0:
            self._conditions = change[1]
        self.rates: list[float] = self._conditions.rates.tolist()
        self._latency_varies = change is not None
        self.only_latency_ns: int | None = None
        if change is None and bool(np.isinf(self._conditions.rates).all()):
            latency_s = self._conditions.common_latency()
            self.only_latency_ns = None if latency_s is None else to_ns(latency_s)
        self._expect(change)

    # --- sending

    def send(
        self,
        source: int,
        to: Sequence[int],
        payload: Payload,
        tag: tuple[str | int, ...],
        form: Form | None = None,
    ) -> list[Sending]:
        """Queue a frozen payload for nodes, in this order. Raises ValueError above the limit."""
        size, versions = self.measure(source, payload, tag)
        known = [] if form is None else [form]
        message = Message(source, tag, payload, self.core.now(), versions, form=known)
        self._on_the_way[source] += len(to)
        latency_ns, flights = self.only_latency_ns, self.flights
        if flights is not None:  # numbered messages are sent one by one
            numbered = [(flights.sent(message, rank), rank) for rank in to]
            if latency_ns is None:
                return self._queue(source, numbered, size)
            return [self._send_at_once(copy, (rank,), size, latency_ns) for copy, rank in numbered]
        if latency_ns is not None:
            return [self._send_at_once(message, to, size, latency_ns)] * len(to)
        return self._queue(source, [(message, rank) for rank in to], size)

    def measure(
        self, source: int, payload: Payload, tag: tuple[str | int, ...]
    ) -> tuple[int, tuple[tuple[Tensor, int], ...]]:
        """A message's bytes on the wire, and its tensors with the versions that they must keep. Raises
        ValueError for a message above the limit."""
        bare = type(payload) is Model and not payload.buffers.shape[0]
        vector = payload.parameters if bare else payload
        if type(vector) is Tensor and vector.is_contiguous():
            size = _vector_bytes(tag, bare, vector.dtype, vector.shape)
            versions: tuple[tuple[Tensor, int], ...] = ((vector, vector._version),)
        else:
            encoded = encode(payload)
            size = wire_bytes(tag, encoded)
            versions = tuple((tensor, tensor._version) for tensor in encoded.buffers)
        if size > self._largest:
            raise ValueError(
                f"node {source}: a message of {size} bytes on the wire; accepted: at most {self._largest}"
                " (Algorithm.message_limit)"
            )
        return size, versions

    def _send_at_once(self, message: Message, to: Sequence[int], size: int, latency_ns: int) -> Sending:
        """On a network with only latency, all messages of a broadcast leave now and arrive as one event."""
        source, now_ns = message.source, self.core.now_ns
        self._bytes_sent[source] += size * len(to)
        self._messages_sent[source] += len(to)
        self._sent.add(size * len(to))
        if self._watch is not None:
            for rank in to:
                self._watch(source, rank, now_ns / NS, now_ns / NS, size)
        self.core.at(now_ns + latency_ns, Order.DELIVERY, source, self._arrived, message, to, size)
        return Sent(self.core, source, now_ns if size <= WINDOW else now_ns + 2 * latency_ns)

    def _arrived(self, message: Message, to: Sequence[int], size: int) -> None:
        if not message.unchanged():
            raise RunFailed(
                f"node {message.source}: a vector of message {message.tag} was modified in place after it was sent;"
                " vectors in messages and in the store are immutable: compute a new vector",
                node=message.source,
            )
        # Containers are copied for each receiver. Tensors are shared and must not be written.
        copied = isinstance(message.payload, dict | list)
        bytes_received, messages_received = self._bytes_received, self._messages_received
        recipients, absences = self.recipients, self._absences
        for rank in to:
            if absences and message.sent_at < absences.get(rank, 0.0):
                self._messages_lost[message.source] += 1
                continue
            bytes_received[rank] += size
            messages_received[rank] += 1
            if copied:
                recipients[rank](replace(message, payload=freeze(message.payload, lambda tensor: True)))
            else:
                recipients[rank](message)
        self._landed(message, to)

    def drop(self, rank: int) -> Sending:
        """Send no message of a node, since its receiver is known to be away."""
        self._counters["messages_unsent"][rank] += 1
        return Sent(self.core, rank, 0)

    # --- methods that depend on the sharing

    @abstractmethod
    def _queue(self, source: int, messages: Sequence[tuple[Message, int]], size: int) -> list[Sending]:
        """Queue messages of a node, each with its receiver, behind those that leave before them."""

    @abstractmethod
    def _withdraw(self, transfer: Transfer) -> bool:
        """Stop sending a message; calls :meth:`_interrupt` if a part has left. False if it has left
        completely."""

    def settle(self) -> None:
        """Count and report all messages that have left by now."""
        for rank in range(self._nodes):
            self._settle(rank)

    def _settle(self, rank: int) -> None:  # noqa: B027 - most subclasses need not
        """Count the messages that have left a node by now, unless they are counted as they leave."""

    @abstractmethod
    def _leaving(self, rank: int) -> Iterable[tuple[Transfer, int]]:
        """The messages that a node is sending, each with the bytes that have left."""

    @abstractmethod
    def _waiting(self, rank: int) -> Sequence[Transfer]:
        """The messages that have not left a node completely, in the order of sending."""

    @abstractmethod
    def _changed(self, before: list[float]) -> None:
        """Apply new conditions. ``before`` holds the previous rates of all links."""

    # --- steps of a transfer

    def _leave(self, transfer: Transfer, time_ns: int) -> Path | None:
        """A message's first bit leaves at an instant: find its path, and draw its loss and latency. A lost message
        still uses its uplink."""
        source, to = transfer.message.source, transfer.to
        path = self._conditions.path(source, to)
        transfer.start_ns = time_ns
        if transfer.size <= WINDOW:
            transfer.accept_at(time_ns)
        if path is not None and path.loss == path.jitter_s == 0:
            latency_s: float | None = path.latency_s
        else:
            self._latency_varies = self._latency_varies or path is not None
            draws = self._draws.get((source, to), 0)
            self._draws[source, to] = draws + 1
            transfer.drawn = True
            latency_s = delivery(path, self._seed, source, to, draws)
        if latency_s is None:
            transfer.lost = True
            return path
        transfer.latency_ns = to_ns(latency_s)
        if self._latency_varies:  # messages of one pair don't overtake each other
            transfer.latency_ns = max(transfer.latency_ns, self._last_bit_ns(source, to) - time_ns)
        return path

    def _stay(self, transfer: Transfer) -> None:
        """A message does not leave as planned: undo :meth:`_leave`. Of several of a pair, the last one comes first."""
        if transfer.drawn:
            self._draws[transfer.message.source, transfer.to] -= 1
        transfer.start_ns = transfer.end_ns = NEVER_NS
        transfer.latency_ns, transfer.accepted_ns = 0, None
        transfer.lost = transfer.drawn = False
        if transfer.wake is not None:
            transfer.wake.cancel()
            transfer.wake = None

    def _last_bit_ns(self, source: int, to: int) -> int:
        """When the last bit of a pair's latest message arrives, if latencies vary."""
        return self._last_bits.get((source, to), 0)

    def _left(self, transfer: Transfer) -> None:
        source = transfer.message.source
        self._bytes_sent[source] += transfer.size
        self._messages_sent[source] += 1
        if transfer.lost:
            self._messages_lost[source] += 1
            self._landed(transfer.message, (transfer.to,))
        elif self._latency_varies:
            self._last_bits[source, transfer.to] = transfer.end_ns + transfer.latency_ns
        if self._watch is not None:
            self._report(self._watch, transfer)

    def _interrupt(self, transfer: Transfer, gone: int) -> None:
        transfer.end_ns, transfer.carried = self.core.now_ns, gone
        self._bytes_sent[transfer.message.source] += gone
        if self._watch is not None:
            self._report(self._watch, transfer)

    def _finish(self, transfer: Transfer) -> None:
        """The last bit of a message arrives, or of the part of it that had left when it was cancelled."""
        to, message = transfer.to, transfer.message
        if not transfer.cancelled:
            self._arrived(message, (to,), transfer.size)
        elif message.sent_at >= self._absences.get(to, 0.0):
            self._bytes_received[to] += transfer.carried

    def _landed(self, message: Message, to: Sequence[int]) -> None:
        self._on_the_way[message.source] -= len(to)
        if self.flights is not None:
            self.flights.landed(message, to[0])
        if message.source in self._landed_callbacks:
            self.core.at(self.core.now_ns, Order.TIMER, message.source, self._check_landed, message.source)

    def _report(self, watch: Watch, transfer: Transfer) -> None:
        times = transfer.start_ns / NS, transfer.end_ns / NS
        watch(transfer.message.source, transfer.to, *times, transfer.carried)

    def cancel(self, transfer: Transfer) -> bool:
        """Cancel a message. Bytes that have left stay counted, and still travel."""
        if transfer.cancelled:
            return True
        if not self._take_back(transfer):
            return False
        self._counters["messages_cancelled"][transfer.message.source] += 1
        transfer.accept()
        self._landed(transfer.message, (transfer.to,))
        return True

    def _take_back(self, transfer: Transfer) -> bool:
        if not self._withdraw(transfer):
            return False
        transfer.accept_at(self.core.now_ns)
        transfer.cancelled = True
        return True

    # --- nodes that leave and return

    def leave(self, rank: int, *, silently: bool) -> None:
        """A node is away from now on, and messages to it are lost. If ``silently``, its unsent messages are
        dropped; otherwise they are still sent."""
        self._absences[rank] = math.inf
        if silently:
            taken_back = sum(map(self._take_back, reversed(self._waiting(rank))))
            self._on_the_way[rank] -= taken_back  # not in one line: messages may land on the way

    def join(self, rank: int) -> None:
        """A node is present: messages that are queued for it from now on reach it."""
        self._absences[rank] = self.core.now()
        self._landed_callbacks.pop(rank, None)

    def when_landed(self, rank: int, call: Callable[[], None]) -> None:
        """Call when every message of a node has arrived or is lost."""
        self._landed_callbacks[rank] = call
        self._check_landed(rank)

    def _check_landed(self, source: int) -> None:
        if source in self._landed_callbacks:
            self._settle(source)
            if not self._on_the_way[source]:
                self._landed_callbacks.pop(source)()

    # --- changes of the network

    def _expect(self, change: tuple[float, Conditions] | None) -> None:
        if change is not None:
            time_s, conditions = change
            self.core.at(to_ns(time_s), Order.COMMIT, NETWORK, self._change, conditions, background=True)

    def _change(self, conditions: Conditions) -> None:
        for rank in range(self._nodes):
            self._include(rank, self.traffic(rank))
        before, self._conditions, self.rates = self.rates, conditions, conditions.rates.tolist()
        self._changed(before)
        self._expect(next(self._changes, None))

    # --- counters

    def traffic(self, rank: int) -> Traffic:
        """A node's traffic so far. A message that is being sent counts with the bytes that have left."""
        self._settle(rank)
        traffic = traffic_of(self._counters, rank)
        traffic.bytes_sent += sum(gone for _, gone in self._leaving(rank))
        return traffic

    def total(self) -> Traffic:
        """The traffic of all nodes together."""
        self.settle()
        total = total_of(self._counters)
        total.bytes_sent += sum(gone for rank in range(self._nodes) for _, gone in self._leaving(rank))
        return total

    def network_bytes(self) -> int:
        """The bytes that all nodes together have sent so far: the sum of :meth:`traffic`, up to the byte that
        each message that is being sent has begun (:class:`~gossamer.runtime.simulate.sent.SentBytes`)."""
        return self._sent.by(self.core.now_ns)

    def counters(self, rank: int) -> NodeCounters:
        """The counters that the node itself increases."""
        return NodeCounters(self._counters, rank)

    def _include(self, rank: int, traffic: Traffic) -> None:
        """Add a node's bytes since the last call to the use of its links, at current rates."""
        for link, nbytes in ((rank, traffic.bytes_sent), (self._nodes + rank, traffic.bytes_received)):
            if (rate := self.rates[link]) > 0:
                self._busy_s[link] += (nbytes - self._included[link]) / rate
                self._included[link] = nbytes

    def busy_seconds(self, rank: int, traffic: Traffic) -> tuple[float | None, float | None]:
        """How long a node's uplink and downlink were in use: bytes divided by the rate at that time. None for
        an unlimited link. An incoming message counts once all of it has arrived."""
        self._include(rank, traffic)
        up, down = (
            None if math.isinf(self.rates[link]) else self._busy_s[link]
            for link in (rank, self._nodes + rank)
        )
        return up, down

    def close(self) -> None:
        if self._watch is not None:
            now_ns = self.core.now_ns
            for rank in range(self._nodes):
                self._settle(rank)
                for transfer, gone in self._leaving(rank):
                    if transfer.start_ns < now_ns:
                        self._watch(rank, transfer.to, transfer.start_ns / NS, now_ns / NS, gone)
