"""A message on its way to one node, and when its sender need not wait for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gossamer.errors import RunFailed
from gossamer.messages import freeze
from gossamer.messages.tags import Message, Sending
from gossamer.runtime.simulate.clock import NS, Clock, ClockEvent, Order

if TYPE_CHECKING:
    from gossamer.runtime.simulate.links import Links

FOREVER_NS = 10**18
"""How long a transfer takes over a link without bandwidth, unless the network changes: 31 years."""
NEVER_NS = 2**62
"""An instant that never comes."""


@dataclass(eq=False, slots=True)
class Transfer(Sending):
    """A message on its way to one node.

    Args:
        links: carry it.
        message: the message.
        to: its receiver.
        size: bytes on the wire.
        carried: bytes that leave: all of them, or those that had left when it was cancelled.
        start_ns: when its first bit left.
        end_ns: when its last bit has left or, as things stand, will have left.
        latency_ns: from then until it arrives.
        lost: whether the network loses it.
        cancelled: whether its sender took it back.
        accepted_ns: when at most one window of it is unacknowledged; None while unknown.
    """

    links: Links
    message: Message
    to: int
    size: int
    carried: int
    start_ns: int = NEVER_NS
    end_ns: int = NEVER_NS
    latency_ns: int = 0
    lost: bool = False
    cancelled: bool = False
    accepted_ns: int | None = None
    waiters: list[asyncio.Future[None]] | None = None
    wake: ClockEvent | None = None

    def __await__(self) -> Generator[Any, None, None]:
        """Wait until the message is accepted: at most one window is unacknowledged, or it was cancelled. A message that
        the network loses is accepted when it has left."""
        if self.done():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters = [*(self.waiters or ()), future]
        if self.accepted_ns is not None:
            self.accept_at(self.accepted_ns)
        yield from future

    def done(self) -> bool:
        return self.cancelled or (
            self.accepted_ns is not None and self.accepted_ns <= self.links.clock.now_ns
        )

    def cancel(self) -> bool:
        return self.links.cancel(self)

    def accept_at(self, time_ns: int) -> None:
        """Plan the instant of acceptance, instead of an earlier plan."""
        self.accepted_ns = time_ns
        if self.wake is not None:
            self.wake.cancel()
            self.wake = None
        if self.waiters:
            self.wake = self.links.clock.at(time_ns, Order.TIMER, self.message.source, self.accept)

    def accept(self) -> None:
        """Wake the tasks that wait for acceptance."""
        for future in self.waiters or ():
            _resolve(future)
        self.waiters = None


class Sent(Sending):
    """Messages that left at the instant when they were sent, so that none can be taken back."""

    def __init__(self, clock: Clock, source: int, accepted_ns: int) -> None:
        self._clock, self._source, self._accepted_ns = clock, source, accepted_ns

    def __await__(self) -> Generator[Any, None, None]:
        if not self.done():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._clock.at(self._accepted_ns, Order.TIMER, self._source, partial(_resolve, future))
            yield from future

    def done(self) -> bool:
        return self._accepted_ns <= self._clock.now_ns

    def cancel(self) -> bool:
        return False


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def duration_ns(size: float, bytes_per_second: float) -> int:
    """How long a number of bytes takes at a rate, at most :data:`FOREVER_NS`."""
    duration = size / bytes_per_second * NS if bytes_per_second > 0 else FOREVER_NS
    return round(duration) if duration < FOREVER_NS else FOREVER_NS


def check_unchanged(message: Message) -> None:
    """Fail if a tensor was written after its message was sent.

    Raises:
        RunFailed: naming the sender and the message.
    """
    if not message.unchanged():
        raise RunFailed(
            f"node {message.source}: a vector of message {message.tag} was modified in place after it was sent; vectors"
            " in messages and in the store are immutable: compute a new vector",
            node=message.source,
        )


def own_copy(message: Message) -> Message:
    """A receiver's own message: containers are copied, tensors are shared and must not be written."""
    if not isinstance(message.payload, dict | list):
        return message
    return replace(message, payload=freeze(message.payload, lambda tensor: True))
