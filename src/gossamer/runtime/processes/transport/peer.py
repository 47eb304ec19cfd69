"""The state of one peer, as its node sees it."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from typing import TYPE_CHECKING

from gossamer.messages import FrameError
from gossamer.runtime.processes.transport.wire import NUMBERS

if TYPE_CHECKING:
    from gossamer.runtime.processes.transport.connection import Incoming, Outgoing
    from gossamer.runtime.processes.transport.outbox import OwnSending


State = enum.Enum("State", "QUEUED AGAIN SENT CANCELLED LOST")
"""How far a message has come. AGAIN: it had left, but its connection broke before the peer had acknowledged it."""


class Peer:
    """One peer: its incarnation, its connections, and the messages that it has not acknowledged."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.incarnation: int | None = None  # the newest that was heard of
        self.ended = -1  # the newest incarnation that is known to be over
        self.lost: str | None = None  # the reason, if it is lost
        self.why = "no connection yet"  # what became of the last connection, or attempt at one
        self.silent = 0  # ticks since anything came from it, while it is connected
        self.timer: asyncio.TimerHandle | None = None  # it is lost then, unless it is reached before
        # Towards it.
        self.used = False  # whether there were messages for it
        self.dial: asyncio.Task[None] | None = None
        self.hurry = asyncio.Event()  # dials it at once instead of a little later
        self.dialled = 0
        self.failures = 0  # dials since the last one that was answered
        self.outgoing: Outgoing | None = None
        self.number = 0  # of the next message to it
        # By message number: bytes of chunks on the connection up to its end; the message.
        self.unacknowledged: deque[tuple[int, OwnSending]] = deque()
        self.accepting: set[OwnSending] = set()  # sent; the acknowledgement takes its simulated time
        self.first = 0, 0  # the newest round with a message to it, and that round's first message number
        # From it.
        self.answered = 0  # the newest of its connections to this node
        self.incoming: Incoming | None = None
        self.expected = 0  # the number of the next message from it

    def stale(self, incarnation: int, connection: int | None) -> str | None:
        """Why a greeting is an old one: of an earlier incarnation or, coming in, of an earlier connection."""
        if incarnation <= self.ended or (self.incarnation is not None and incarnation < self.incarnation):
            return f"in its incarnation {incarnation}, which is over"
        if connection is not None and incarnation == self.incarnation and connection <= self.answered:
            return "on a connection that is known already"
        return None

    def acknowledge(self, nbytes: int) -> None:
        """The first ``nbytes`` bytes of the connection's chunks are acknowledged."""
        while self.unacknowledged and self.unacknowledged[0][0] <= nbytes:
            _, sending = self.unacknowledged.popleft()
            sending.buffers = ()

    def resume(self, expected: int) -> list[OwnSending]:
        """Continue on a new connection with the message that the peer expects; gives those to send again from there on.

        Raises:
            FrameError: if it can't expect that one.
        """
        behind = (self.number - expected) % NUMBERS
        if behind >= NUMBERS // 2:
            raise FrameError(f"expects message {expected} after message {self.number - 1}")
        sent = [sending for _, sending in self.unacknowledged]
        got = max(len(sent) - behind, 0)
        for sending in sent[:got]:
            sending.release()
        for sending in sent[got:]:
            sending.state = State.AGAIN
        self.unacknowledged.clear()
        self.number = expected
        return sent[got:]

    def restarted(self, incarnation: int) -> None:
        """Numbers start again, and what the last incarnation may have received isn't sent again."""
        self.incarnation = incarnation
        self.forget()
        self.number = self.expected = self.answered = 0
        self.first = 0, 0

    def forget(self) -> None:
        """Release the messages that it has not acknowledged."""
        for sending in (*(sending for _, sending in self.unacknowledged), *self.accepting):
            sending.release()
        self.unacknowledged.clear()
        self.accepting.clear()

    def reached(self) -> None:
        self.failures = 0
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def hang_up(self) -> None:
        """Close the connection that it dialled; the next one continues where that one was."""
        if self.incoming is not None:
            self.expected = self.incoming.decoder.expected
            link, self.incoming = self.incoming, None
            link.close()

    def disconnect(self) -> None:
        """Close its connections, without another word about them."""
        self.hang_up()
        if self.outgoing is not None:
            link, self.outgoing = self.outgoing, None
            link.close()


class Peers(dict[int, Peer]):
    """The peers that a node has to do with, by rank; a peer is created when it is first asked for."""

    def __missing__(self, rank: int) -> Peer:
        peer = self[rank] = Peer(rank)
        return peer
