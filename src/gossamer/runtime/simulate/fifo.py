"""Links that carry one message at a time, first come, first served.

A message starts when its sender's uplink is free, and leaves at the rate of the slowest link before the
receiver's downlink. The downlink, once free, takes its bits as they arrive. Links in between limit the rate
of a transfer, but are not shared.

When a message is queued, it is known when it will leave, unless a cancellation or a change of the network intervenes. So
its departure is planned at once, and is no event: a message costs one event when its first bit arrives, and one when its
receiver gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.messages.tags import WINDOW, Message, Sending
from gossamer.network import Path
from gossamer.runtime.simulate.core import NEVER_NS, NS, Order, ScheduledCall
from gossamer.runtime.simulate.links import ROUNDING_BYTES, Links, Transfer, duration_ns

AHEAD = 8
"""The messages of a node whose departures are planned. The next ones are planned when these have left: a node may cancel
a long queue."""


@dataclass(eq=False, slots=True)
class _FifoTransfer(Transfer):
    """A transfer over an uplink and a downlink."""

    rate: float = 0.0  # of the uplink, bytes per second
    # The instants at which the rate has changed, its start first, each with the bytes that had left by then.
    marks: list[tuple[int, float]] | None = None
    begin_ns: int = 0  # when the downlink began to take it, or when the downlink's rate last changed
    taken: float = 0  # bytes that the downlink had taken by then
    last_bit_ns: int = 0  # when the downlink has taken all of it
    event: ScheduledCall | None = None  # the next step at the receiver; the departure of a lost message

    def gone_by(self, time_ns: int) -> int:
        """Whole bytes that have left by an instant."""
        return int(self.exactly_gone_by(time_ns) + ROUNDING_BYTES)

    def exactly_gone_by(self, time_ns: int) -> float:
        until, after = self.end_ns, float(self.carried)
        if time_ns >= until:
            return after
        marks = self.marks or [(self.start_ns, 0.0)]
        if (
            until >= NEVER_NS
        ):  # the end is not on the line, but at its rate it would leave this much in a second
            since, before = marks[-1]
            until, after = since + NS, before + self.rate
        for since, before in reversed(marks):
            if time_ns >= since:
                return before + (after - before) * (time_ns - since) / (until - since)
            until, after = since, before
        return 0.0


class FifoLinks(Links):
    """Uplinks and downlinks that carry one message at a time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._uplinks: list[list[_FifoTransfer]] = [[] for _ in range(self._nodes)]
        self._downlinks: list[list[_FifoTransfer]] = [[] for _ in range(self._nodes)]
        self._planned = [0] * self._nodes  # the messages at the front of an uplink whose departure is planned
        # By rank, if more messages wait: when the last planned one will have left, and the event.
        self._turns: dict[int, tuple[int, ScheduledCall]] = {}
        self._new_lines: set[int] = set()  # ranks whose line in the bytes of all nodes is outdated

    def _queue(self, source: int, messages: Sequence[tuple[Message, int]], size: int) -> list[Sending]:
        self._settle(source)
        transfers = [_FifoTransfer(self, message, to, size, size) for message, to in messages]
        self._uplinks[source] += transfers
        self._plan_ahead(source)
        self._settle(source)  # those that have left at once
        return [*transfers]

    # --- uplinks

    def _settle(self, rank: int) -> None:
        """Count the messages that have left a node by now."""
        uplink, now = self._uplinks[rank], self.core.now_ns
        while uplink and uplink[0].end_ns <= now:
            self._planned[rank] -= 1
            self._left(uplink.pop(0))
            if uplink and not self._planned[rank]:
                self._plan_ahead(rank)

    def _plan_ahead(self, rank: int) -> None:
        """Plan when the first messages on an uplink leave."""
        uplink, planned = self._uplinks[rank], self._planned[rank]
        if planned:
            free_ns = uplink[planned - 1].end_ns
        else:
            free_ns = self.core.now_ns
            self._new_lines.add(rank)
        for transfer in uplink[planned:AHEAD]:
            if free_ns >= NEVER_NS:
                break
            self._pace(transfer, self._leave(transfer, free_ns), free_ns)
            if not transfer.lost:
                self._schedule(transfer, free_ns + transfer.latency_ns, Order.ARRIVAL, self._first_bit)
            free_ns = transfer.end_ns
            self._planned[rank] += 1
        if rank in self._turns or self._planned[rank] < len(uplink):
            self._await_turn(rank)

    def _unplan(self, rank: int, place: int) -> None:
        """Forget when messages leave that have not begun, from a place in the queue on."""
        uplink, planned = self._uplinks[rank], self._planned[rank]
        for transfer in reversed(uplink[place:planned]):
            self._stay(transfer)
            self._unschedule(transfer)
        self._planned[rank] = min(place, planned)

    def _await_turn(self, rank: int) -> None:
        """Plan the departures of messages whose departures are unknown once all others have left."""
        uplink, planned = self._uplinks[rank], self._planned[rank]
        due_ns = uplink[planned - 1].end_ns if planned < len(uplink) else None
        if rank in self._turns:
            before_ns, turn = self._turns[rank]
            if before_ns == due_ns:
                return
            turn.cancel()
            del self._turns[rank]
        if due_ns is not None:
            turn = self.core.at(due_ns, Order.ARRIVAL, rank, self._turn, rank)
            self._turns[rank] = due_ns, turn

    def _turn(self, rank: int) -> None:
        del self._turns[rank]
        self._settle(rank)

    def _pace(self, transfer: _FifoTransfer, path: Path | None, since_ns: int, gone: float = 0.0) -> None:
        """Plan how a message leaves from an instant on, at which some of its bytes are gone."""
        transfer.rate = self._rate_of(transfer, path)
        transfer.end_ns = since_ns + duration_ns(transfer.size - gone, transfer.rate)
        if transfer.lost:
            if transfer.size > WINDOW:
                transfer.accept_at(transfer.end_ns)
            self._unschedule(transfer)
            if transfer.end_ns < NEVER_NS:
                self._schedule(transfer, transfer.end_ns, Order.ARRIVAL, self._lost)

    def _rate_of(self, transfer: _FifoTransfer, path: Path | None) -> float:
        rate = self.rates[transfer.message.source]
        if path is not None and not transfer.lost:
            rate = min(rate, path.rate)
            for link in path.links[1:-1]:
                rate = min(rate, self.rates[link])
        return rate

    def _lost(self, transfer: _FifoTransfer) -> None:
        self._settle(transfer.message.source)

    def _last_bit_ns(self, source: int, to: int) -> int:
        for transfer in reversed(self._uplinks[source][: self._planned[source]]):
            if transfer.to == to and not transfer.lost:
                return transfer.end_ns + transfer.latency_ns
        return super()._last_bit_ns(source, to)

    def _leaving(self, rank: int) -> Iterable[tuple[Transfer, int]]:
        uplink = self._uplinks[rank]
        return [(uplink[0], uplink[0].gone_by(self.core.now_ns))] if uplink else []

    def _waiting(self, rank: int) -> Sequence[Transfer]:
        self._settle(rank)
        return list(self._uplinks[rank])

    # --- the bytes of all nodes

    def network_bytes(self) -> int:
        now_ns = self.core.now_ns
        self._new_lines.update(self._sent.ended(now_ns))
        for rank in self._new_lines:
            self._draw_line(rank, now_ns)
        self._new_lines.clear()
        return super().network_bytes()

    def _draw_line(self, rank: int, now_ns: int) -> None:
        """How a node's bytes leave until the end of the message that is leaving now. Asking is no event: messages that
        have left may still be uncounted."""
        whole = self._bytes_sent[rank]
        for transfer in self._uplinks[rank]:
            if transfer.start_ns > now_ns:
                break
            if (end_ns := transfer.end_ns) > now_ns:
                since_ns, gone = transfer.marks[-1] if transfer.marks else (transfer.start_ns, 0.0)
                never = end_ns - since_ns >= NEVER_NS
                per_ns = transfer.rate / NS if never else (transfer.size - gone) / (end_ns - since_ns)
                self._sent.flow(rank, whole, gone, per_ns, since_ns, end_ns)
                return
            whole += transfer.size
        self._sent.flow(rank, whole, 0.0, 0.0, now_ns)

    # --- downlinks

    def _first_bit(self, transfer: _FifoTransfer) -> None:
        """The first bit of a message arrives."""
        downlink = self._downlinks[transfer.to]
        free_ns = downlink[-1].last_bit_ns if downlink else 0
        downlink.append(transfer)
        self._take(transfer, free_ns)

    def _take(self, transfer: _FifoTransfer, free_ns: int) -> None:
        """Plan when a downlink takes a message, if it is free from an instant on."""
        latency_ns, rate = transfer.latency_ns, self.rates[self._nodes + transfer.to]
        transfer.begin_ns = max(transfer.start_ns + latency_ns, free_ns)
        through_ns = transfer.begin_ns + duration_ns(transfer.carried - transfer.taken, rate)
        transfer.last_bit_ns = last_ns = max(through_ns, transfer.end_ns + latency_ns)
        self._schedule(transfer, last_ns, Order.DELIVERY, self._taken)
        if transfer.size > WINDOW:
            # By then the sender has the acknowledgement of all but the last window.
            window_ns = duration_ns(WINDOW, min(transfer.rate, rate))
            transfer.accept_at(NEVER_NS if last_ns >= NEVER_NS else last_ns - window_ns + latency_ns)

    def _take_again(self, rank: int, place: int = 0) -> None:
        """Plan again when a downlink takes its messages, from a place in its queue on."""
        downlink = self._downlinks[rank]
        free_ns = downlink[place - 1].last_bit_ns if place else downlink[0].begin_ns
        for transfer in downlink[place:]:
            self._unschedule(transfer)
            self._take(transfer, free_ns)
            free_ns = transfer.last_bit_ns

    def _taken(self, transfer: _FifoTransfer) -> None:
        self._downlinks[transfer.to].remove(transfer)
        self._settle(transfer.message.source)
        self._finish(transfer)

    def _schedule(
        self, transfer: _FifoTransfer, time_ns: int, order: Order, call: Callable[[_FifoTransfer], None]
    ) -> None:
        transfer.event = self.core.at(time_ns, order, transfer.message.source, call, transfer)

    def _unschedule(self, transfer: _FifoTransfer) -> None:
        if transfer.event is not None:
            transfer.event.cancel()
            transfer.event = None

    # --- changes of the plan

    def _withdraw(self, transfer: Transfer) -> bool:
        assert isinstance(transfer, _FifoTransfer)
        now, source = self.core.now_ns, transfer.message.source
        self._settle(source)
        if transfer.end_ns <= now:
            return False
        uplink = self._uplinks[source]
        place = uplink.index(transfer)
        self._unplan(source, max(place, 1))  # the first one is leaving
        del uplink[place]
        if place == 0:
            self._planned[source] = 0
            self._interrupt(transfer, transfer.gone_by(now))
            downlink = self._downlinks[transfer.to]
            if transfer in downlink:  # the downlink finishes it and those behind it earlier
                self._take_again(transfer.to, downlink.index(transfer))
            elif transfer.lost or not transfer.carried:
                self._unschedule(transfer)
            self._plan_ahead(source)
        else:
            self._await_turn(source)
        return True

    def _changed(self, before: list[float]) -> None:
        now = self.core.now_ns
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
                self._unplan(rank, 1)
                self._replan(uplink[0])
                self._plan_ahead(rank)
        for rank, downlink in enumerate(self._downlinks):
            if downlink:
                # The first message no longer waits for those that were ahead of it and are lost now.
                downlink[0].begin_ns = min(downlink[0].begin_ns, now)
                self._take_again(rank)

    def _replan(self, transfer: _FifoTransfer) -> None:
        """Replan a message that is leaving, under new conditions. Without a path it is lost."""
        source, now = transfer.message.source, self.core.now_ns
        path = self._conditions.path(source, transfer.to)
        if path is None and not transfer.lost:
            transfer.lost = True
            self._unschedule(transfer)
            if transfer in self._downlinks[transfer.to]:
                self._downlinks[transfer.to].remove(transfer)
        elif self._rate_of(transfer, path) == transfer.rate:
            return
        gone = transfer.exactly_gone_by(now)
        transfer.marks = [*(transfer.marks or [(transfer.start_ns, 0.0)]), (now, gone)]
        self._pace(transfer, path, now, gone)
        self._new_lines.add(source)
