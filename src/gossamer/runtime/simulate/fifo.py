"""Links that carry one message at a time, first come first served.

A message leaves when its sender's uplink is free, at the rate of the slowest link before the receiver's downlink;
the downlink takes it when it is free, bit by bit while it still arrives. Links in between limit a transfer and are
not shared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from gossamer.messages.tags import WINDOW, Message
from gossamer.network import Path
from gossamer.runtime.simulate.clock import NS, Event, Order
from gossamer.runtime.simulate.links import Links
from gossamer.runtime.simulate.transfer import Transfer, duration_ns


@dataclass(eq=False, slots=True)
class _Passage(Transfer):
    """A transfer's way over an uplink and a downlink.

    Args:
        rate: at which it leaves, bytes a second.
        gone: bytes that had left at ``mark_ns``, when the rate last changed.
        begin_ns: on the downlink, or when that one's rate last changed.
        taken: bytes that the downlink had taken by then.
        last_bit_ns: when the downlink has taken all.
        event: the next step at the receiver.
    """

    rate: float = 0.0
    gone: int = 0
    mark_ns: int = 0
    begin_ns: int = 0
    taken: int = 0
    last_bit_ns: int = 0
    event: Event | None = None

    def gone_by(self, time_ns: int) -> int:
        """Bytes that have left by an instant."""
        if time_ns >= self.end_ns:
            return self.carried
        if time_ns < self.mark_ns:
            since, until, before, after = self.start_ns, self.mark_ns, 0, self.gone
        else:
            since, until, before, after = self.mark_ns, self.end_ns, self.gone, self.carried
        return before + (after - before) * max(time_ns - since, 0) // (until - since)


class FifoLinks(Links):
    """Every node's uplink and downlink: one message at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._uplinks: list[deque[_Passage]] = [deque() for _ in range(self._nodes)]
        self._downlinks: list[deque[_Passage]] = [deque() for _ in range(self._nodes)]
        self._turns: list[Event | None] = [None] * self._nodes  # when the next message leaves, if one waits

    # --- uplinks

    def _queue(self, message: Message, to: int, size: int) -> Transfer:
        source = message.source
        self._settle(source)
        transfer, uplink = _Passage(message, to, size, size), self._uplinks[source]
        uplink.append(transfer)
        if len(uplink) == 1:
            self._start(transfer)
        elif len(uplink) == 2:
            self._await_turn(source)
        return transfer

    def _settle(self, rank: int) -> None:
        uplink, now = self._uplinks[rank], self._clock.now_ns
        while uplink and uplink[0].end_ns <= now:
            self._left(uplink.popleft())
            self._next(rank)

    def _next(self, rank: int) -> None:
        if uplink := self._uplinks[rank]:
            self._start(uplink[0])
        self._await_turn(rank)

    def _await_turn(self, rank: int) -> None:
        turn, uplink = self._turns[rank], self._uplinks[rank]
        if turn is not None:
            turn.cancel()
            self._turns[rank] = None
        if len(uplink) > 1:
            self._turns[rank] = self._clock.at(
                uplink[0].end_ns, Order.ARRIVAL, rank, partial(self._settle, rank)
            )

    def _start(self, transfer: _Passage) -> None:
        """Put a message on its sender's uplink, which is free."""
        self._pace(transfer, self._leave(transfer))
        if not transfer.lost:
            self._then(transfer, self._clock.now_ns + transfer.latency_ns, Order.ARRIVAL, self._arrive)

    def _pace(self, transfer: _Passage, path: Path | None) -> None:
        """When the rest of a message will have left."""
        rate = self._rates[transfer.message.source]
        if path is not None and not transfer.lost:
            rate = min(rate, path.rate)
            for link in path.links[1:-1]:
                rate = min(rate, self._rates[link])
        transfer.rate, transfer.mark_ns = rate, self._clock.now_ns
        transfer.end_ns = transfer.mark_ns + duration_ns(transfer.size - transfer.gone, rate)
        if transfer.lost and transfer.size > WINDOW:
            transfer.accept_at(self._clock, transfer.end_ns)

    def _leaving(self, rank: int) -> Iterable[tuple[Transfer, int]]:
        uplink = self._uplinks[rank]
        return [(uplink[0], uplink[0].gone_by(self._clock.now_ns))] if uplink else []

    def _waiting(self, rank: int) -> Sequence[Transfer]:
        self._settle(rank)
        return list(self._uplinks[rank])

    # --- downlinks

    def _arrive(self, transfer: _Passage) -> None:
        downlink = self._downlinks[transfer.to]
        downlink.append(transfer)
        self._take(transfer.to, len(downlink) - 1)

    def _take(self, rank: int, position: int = 0) -> None:
        """When a downlink will have taken the messages that are on it or wait for it, from a position on."""
        downlink, rate = self._downlinks[rank], self._rates[self._nodes + rank]
        free_ns = downlink[position - 1].last_bit_ns if position else downlink[0].begin_ns
        for transfer in islice(downlink, position, None):
            latency_ns = transfer.latency_ns
            transfer.begin_ns = max(transfer.start_ns + latency_ns, free_ns)
            through_ns = transfer.begin_ns + duration_ns(transfer.carried - transfer.taken, rate)
            free_ns = transfer.last_bit_ns = max(through_ns, transfer.end_ns + latency_ns)
            self._then(transfer, free_ns, Order.DELIVERY, self._taken)
            if transfer.size > WINDOW:
                # The acknowledgement of all but the last window is back at the sender.
                slowest = min(transfer.rate, rate)
                transfer.accept_at(self._clock, free_ns - duration_ns(WINDOW, slowest) + latency_ns)

    def _taken(self, transfer: _Passage) -> None:
        self._downlinks[transfer.to].remove(transfer)
        self._settle(transfer.message.source)
        self._finish(transfer)

    def _then(self, transfer: _Passage, time_ns: int, order: Order, call: Callable[[_Passage], None]) -> None:
        if transfer.event is not None:
            transfer.event.cancel()
        transfer.event = self._clock.at(time_ns, order, transfer.message.source, partial(call, transfer))

    # --- what moves the plan

    def _withdraw(self, transfer: Transfer) -> bool:
        assert isinstance(transfer, _Passage)
        now, source = self._clock.now_ns, transfer.message.source
        self._settle(source)
        if transfer.end_ns <= now:
            return False
        uplink = self._uplinks[source]
        leaving = uplink[0] is transfer
        uplink.remove(transfer)
        if leaving:
            self._cut(transfer, transfer.gone_by(now))
            downlink = self._downlinks[transfer.to]
            if transfer in downlink:  # it and those behind it are through earlier
                self._take(transfer.to, downlink.index(transfer))
            elif transfer.carried == 0 and transfer.event is not None:
                transfer.event.cancel()
            self._next(source)
        elif len(uplink) == 1:
            self._await_turn(source)
        return True

    def _changed(self, before: list[float]) -> None:
        now = self._clock.now_ns
        for rank, downlink in enumerate(self._downlinks):
            if downlink and (first := downlink[0]).begin_ns < now:
                at_most = before[self._nodes + rank] * ((now - first.begin_ns) / NS)
                arrived = first.gone_by(now - first.latency_ns)
                first.taken = int(min(first.taken + at_most, arrived))
                first.begin_ns = now
        for rank, uplink in enumerate(self._uplinks):
            self._settle(rank)
            if uplink:
                self._go_on(uplink[0])
                self._await_turn(rank)
        for rank, downlink in enumerate(self._downlinks):
            if downlink:
                # Those that were ahead of the first may be lost: it doesn't wait for their planned end any more.
                downlink[0].begin_ns = min(downlink[0].begin_ns, now)
                self._take(rank)

    def _go_on(self, transfer: _Passage) -> None:
        """A message that is leaving does so under new conditions; without a path it's lost."""
        source, now = transfer.message.source, self._clock.now_ns
        transfer.gone = transfer.gone_by(now)
        path = self._conditions.path(source, transfer.to)
        if path is None and not transfer.lost:
            transfer.lost = True
            if transfer.event is not None:
                transfer.event.cancel()
            if transfer in self._downlinks[transfer.to]:
                self._downlinks[transfer.to].remove(transfer)
        self._pace(transfer, path)
