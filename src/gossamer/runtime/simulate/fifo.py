"""Links that carry one message at a time, first come, first served.

A message starts when its sender's uplink is free, and leaves at the rate of the slowest link before the
receiver's downlink. The downlink, once free, takes its bits as they arrive. Links in between limit the rate
of a transfer, but are not shared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from gossamer.messages.tags import WINDOW, Message
from gossamer.network import Path
from gossamer.runtime.simulate.core import NEVER_NS, NS, Order, ScheduledCall
from gossamer.runtime.simulate.links import ROUNDING_BYTES, Links, Transfer, duration_ns


@dataclass(eq=False, slots=True)
class _FifoTransfer(Transfer):
    """A transfer over an uplink and a downlink."""

    rate: float = 0.0  # of the uplink, bytes per second
    # The instants at which the rate changed, its start first, each with the bytes that had left by then.
    marks: list[tuple[int, float]] = field(default_factory=list)
    begin_ns: int = 0  # when the downlink began to take it, or when the downlink's rate last changed
    taken: float = 0  # bytes that the downlink had taken by then
    last_bit_ns: int = 0  # when the downlink has taken all of it
    event: ScheduledCall | None = None  # the next step at the receiver

    def gone_by(self, time_ns: int) -> int:
        """Whole bytes that have left by an instant."""
        return int(self.exactly_gone_by(time_ns) + ROUNDING_BYTES)

    def exactly_gone_by(self, time_ns: int) -> float:
        until, after = self.end_ns, float(self.carried)
        if time_ns >= until:
            return after
        if (
            until >= NEVER_NS
        ):  # the end is not on the line, but at its rate it would leave this much in a second
            since, before = self.marks[-1]
            until, after = since + NS, before + self.rate
        for since, before in reversed(self.marks):
            if time_ns >= since:
                return before + (after - before) * (time_ns - since) / (until - since)
            until, after = since, before
        return 0.0


class FifoLinks(Links):
    """Uplinks and downlinks that carry one message at a time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._uplinks: list[deque[_FifoTransfer]] = [deque() for _ in range(self._nodes)]
        self._downlinks: list[deque[_FifoTransfer]] = [deque() for _ in range(self._nodes)]
        self._turns: list[ScheduledCall | None] = [
            None
        ] * self._nodes  # start of the next message, if one waits

    def _queue(self, message: Message, to: int, size: int) -> Transfer:
        source = message.source
        self._settle(source)
        transfer, uplink = _FifoTransfer(self, message, to, size, size), self._uplinks[source]
        uplink.append(transfer)
        if len(uplink) == 1:
            self._start(transfer)
        elif len(uplink) == 2:
            self._await_turn(source)
        return transfer

    def _settle(self, rank: int) -> None:
        uplink, now = self._uplinks[rank], self.clock.now_ns
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
            settle = partial(self._settle, rank)
            self._turns[rank] = self.clock.at(uplink[0].end_ns, Order.ARRIVAL, rank, settle)

    def _start(self, transfer: _FifoTransfer) -> None:
        self._pace(transfer, self._leave(transfer))
        if not transfer.lost:
            self._schedule(transfer, self.clock.now_ns + transfer.latency_ns, Order.ARRIVAL, self._arrive)

    def _pace(self, transfer: _FifoTransfer, path: Path | None) -> None:
        now_ns = self.clock.now_ns
        gone = transfer.exactly_gone_by(now_ns) if transfer.marks else 0
        transfer.marks.append((now_ns, gone))
        transfer.rate = self._rate_of(transfer, path)
        transfer.end_ns = now_ns + (duration := duration_ns(transfer.size - gone, transfer.rate))
        per_ns = transfer.rate / NS if duration == NEVER_NS else (transfer.size - gone) / max(duration, 1)
        self._sent.flow(transfer, gone, per_ns, now_ns, (transfer.end_ns, transfer.size))
        if transfer.lost and transfer.size > WINDOW:
            transfer.accept_at(transfer.end_ns)

    def _rate_of(self, transfer: _FifoTransfer, path: Path | None) -> float:
        rate = self.rates[transfer.message.source]
        if path is not None and not transfer.lost:
            rate = min(rate, path.rate)
            for link in path.links[1:-1]:
                rate = min(rate, self.rates[link])
        return rate

    def _leaving(self, rank: int) -> Iterable[tuple[Transfer, int]]:
        uplink = self._uplinks[rank]
        return [(uplink[0], uplink[0].gone_by(self.clock.now_ns))] if uplink else []

    def _waiting(self, rank: int) -> Sequence[Transfer]:
        self._settle(rank)
        return list(self._uplinks[rank])

    def _arrive(self, transfer: _FifoTransfer) -> None:
        downlink = self._downlinks[transfer.to]
        downlink.append(transfer)
        self._take(transfer.to, len(downlink) - 1)

    def _take(self, rank: int, position: int = 0) -> None:
        """Plan when a downlink takes its messages, from a position in its queue on."""
        downlink, rate = self._downlinks[rank], self.rates[self._nodes + rank]
        free_ns = downlink[position - 1].last_bit_ns if position else downlink[0].begin_ns
        for transfer in islice(downlink, position, None):
            latency_ns = transfer.latency_ns
            transfer.begin_ns = max(transfer.start_ns + latency_ns, free_ns)
            through_ns = transfer.begin_ns + duration_ns(transfer.carried - transfer.taken, rate)
            free_ns = transfer.last_bit_ns = max(through_ns, transfer.end_ns + latency_ns)
            self._schedule(transfer, free_ns, Order.DELIVERY, self._taken)
            if transfer.size > WINDOW:
                # By then the sender has the acknowledgement of all but the last window.
                window_ns = duration_ns(WINDOW, min(transfer.rate, rate))
                transfer.accept_at(NEVER_NS if free_ns >= NEVER_NS else free_ns - window_ns + latency_ns)

    def _taken(self, transfer: _FifoTransfer) -> None:
        self._downlinks[transfer.to].remove(transfer)
        self._settle(transfer.message.source)
        self._finish(transfer)

    def _schedule(
        self, transfer: _FifoTransfer, time_ns: int, order: Order, call: Callable[[_FifoTransfer], None]
    ) -> None:
        if transfer.event is not None:
            transfer.event.cancel()
        transfer.event = self.clock.at(time_ns, order, transfer.message.source, partial(call, transfer))

    def _withdraw(self, transfer: Transfer) -> bool:
        assert isinstance(transfer, _FifoTransfer)
        now, source = self.clock.now_ns, transfer.message.source
        self._settle(source)
        if transfer.end_ns <= now:
            return False
        uplink = self._uplinks[source]
        leaving = uplink[0] is transfer
        uplink.remove(transfer)
        if leaving:
            self._interrupt(transfer, transfer.gone_by(now))
            downlink = self._downlinks[transfer.to]
            if transfer in downlink:  # the downlink finishes it and those behind it earlier
                self._take(transfer.to, downlink.index(transfer))
            elif transfer.carried == 0 and transfer.event is not None:
                transfer.event.cancel()
            self._next(source)
        elif len(uplink) == 1:
            self._await_turn(source)
        return True

    def _changed(self, before: list[float]) -> None:
        now = self.clock.now_ns
        for rank, downlink in enumerate(self._downlinks):
            rate = before[self._nodes + rank]
            if rate != self.rates[self._nodes + rank] and downlink and (first := downlink[0]).begin_ns < now:
                at_most = rate * ((now - first.begin_ns) / NS)
                arrived = first.exactly_gone_by(now - first.latency_ns)
                first.taken = min(first.taken + at_most, arrived)
                first.begin_ns = now
        for rank, uplink in enumerate(self._uplinks):
            self._settle(rank)
            if uplink:
                self._replan(uplink[0])
                self._await_turn(rank)
        for rank, downlink in enumerate(self._downlinks):
            if downlink:
                # The first message no longer waits for those that were ahead of it and are lost now.
                downlink[0].begin_ns = min(downlink[0].begin_ns, now)
                self._take(rank)

    def _replan(self, transfer: _FifoTransfer) -> None:
        """Replan a message that is being sent, under new conditions. Without a path it is lost."""
        path = self._conditions.path(transfer.message.source, transfer.to)
        if path is None and not transfer.lost:
            transfer.lost = True
            if transfer.event is not None:
                transfer.event.cancel()
            if transfer in self._downlinks[transfer.to]:
                self._downlinks[transfer.to].remove(transfer)
        elif self._rate_of(transfer, path) == transfer.rate:
            return
        self._pace(transfer, path)
