"""The state of one peer, as its node sees it, and of one message to it."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from gossamer.messages import Encoded, FrameError
from gossamer.messages.tags import Sending

if TYPE_CHECKING:
    from gossamer.runtime.processes.transport.connection import Incoming, Outgoing

State = enum.Enum("State", "QUEUED RESEND SENT CANCELLED LOST")
"""The state of a message. RESEND: it had left, but its connection broke before the acknowledgement."""


class TcpSending(Sending):
    """One message to one peer, sent in this node's round ``round``. ``take_back`` cancels it."""

    def __init__(
        self, to: int, head: bytes, encoded: Encoded, round: int, take_back: Callable[[TcpSending], bool]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.to, self.head, self.round = to, head, round
        self.buffers = encoded.buffers
        self.nbytes = len(head) + sum(buffer.nbytes for buffer in encoded.buffers)
        self.queued_at = loop.time()
        self.state = State.QUEUED
        self.left = 0  # bytes of frames that have left in the current attempt
        self._versions = tuple(buffer._version for buffer in encoded.buffers)
        self._take_back = take_back
        self._done: asyncio.Future[None] = loop.create_future()

    @property
    def over(self) -> bool:
        return self.state not in (State.QUEUED, State.RESEND)

    def __await__(self) -> Generator[Any, None, None]:
        # Shielded: the waiting task may be cancelled while others wait for the same message.
        return asyncio.shield(self._done).__await__()

    def done(self) -> bool:
        return self._done.done()

    def cancel(self) -> bool:
        return self._take_back(self)

    def unchanged(self) -> bool:
        return all(
            buffer._version == version for buffer, version in zip(self.buffers, self._versions, strict=False)
        )

    def accept(self) -> None:
        """Wake the waiting tasks."""
        if not self._done.done():
            self._done.set_result(None)

    def release(self) -> None:
        """Wake the waiting tasks, and free the memory."""
        self.buffers = ()
        self.accept()


class Peer:
    """One peer: its incarnation, its connections, and the messages that it has not acknowledged."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.incarnation: int | None = None  # the newest known one
        self.ended = -1  # the newest incarnation that is known to be over
        self.lost: str | None = None  # the reason, if it is lost
        self.apart = (
            False  # whether it takes part without this node, until the coordinator brings them together
        )
        self.dial: asyncio.Task[None] | None = None
        self.lost_at = 0.0  # when it counts as lost, unless it answers before
        self.redial_s = 0.0  # pause before it is dialled again; 0 once a connection to it has served
        self.redial_now = asyncio.Event()  # set to dial it again at once
        # Messages to it.
        self.used = False  # whether there have been messages for it
        self.dialled = 0  # number of the newest connection to it
        self.outgoing: Outgoing | None = None
        self.number = 0  # of the next message to it
        # By message number: bytes of chunks on the connection up to its end; the message.
        self.unacknowledged: deque[tuple[int, TcpSending]] = deque()
        self.first = 0, 0  # the newest round with a message to it, and that round's first message number
        # Messages from it.
        self.answered = 0  # the newest of its connections to this node
        self.incoming: Incoming | None = None
        self.expected = 0  # the number of the next message from it

    def stale(self, incarnation: int, connection: int | None = None) -> str | None:
        """Why a greeting is stale (from an earlier incarnation or incoming connection); None if it is not."""
        if incarnation <= self.ended or (self.incarnation is not None and incarnation < self.incarnation):
            return f"in its incarnation {incarnation}, which is over"
        if connection is not None and incarnation == self.incarnation and connection <= self.answered:
            return "on a connection that is known already"
        return None

    def acknowledge(self, nbytes: int) -> None:
        """Release the messages within the first ``nbytes`` bytes of the connection's chunks."""
        while self.unacknowledged and self.unacknowledged[0][0] <= nbytes:
            _, sending = self.unacknowledged.popleft()
            sending.buffers = ()

    def resume(self, expected: int) -> list[TcpSending]:
        """Continue on a new connection with the expected message. Returns the messages to send again.

        Raises:
            FrameError: if the peer can't expect that message.
        """
        behind = self.number - expected
        if behind < 0:
            raise FrameError(f"expects message {expected} after message {self.number - 1}")
        sent = [sending for _, sending in self.unacknowledged]
        received = max(len(sent) - behind, 0)
        for sending in sent[:received]:
            sending.release()
        for sending in sent[received:]:
            sending.state = State.RESEND
        self.unacknowledged.clear()
        self.number = expected
        return sent[received:]

    def restarted(self, incarnation: int) -> None:
        """Restart the numbering. Messages that the last incarnation may have received are not sent again."""
        self.incarnation = incarnation
        self.forget()
        self.number = self.expected = self.answered = 0
        self.first = 0, 0

    def forget(self) -> None:
        """Release the unacknowledged messages."""
        for _, sending in self.unacknowledged:
            sending.release()
        self.unacknowledged.clear()

    def close_incoming(self) -> None:
        """Close the connection that the peer dialled. The next one continues where it ended."""
        if self.incoming is not None:
            self.expected = self.incoming.decoder.expected
            link, self.incoming = self.incoming, None
            link.close()

    def disconnect(self) -> None:
        """Close the peer's connections, without reporting them."""
        self.close_incoming()
        if self.outgoing is not None:
            link, self.outgoing = self.outgoing, None
            link.close()


class Peers(dict[int, Peer]):
    """A node's peers, by rank. A peer is created on first access."""

    def __missing__(self, rank: int) -> Peer:
        peer = self[rank] = Peer(rank)
        return peer
