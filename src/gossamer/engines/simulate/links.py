"""Links in virtual time: each uplink and each downlink carries one message at a time, first come first
served.

A message leaves when its sender's uplink is free; its first bit arrives after the latency; the receiver's
downlink takes it when it is free, bit by bit while it still arrives. Bytes are counted as the wire format
would send them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.engines.simulate.clock import Clock, Event, Order, to_ns
from gossamer.errors import RunFailed
from gossamer.messages import WINDOW, Message, Payload, Sending, Traffic
from gossamer.network import Network
from gossamer.payload import Encoded, encode, framed_bytes, wire_bytes


@dataclass(eq=False)
class _Transfer:
    message: Message
    to: int
    size: int
    queued_ns: int
    start_ns: int
    end_ns: int
    versions: list[tuple[Tensor, int]]
    event: Event | None = None
    accepted_ns: int | None = (
        None  # when at most one window of it is unacknowledged; known when its first bit has arrived
    )
    cancelled: bool = False


class _SimulatedSending(Sending):
    def __init__(self, links: Links, transfer: _Transfer) -> None:
        self._links, self._transfer = links, transfer

    def __await__(self) -> Generator[Any, None, None]:
        return self._links.wait_accepted(self._transfer).__await__()

    def cancel(self) -> bool:
        return self._links.cancel(self._transfer)


class Links:
    """Every node's uplink and downlink.

    Args:
        clock: the virtual clock.
        network: latencies and bandwidths.
        nodes: their number.
        limit: the largest message that receivers accept, bytes.
        deliver: puts a message into its receiver's mailbox.
    """

    def __init__(
        self, clock: Clock, network: Network, nodes: int, limit: int, deliver: Callable[[int, Message], None]
    ) -> None:
        self._clock, self._network, self._deliver = clock, network, deliver
        self._largest = framed_bytes(limit)
        self._traffic = [Traffic() for _ in range(nodes)]
        self._uplinks: list[deque[_Transfer]] = [deque() for _ in range(nodes)]
        self._downlink_free_ns = [0] * nodes
        self._encoded: tuple[Payload, Encoded] | None = None
        self._waiters: dict[_Transfer, list[asyncio.Future[None]]] = {}

    def send(self, source: int, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Sending:
        """Queue a message whose payload is frozen already.

        Raises:
            ValueError: for a message above the limit.
        """
        # A broadcast sends the same object several times: its size is worked out once.
        if self._encoded is None or self._encoded[0] is not payload:
            self._encoded = (payload, encode(payload))
        encoded = self._encoded[1]
        size = wire_bytes(tag, encoded)
        if size > self._largest:
            raise ValueError(
                f"node {source}: a message of {size} bytes on the wire; accepted: at most {self._largest}"
                " (Algorithm.message_limit)"
            )
        now = self._clock.now_ns
        transfer = _Transfer(
            Message(source, tag, payload, now / 1e9),
            to,
            size,
            now,
            0,
            0,
            [(t, t._version) for t in encoded.buffers],
        )
        self._settle(source)
        uplink = self._uplinks[source]
        uplink.append(transfer)
        self._schedule(transfer, max(uplink[-2].end_ns if len(uplink) > 1 else now, now))
        self._settle(source)
        return _SimulatedSending(self, transfer)

    def _schedule(self, transfer: _Transfer, start_ns: int) -> None:
        source, to = transfer.message.source, transfer.to
        transfer.start_ns = start_ns
        transfer.end_ns = start_ns + _duration_ns(transfer.size, self._network.uplink_of(source))
        first_bit_ns = start_ns + to_ns(self._network.latency_of(source, to))
        if transfer.event is not None:
            transfer.event.cancel()
        transfer.event = self._clock.at(first_bit_ns, Order.ARRIVAL, source, lambda: self._arrive(transfer))

    def _arrive(self, transfer: _Transfer) -> None:
        to, latency_ns = transfer.to, self._clock.now_ns - transfer.start_ns
        downlink = self._network.downlink_of(to)
        begin_ns = max(self._clock.now_ns, self._downlink_free_ns[to])
        last_bit_ns = max(begin_ns + _duration_ns(transfer.size, downlink), transfer.end_ns + latency_ns)
        self._downlink_free_ns[to] = last_bit_ns
        transfer.event = self._clock.at(
            last_bit_ns, Order.DELIVERY, transfer.message.source, lambda: self._finish(transfer)
        )
        transfer.accepted_ns = self._accepted_ns(transfer, last_bit_ns, latency_ns)
        for future in self._waiters.pop(transfer, ()):
            self._wake_at(transfer.accepted_ns, transfer.message.source, future)

    def _accepted_ns(self, transfer: _Transfer, last_bit_ns: int, latency_ns: int) -> int:
        """When the acknowledgement of all but the last window is back at the sender (and the uplink is past
        it)."""
        if transfer.size <= WINDOW:
            return transfer.start_ns
        slowest = min(
            self._network.uplink_of(transfer.message.source), self._network.downlink_of(transfer.to)
        )
        return min(last_bit_ns - _duration_ns(WINDOW, slowest), last_bit_ns) + latency_ns

    def _finish(self, transfer: _Transfer) -> None:
        source = transfer.message.source
        self._settle(source)
        if any(tensor._version != version for tensor, version in transfer.versions):
            raise RunFailed(
                f"node {source}: a vector of message {transfer.message.tag} was modified in place after it was"
                " sent; what is in the store or in a message is immutable: compute a new vector",
                node=source,
            )
        traffic = self._traffic[transfer.to]
        traffic.bytes_received += transfer.size
        traffic.messages_received += 1
        self._deliver(transfer.to, transfer.message)

    async def wait_accepted(self, transfer: _Transfer) -> None:
        """Until at most one window of a message is unacknowledged; at once if it was cancelled."""
        small_and_started = transfer.size <= WINDOW and transfer.start_ns <= self._clock.now_ns
        if transfer.cancelled or small_and_started:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if transfer.accepted_ns is not None:
            self._wake_at(transfer.accepted_ns, transfer.message.source, future)
        else:
            self._waiters.setdefault(transfer, []).append(future)
        await future

    def _wake_at(self, time_ns: int, rank: int, future: asyncio.Future[None]) -> None:
        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self._clock.at(time_ns, Order.TIMER, rank, wake)

    def cancel(self, transfer: _Transfer) -> bool:
        """Take a message back; the bytes that are gone by now stay counted."""
        now, source = self._clock.now_ns, transfer.message.source
        self._settle(source)
        if transfer.cancelled or transfer.end_ns <= now:
            return False
        transfer.cancelled = True
        if transfer.event is not None:
            transfer.event.cancel()
        self._traffic[source].bytes_sent += _gone(transfer, now)
        for future in self._waiters.pop(transfer, ()):
            if not future.done():
                future.set_result(None)
        uplink = self._uplinks[source]
        behind = list(uplink)[list(uplink).index(transfer) + 1 :]
        uplink.remove(transfer)
        free_ns = max(transfer.start_ns, now)
        for other in behind:  # whoever queued behind it leaves earlier
            self._schedule(other, max(free_ns, other.queued_ns))
            free_ns = other.end_ns
        return True

    def traffic(self, rank: int) -> Traffic:
        """What a node has sent and received by now, a message in flight counted as far as it is gone."""
        self._settle(rank)
        traffic = self._traffic[rank]
        uplink = self._uplinks[rank]
        if not uplink:
            return traffic
        gone = _gone(uplink[0], self._clock.now_ns)
        return Traffic(**{**vars(traffic), "bytes_sent": traffic.bytes_sent + gone})

    def counters(self, rank: int) -> Traffic:
        """The counters that a node itself may add to."""
        return self._traffic[rank]

    def _settle(self, rank: int) -> None:
        """Count the messages that have left the uplink by now, and forget them."""
        uplink, traffic = self._uplinks[rank], self._traffic[rank]
        while uplink and uplink[0].end_ns <= self._clock.now_ns:
            transfer = uplink.popleft()
            traffic.bytes_sent += transfer.size
            traffic.messages_sent += 1


def _gone(transfer: _Transfer, now_ns: int) -> int:
    if now_ns <= transfer.start_ns:
        return 0
    share = (now_ns - transfer.start_ns) / (transfer.end_ns - transfer.start_ns)
    return min(transfer.size, math.floor(transfer.size * share))


def _duration_ns(size: int, bytes_per_second: float) -> int:
    return 0 if math.isinf(bytes_per_second) else to_ns(size / bytes_per_second)
