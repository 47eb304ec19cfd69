"""One message on its way to one peer, as its sender holds it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Generator
from typing import Any

from gossamer.messages import Encoded
from gossamer.messages.tags import Sending


class State(enum.Enum):
    """Where a message is."""

    QUEUED = enum.auto()
    LEAVING = enum.auto()
    SENT = enum.auto()
    AGAIN = enum.auto()
    """It had left, but its connection broke before the peer had acknowledged it."""
    CANCELLED = enum.auto()
    LOST = enum.auto()


_UNDER_WAY = (State.LEAVING, State.QUEUED, State.AGAIN)


class OwnSending(Sending):
    """One message on its way to one peer.

    Args:
        to: the peer's rank.
        head: of the message.
        encoded: what is sent.
        round: of this node, in which it was sent.
        take_back: cancels it; gives whether it won't be received.
    """

    def __init__(
        self, to: int, head: bytes, encoded: Encoded, round: int, take_back: Callable[[OwnSending], bool]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.to = to
        self.head = head
        self.buffers = encoded.buffers
        self.nbytes = len(head) + encoded.nbytes - len(encoded.structure)
        self.queued_at = loop.time()
        self.versions = tuple(buffer._version for buffer in encoded.buffers)
        self.state = State.QUEUED
        self.round = round
        self._take_back = take_back
        self._done: asyncio.Future[None] = loop.create_future()

    @property
    def over(self) -> bool:
        """Whether no chunk of it is to be sent (any more)."""
        return self.state not in _UNDER_WAY

    def __await__(self) -> Generator[Any, None, None]:
        # Shielded: who waits may be cancelled, and others wait for the same message.
        return asyncio.shield(self._done).__await__()

    def done(self) -> bool:
        return self._done.done()

    def cancel(self) -> bool:
        return self._take_back(self)

    def unchanged(self) -> bool:
        """Whether nobody has written what is still to be sent."""
        return all(
            buffer._version == version for buffer, version in zip(self.buffers, self.versions, strict=False)
        )

    def accept(self) -> None:
        """Let go of who waits."""
        if not self._done.done():
            self._done.set_result(None)

    def release(self) -> None:
        """Let go of who waits, and of the memory."""
        self.buffers = ()
        self.accept()
