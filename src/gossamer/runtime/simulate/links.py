"""Links in virtual time: what holds whichever way links are shared.

A message leaves its node bit by bit, and its first bit arrives after the latency. How fast its bits leave is up to
how links are shared: :mod:`fifo` and :mod:`fair`. Bytes are counted as the wire format would send them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from gossamer.messages import framed_bytes, wire_bytes
from gossamer.messages.tags import WINDOW, Message, Payload, Sending, Traffic
from gossamer.network import Conditions, Network, Path, fate
from gossamer.runtime.simulate.clock import Clock, Order, to_ns
from gossamer.runtime.simulate.flights import Flights
from gossamer.runtime.simulate.sizes import Sizes, check_unchanged, own_copy
from gossamer.runtime.simulate.transfer import Sent, Transfer

NETWORK = -1
"""The rank of the network's own events, which come before those of nodes."""

Watch = Callable[[int, int, int, int, int], None]
"""Called with source, to, start_ns, end_ns and bytes of what has left a node, was cut, or was leaving at the end."""


class _Queued(Sending):
    def __init__(self, links: Links, transfer: Transfer) -> None:
        self._links, self._transfer = links, transfer

    def __await__(self) -> Generator[Any, None, None]:
        return self._transfer.accepted(self._links._clock).__await__()

    def done(self) -> bool:
        return self._transfer.is_accepted(self._links._clock)

    def cancel(self) -> bool:
        return self._links.cancel(self._transfer)


