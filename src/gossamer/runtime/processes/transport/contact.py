"""What a node knows of one peer, over all their connections: its incarnation, and what is not acknowledged."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import NamedTuple

from gossamer.messages import FrameError
from gossamer.runtime.processes.transport.link import Inward, Outward
from gossamer.runtime.processes.transport.sending import OwnSending, State
from gossamer.runtime.processes.transport.wire import NUMBERS


class Unacknowledged(NamedTuple):
    """A message number that was used on the connection to a peer.

    Args:
        end: bytes of chunks written on the connection when it was done.
        sending: its message; None if that was taken back.
    """

    end: int
    sending: OwnSending | None


class Contact:
    """One peer.

    Args:
        rank: its rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.incarnation: int | None = None
        """Its newest incarnation that was heard of."""
        self.ended = -1
        """The newest incarnation that is known to be over."""
        self.lost: str | None = None
        """Why it is lost, if it is."""
        self.why = "no connection yet"
        """What became of the last connection, or attempt at one."""
        self.silent = 0
        """Ticks since anything came from it, while it is connected."""
        self.timer: asyncio.TimerHandle | None = None
        """When it is lost, unless it is reached before."""
        # Towards it.
        self.used = False
        """Whether there were messages for it."""
        self.kept = False
        """Whether it's to be connected without any, too."""
        self.down = False
        """Whether messages to it don't wait for a connection at the head of the queue."""
        self.dial: asyncio.Task[None] | None = None
        self.hurry = asyncio.Event()
        """Set to try at once what else would be tried a little later."""
        self.broken = False
        """Whether the last connection to it broke, and none was made since."""
        self.dialled = 0
        self.failures = 0
        """Dials without an answer, since the last one that had one."""
        self.outgoing: Outward | None = None
        self.number = 0
        """Of the next message to it."""
        self.unacknowledged: deque[Unacknowledged] = deque()
        self.waiting: OrderedDict[OwnSending, None] = OrderedDict()
        """Messages that wait until it is connected."""
        self.first = 0, 0
        """The newest round of this node in which a message to it was begun, and that message's number."""
        self.marks: list[tuple[int, int]] = []
        """Cuts that it is still to be told of, each with the round before which it was made."""
        # From it.
        self.answered = 0
        """The newest of its connections to this node."""
        self.incoming: Inward | None = None
        self.expected = 0
        """The number of the next message from it."""
        self.arrived = 0
        """Messages from it that are here whole."""
        self.delivered = 0
        """Those of them that the network has let through."""
        self.marked: deque[tuple[int, int, int]] = deque()
        """Its cuts, each with the number of its first message after it, and how many had arrived when it said so."""

    @property
    def connected(self) -> bool:
        """Whether it is connected in one direction or the other."""
        return self.outgoing is not None or self.incoming is not None

    @property
    def wanted(self) -> bool:
        """Whether it is dialled until it answers."""
        return self.used or self.kept

    @property
    def settled(self) -> bool:
        """Whether it has acknowledged all that was sent to it."""
        if self.outgoing is not None:
            return self.outgoing.unacknowledged == 0
        return all(entry.sending is None for entry in self.unacknowledged)

    def stale(self, incarnation: int, connection: int | None) -> str | None:
        """Why a greeting can't be of now: of a life that is over, or (coming in) of an older connection."""
        if incarnation <= self.ended or (self.incarnation is not None and incarnation < self.incarnation):
            return f"in its life {incarnation}, which is over"
        if connection is not None and incarnation == self.incarnation and connection <= self.answered:
            return "on a connection that is known already"
        return None

    def acknowledge(self, nbytes: int) -> None:
        """So many bytes of the connection's chunks are acknowledged."""
        while self.unacknowledged and self.unacknowledged[0].end <= nbytes:
            sending = self.unacknowledged.popleft().sending
            if sending is not None:
                sending.buffers = ()

    def resume(self, expected: int) -> None:
        """A new connection goes on with the message that the peer expects; those of the old one that it has not got are
        to be sent again.

        Raises:
            FrameError: if it can't expect that one.
        """
        behind = (self.number - expected) % NUMBERS
        if behind >= NUMBERS // 2:
            raise FrameError(f"expects message {expected} after message {self.number - 1}")
        again = []
        for index, entry in enumerate(self.unacknowledged):
            if entry.sending is None:
                continue
            if index < len(self.unacknowledged) - behind:
                entry.sending.release()
            else:
                entry.sending.state = State.AGAIN
                again.append(entry.sending)
        self.unacknowledged.clear()
        self.number = expected
        for sending in reversed(again):
            self.waiting[sending] = None
            self.waiting.move_to_end(sending, last=False)

    def begin_life(self, incarnation: int) -> None:
        """The peer was restarted: what its last incarnation may have received isn't sent again, and numbers start again."""
        self.incarnation = incarnation
        self.forget()
        self.number = self.expected = self.answered = 0
        self.first = 0, 0

    def forget(self) -> None:
        """Let go of what was sent and is not acknowledged."""
        for entry in self.unacknowledged:
            if entry.sending is not None:
                entry.sending.release()
        self.unacknowledged.clear()

    def reached(self) -> None:
        """Nothing is missing any more."""
        self.failures = 0
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def hang_up(self) -> None:
        """Close the connection that it dialled; the next one goes on where that one was."""
        if self.incoming is not None:
            self.expected = self.incoming.expected
            link, self.incoming = self.incoming, None
            link.close()

    def disconnect(self) -> None:
        """Close its connections, without another word about them."""
        self.hang_up()
        if self.outgoing is not None:
            link, self.outgoing = self.outgoing, None
            link.close()


class Contacts(dict[int, Contact]):
    """The contacts of a node, by rank; one is made when it is first asked for."""

    def __missing__(self, rank: int) -> Contact:
        contact = self[rank] = Contact(rank)
        return contact
