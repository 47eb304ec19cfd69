"""A message on its way to one node: what there is to know of it, and when its sender need not wait for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from gossamer.messages.tags import Message, Sending
from gossamer.runtime.simulate.clock import NS, Clock, Event, Order

FOREVER_NS = 10**18
"""What a transfer over a link without bandwidth takes, if nothing changes: 31 years."""
NEVER_NS = 2**62
"""An instant that doesn't come."""


@dataclass(eq=False, slots=True)
class Transfer:
    """A message on its way to one node.

    Args:
        message: what is sent.
        to: its receiver.
        size: bytes on the wire.
        carried: bytes that leave: all, or what was gone when it was cancelled.
        start_ns: when its first bit left.
        end_ns: when its last bit has left or, as things stand, will have.
        latency_ns: from then on to its arrival.
        lost: whether the network loses it.
        cancelled: whether its sender took it back.
        used: bytes of it that its uplink's use has.
        accepted_ns: when at most one window of it is unacknowledged; None while unknown.
        counted: whether it is among its sender's messages that have left.
    """

    message: Message
    to: int
    size: int
    carried: int
    start_ns: int = NEVER_NS
    end_ns: int = NEVER_NS
    latency_ns: int = 0
    lost: bool = False
    cancelled: bool = False
    used: int = 0
    accepted_ns: int | None = None
    waiters: list[asyncio.Future[None]] | None = None
    wake: Event | None = None
    counted: bool = False

    @property
    def due_ns(self) -> int | None:
        """When it arrives, if nothing comes between; None while it has not begun to leave."""
        return None if self.start_ns == NEVER_NS else self.end_ns + self.latency_ns

    def is_accepted(self, clock: Clock) -> bool:
        """Whether its sender need not wait for it (any more)."""
        return self.cancelled or (self.accepted_ns is not None and self.accepted_ns <= clock.now_ns)

    async def accepted(self, clock: Clock) -> None:
        """Until at most one window of it is unacknowledged; at once if it was cancelled. A message that the network loses is
        accepted when it has left."""
        if self.is_accepted(clock):
            return
        accepted_ns = self.accepted_ns
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters = [*(self.waiters or ()), future]
        if accepted_ns is not None:
            self.accept_at(clock, accepted_ns)
        await future

    def accept_at(self, clock: Clock, time_ns: int) -> None:
        """It is accepted at an instant, whatever was planned before."""
        self.accepted_ns = time_ns
        if self.wake is not None:
            self.wake.cancel()
            self.wake = None
        if self.waiters:
            self.wake = clock.at(time_ns, Order.TIMER, self.message.source, self.accept)

    def accept(self) -> None:
        """Let those go on that wait until it is accepted."""
        for future in self.waiters or ():
            if not future.done():
                future.set_result(None)
        self.waiters = None


def duration_ns(size: float, bytes_per_second: float) -> int:
    """What so many bytes take at a rate; a rate of 0 takes for ever."""
    if bytes_per_second <= 0:
        return FOREVER_NS
    duration = size / bytes_per_second * NS
    return round(duration) if duration < FOREVER_NS else FOREVER_NS


class Sent(Sending):
    """Messages whose last bit left as they were sent, so that nothing can be taken back.

    Args:
        clock: the virtual clock.
        source: their sender.
        accepted_ns: when they are accepted.
    """

    def __init__(self, clock: Clock, source: int, accepted_ns: int) -> None:
        self._clock, self._source, self._accepted_ns = clock, source, accepted_ns

    def __await__(self) -> Generator[Any, None, None]:
        return self._accepted().__await__()

    def done(self) -> bool:
        return self._accepted_ns <= self._clock.now_ns

    def cancel(self) -> bool:
        return False

    async def _accepted(self) -> None:
        if self._accepted_ns > self._clock.now_ns:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._clock.at(
                self._accepted_ns,
                Order.TIMER,
                self._source,
                lambda: None if future.done() else future.set_result(None),
            )
            await future