class Links(ABC):
    """All links of a network, and the messages on them.

    Args:
        clock: the virtual clock.
        network: what the links do.
        nodes: their number.
        seed: the experiment's seed.
        limit: the largest message that receivers accept, bytes.
        deliver: by rank, what puts a message into that node's mailbox.
        watch: called for each transfer once it has left its sender or was cut; not always at that very instant.

    Attributes:
        lasting: whether they stay as they are from now on.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        nodes: int,
        seed: int,
        limit: int,
        deliver: Sequence[Callable[[Message], None]],
        watch: Watch | None = None,
    ) -> None:
        self._clock, self._network, self._nodes, self._seed = clock, network, nodes, seed
        self._deliver, self._watch = deliver, watch
        self._largest = framed_bytes(limit)
        self._traffic = [Traffic() for _ in range(nodes)]
        self._sending_s = [0.0] * nodes
        self._receiving_s = [0.0] * nodes
        self.flights: Flights | None = None
        """Keeps count of what is under way, where checkpoints are made."""
        self._sizes = Sizes()
        self._conditions = network.conditions(nodes, seed)
        self._rates: list[float] = self._conditions.rates.tolist()
        self._changes = self._due_changes(network.changes(nodes, seed))
        self._left_before: list[dict[int, int]] = [
            {} for _ in range(nodes)
        ]  # a pair's messages, where fates are drawn
        self._open_since: dict[
            int, float
        ] = {}  # nodes that were away: what was queued for them before is lost
        self._under_way = [0] * nodes  # messages that have left a node and are not lost, until they arrive
        self._farewells: dict[int, Callable[[], None]] = {}
        self._last_bits: dict[tuple[int, int], int] = {}  # arrival of a pair's latest, where latencies vary
        change = next(self._changes, None)
        self._varies = change is not None  # whether latencies may vary
        unlimited = bool(np.isinf(self._conditions.rates).all())
        self._only_latency = self._conditions.common_latency() if unlimited and not self._varies else None
        self._expect(change)

    # --- sending

    def send(
        self, source: int, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]
    ) -> list[Sending]:
        """Queue a message to each of some nodes, in this order; the payload is frozen already.

        Raises:
            ValueError: for a message above the limit.
        """
        size, versions = self._sizes.of(payload, tag)
        if size > self._largest:
            raise ValueError(
                f"node {source}: a message of {size} bytes on the wire; accepted: at most {self._largest}"
                " (Algorithm.message_limit)"
            )
        message = Message(source, tag, payload, self._clock.now(), versions)
        if self.flights is not None:
            return [self._send_numbered(self.flights, message, rank, size) for rank in to]
        if self._only_latency is not None:
            return [self._hand_over(message, to, size, to_ns(self._only_latency))] * len(to)
        return [_Queued(self, self._queue(message, rank, size)) for rank in to]

    def _send_numbered(self, flights: Flights, message: Message, to: int, size: int) -> Sending:
        message = flights.numbered(message, to)
        if self._only_latency is None:
            transfer = self._queue(message, to, size)
            flights.take_off(message, to, transfer)
            return _Queued(self, transfer)
        latency_ns = to_ns(self._only_latency)
        flights.take_off(message, to, self._clock.now_ns + latency_ns)
        return self._hand_over(message, (to,), size, latency_ns)

    def _hand_over(self, message: Message, to: Sequence[int], size: int, latency_ns: int) -> Sending:
        """Where only the latency takes time, what arrives together is one event."""
        source, now = message.source, self._clock.now_ns
        traffic = self._traffic[source]
        traffic.bytes_sent += size * len(to)
        traffic.messages_sent += len(to)
        self._under_way[source] += len(to)
        if self._watch is not None:
            for rank in to:
                self._watch(source, rank, now, now, size)
        arrived = partial(self._arrived, message, to, size)
        self._clock.at(now + latency_ns, Order.DELIVERY, source, arrived)
        return Sent(self._clock, source, now if size <= WINDOW else now + 2 * latency_ns)

    def _arrived(self, message: Message, to: Sequence[int], size: int) -> None:
        check_unchanged(message)
        shared = not isinstance(message.payload, dict | list)
        counters, deliver, away = self._traffic, self._deliver, self._open_since
        for rank in to:
            if rank in away and self._misses(rank, message):
                continue
            traffic = counters[rank]
            traffic.bytes_received += size
            traffic.messages_received += 1
            deliver[rank](message if shared else own_copy(message))
        self._under_way[message.source] -= len(to)
        if self._farewells:
            self._see_off(message.source)

    # --- what depends on the sharing

    @abstractmethod
    def _queue(self, message: Message, to: int, size: int) -> Transfer:
        """Put a message behind those that leave before it."""

    @abstractmethod
    def _withdraw(self, transfer: Transfer) -> bool:
        """Let nothing more of a message leave, and call :meth:`_cut` if any of it did; False if all did."""

    @abstractmethod
    def _settle(self, rank: int) -> None:
        """Count what has left a node by now."""

    @abstractmethod
    def _leaving(self, rank: int) -> Iterable[tuple[Transfer, int]]:
        """The messages that are leaving a node, each with its bytes that are gone by now."""

    @abstractmethod
    def _changed(self, before: list[float]) -> None:
        """Go on under new conditions.

        Args:
            before: the rates of all links until now.
        """

    # --- a message's way

    def _leave(self, transfer: Transfer) -> Path | None:
        """A message's first bit leaves: find its path, and its fate. All of a message that is lost leaves nevertheless."""
        source, to, now = transfer.message.source, transfer.to, self._clock.now_ns
        path = self._conditions.path(source, to)
        transfer.start_ns = now
        if transfer.size <= WINDOW:
            transfer.accept_at(self._clock, now)
        if path is not None and path.loss == path.jitter_s == 0:
            latency: float | None = path.latency_s
        else:
            self._varies = self._varies or path is not None
            k = self._left_before[source].get(to, 0)
            self._left_before[source][to] = k + 1
            latency = fate(path, self._seed, source, to, k)
        if latency is None:
            transfer.lost = True
            return path
        transfer.latency_ns = to_ns(latency)
        if self._varies:  # messages of one pair don't overtake each other
            transfer.latency_ns = max(transfer.latency_ns, self._last_bits.get((source, to), 0) - now)
        return path

    def _left(self, transfer: Transfer) -> None:
        """Count a message whose last bit has left."""
        source = transfer.message.source
        self._use(transfer, transfer.size)
        traffic = self._traffic[source]
        traffic.bytes_sent += transfer.size
        traffic.messages_sent += 1
        transfer.counted = True
        if transfer.lost:
            traffic.messages_lost += 1
            self._land(transfer)
            if self._farewells:
                self._clock.at(self._clock.now_ns, Order.TIMER, source, partial(self._see_off, source))
        else:
            self._under_way[source] += 1
            if self._varies:
                self._last_bits[source, transfer.to] = transfer.end_ns + transfer.latency_ns
        self._report(transfer)

    def _land(self, transfer: Transfer) -> None:
        """A message's way is over, and it won't arrive."""
        if self.flights is not None:
            self.flights.land(transfer.message, transfer.to)

    def _cut(self, transfer: Transfer, gone: int) -> None:
        """Count a message that was cancelled when some of it was gone."""
        transfer.end_ns, transfer.carried = self._clock.now_ns, gone
        self._use(transfer, gone)
        self._traffic[transfer.message.source].bytes_sent += gone
        self._report(transfer)

    def _report(self, transfer: Transfer) -> None:
        if self._watch is not None:
            source, times = transfer.message.source, (transfer.start_ns, transfer.end_ns)
            self._watch(source, transfer.to, *times, transfer.carried)

    def _use(self, transfer: Transfer, gone: int) -> None:
        """Let the use of an uplink have a message's bytes that are gone by now, at the rate as it is."""
        source = transfer.message.source
        if gone > transfer.used and (rate := self._rates[source]) > 0:
            self._sending_s[source] += (gone - transfer.used) / rate
            transfer.used = gone

    def _finish(self, transfer: Transfer) -> None:
        """A message's last bit arrives, or the last that had left when it was cancelled."""
        to, message = transfer.to, transfer.message
        self._receive(to, transfer.carried)
        if to not in self._open_since or not self._misses(to, message, transfer.cancelled):
            traffic = self._traffic[to]
            traffic.bytes_received += transfer.carried
            if not transfer.cancelled:
                check_unchanged(message)
                traffic.messages_received += 1
                self._deliver[to](own_copy(message))
        if not transfer.cancelled:
            self._under_way[message.source] -= 1
            if self._farewells:
                self._see_off(message.source)

    def _receive(self, to: int, nbytes: int) -> None:
        """Let the use of a downlink have what came in over it."""
        if (rate := self._rates[self._nodes + to]) > 0:
            self._receiving_s[to] += nbytes / rate

    # --- nodes that go and come back

    def go(self, rank: int, *, silently: bool) -> None:
        """A node is away from now on: what is for it is lost. Silently, what it has not sent yet is gone with it, and stays
        counted as far as it has left; else that goes on leaving."""
        self._open_since[rank] = math.inf
        if silently:
            for transfer in reversed(self._waiting(rank)):
                if self._withdraw(transfer):
                    transfer.accept_at(self._clock, self._clock.now_ns)
                    transfer.cancelled = True

    def come(self, rank: int) -> None:
        """A node is there (again): what is queued for it from now on reaches it."""
        self._open_since[rank] = self._clock.now()
        self._farewells.pop(rank, None)

    def when_landed(self, rank: int, call: Callable[[], None]) -> None:
        """Make a call when all that a node has sent has arrived, or is lost."""
        self._farewells[rank] = call
        self._see_off(rank)

    def give_up(self, rank: int) -> Sending:
        """A message of a node is for one that is known to be dead: it counts as lost."""
        self._traffic[rank].messages_lost += 1
        return Sent(self._clock, rank, 0)

    def _misses(self, rank: int, message: Message, cancelled: bool = False) -> bool:
        """Whether a message that arrives is for a node that is not there (or was not, when it was queued)."""
        missed = message.sent_at < self._open_since[rank]
        if missed and not cancelled:
            self._traffic[message.source].messages_lost += 1
        return missed

    def _see_off(self, source: int) -> None:
        if source in self._farewells and not self._under_way[source] and not self._waiting(source):
            self._farewells.pop(source)()

    @abstractmethod
    def _waiting(self, rank: int) -> Sequence[Transfer]:
        """The messages of a node that have not left wholly, in the order in which they'd leave."""

    # --- changes

    def _due_changes(self, changes: Iterator[tuple[float, Conditions]]) -> Iterator[tuple[int, Conditions]]:
        """The changes from now on; the network begins with what became of it until now."""
        for time_s, conditions in changes:
            if time_s <= 0:
                self._conditions, self._rates = conditions, conditions.rates.tolist()
            else:
                yield to_ns(time_s), conditions

    def _expect(self, change: tuple[int, Conditions] | None) -> None:
        self.lasting = change is None
        if change is not None:
            time_ns, conditions = change
            call = partial(self._change, conditions)
            self._clock.at(time_ns, Order.COMMIT, NETWORK, call, background=True)

    def _change(self, conditions: Conditions) -> None:
        for rank in range(self._nodes):
            self._use_by_now(rank)
        before, self._conditions, self._rates = self._rates, conditions, conditions.rates.tolist()
        self._changed(before)
        self._expect(next(self._changes, None))

    # --- taking back

    def cancel(self, transfer: Transfer) -> bool:
        """Take a message back; the bytes that are gone by now stay counted, and take their time on the way."""
        if transfer.cancelled:
            return True
        if not self._withdraw(transfer):
            return False
        transfer.cancelled = True
        self._land(transfer)
        self._traffic[transfer.message.source].messages_cancelled += 1
        transfer.accept_at(self._clock, self._clock.now_ns)
        transfer.accept()
        return True

    # --- counting

    def traffic(self, rank: int) -> Traffic:
        """What a node has sent and received by now, a message in flight counted as far as it is gone."""
        self._settle(rank)
        traffic = self._traffic[rank]
        under_way = sum(gone for _, gone in self._leaving(rank))
        return replace(traffic, bytes_sent=traffic.bytes_sent + under_way)

    def counters(self, rank: int) -> Traffic:
        """The counters that a node itself may add to; what has left since they were last settled is not in them yet."""
        return self._traffic[rank]

    def saved(self, rank: int) -> dict[str, Payload]:
        """What is counted of a node, as if all that it has sent had left; :meth:`restore` takes it."""
        self._settle(rank)
        messages, nbytes = (0, 0) if self.flights is None else self.flights.leaving(rank)
        traffic = self._traffic[rank]
        whole = replace(
            traffic,
            messages_sent=traffic.messages_sent + messages,
            bytes_sent=traffic.bytes_sent + nbytes,
        )
        drawn = dict(self._left_before[rank])
        self._use_by_now(rank)
        seconds = {"sending_s": self._sending_s[rank], "receiving_s": self._receiving_s[rank]}
        return {"traffic": asdict(whole), **seconds, "drawn": drawn}

    def restore(self, rank: int, saved: Mapping[str, Payload]) -> None:
        """Go on counting from what was saved."""
        self._traffic[rank] = Traffic(**saved["traffic"])
        self._sending_s[rank] = float(saved["sending_s"])
        self._receiving_s[rank] = float(saved["receiving_s"])
        self._left_before[rank] = {int(to): int(k) for to, k in saved["drawn"].items()}

    def arrives(self, message: Message, to: int, due_ns: int) -> None:
        """A message that left before the run was resumed arrives at an instant."""
        if self.flights is not None:
            self.flights.take_off(message, to, due_ns)
        size = wire_bytes(message.tag, message.payload)

        def arrived() -> None:
            self._receive(to, size)
            self._arrived(message, (to,), size)

        self._clock.at(due_ns, Order.DELIVERY, message.source, arrived)

    def take_back(self, rank: int, message: Message) -> None:
        """A message that came in is one that the node had before the run was resumed: it does not count again."""
        self._traffic[rank].messages_received -= 1
        self._traffic[rank].bytes_received -= wire_bytes(message.tag, message.payload)

    def sending_seconds(self, rank: int) -> float | None:
        """Bytes that have left a node by now, by the rate that its uplink had then; None while that is unlimited."""
        if math.isinf(self._rates[rank]):
            return None
        self._use_by_now(rank)
        return self._sending_s[rank]

    def receiving_seconds(self, rank: int) -> float | None:
        """Bytes of the messages that have come in by now, by the rate that the node's downlink had then; None while that
        is unlimited."""
        return None if math.isinf(self._rates[self._nodes + rank]) else self._receiving_s[rank]

    def inner_shares(self) -> list[float]:
        """Bytes that each link between uplinks and downlinks has carried, by what it could have: of those links that are
        shared and limited and have carried something. To be called once, when the run is over."""
        return []

    def _use_by_now(self, rank: int) -> None:
        for transfer, gone in self._leaving(rank):
            self._use(transfer, gone)

    def close(self) -> None:
        """The run is over: what is leaving has been watched until now."""
        if self._watch is not None:
            now = self._clock.now_ns
            for rank in range(self._nodes):
                self._settle(rank)
                for transfer, gone in self._leaving(rank):
                    if transfer.start_ns < now:
                        self._watch(rank, transfer.to, transfer.start_ns, now, gone)
