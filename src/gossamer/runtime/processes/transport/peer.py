"""The state that one node's connections share (:class:`Endpoint`), and that of each peer (:class:`Peer`)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from gossamer.errors import BadInput
from gossamer.messages import BEGIN_BYTES, CHUNK_BYTES, FrameError
from gossamer.messages.tags import Message, Traffic
from gossamer.runtime.processes.security.guard import Guard, place_of
from gossamer.runtime.processes.security.trust import Security
from gossamer.runtime.processes.transport.shaper import Shaper
from gossamer.runtime.processes.transport.wire import NUMBERS

if TYPE_CHECKING:
    from gossamer.runtime.processes.transport.connection import Connection, Incoming, Outgoing
    from gossamer.runtime.processes.transport.outbox import OwnSending

RECEIVE_BYTES = 64 * 1024
"""Bytes that the kernel holds of a connection, and that are read at a time."""


@dataclass(eq=False)
class Endpoint:
    """One node's end of all its connections: its identity, its settings, and the functions that the transport calls.

    Create it in the event loop that it belongs to.

    Args:
        rank: this node.
        addresses: (host, port) of every rank.
        token: 16 bytes that only this run's nodes know; a peer without them is refused.
        limit: bytes (head and buffers, without chunk headers) of the largest message that is sent and accepted.
        deliver: called with each message, in the order in which its sender sent it.
        lost: called once with a rank and the reason when a peer can't be reached, is silent or is refused.
        event: called with a kind and a text; the kind is ``"refused"``.
        now: this node's clock in seconds, for ``Message.sent_at``.
        failed: called with an error of this node (it modified what it had sent).
        watch: called when a message has left, or was taken back on its way: receiver, when its first and its last chunk
            were written (seconds of this node's clock), bytes.
        shaper: what the network does to messages; None is nothing.
        security: keys for TLS; None is for loopback only.
        incarnation: how often this node was started before.
        heartbeat_s: seconds of silence on a connection after which a heartbeat is sent; None sends none.
        detection_s: seconds without a sign of life after which a peer is lost. With heartbeats, a peer that stands still is
            noticed within ``detection_s + heartbeat_s / 2`` seconds; without, only one that can't be dialled.
        found: called with a rank when a lost peer is there again, or one was restarted.
        marked: called with a rank, the number of a snapshot and that of a message when all messages before that one, which
            the peer had sent before the snapshot, are delivered.
        told: called with the number of a snapshot and some ranks when all that was sent before it has left, and these peers,
            all that were sent anything, were told of it.
        relinked: called with a rank when a broken connection to it was replaced: what it was told of snapshots may be lost.

    Raises:
        BadInput: for an address that is not loopback without ``security``.
    """

    rank: int
    addresses: list[tuple[str, int]]
    token: bytes
    limit: int
    deliver: Callable[[Message], None]
    lost: Callable[[int, str], None]
    event: Callable[[str, str], None]
    now: Callable[[], float]
    failed: Callable[[Exception], None]
    watch: Callable[[int, float, float, int], None] | None = None
    shaper: Shaper | None = None
    security: Security | None = None
    incarnation: int = 0
    heartbeat_s: float | None = None
    detection_s: float = 10.0
    found: Callable[[int], None] | None = None
    marked: Callable[[int, int, int], None] | None = None
    told: Callable[[int, list[int]], None] | None = None
    relinked: Callable[[int], None] | None = None

    traffic: Traffic = field(default_factory=Traffic, init=False)
    connections: set[Connection] = field(default_factory=set, init=False)
    tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    closing: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.addresses = list(self.addresses)  # later processes may move
        for host, port in self.addresses:
            self.check_host(host, port)
        self.peers = Peers()
        # What comes in is read to the end within one callback of the loop, so all connections share the memory. What is
        # shaped is read chunk by chunk.
        self.received = memoryview(
            bytearray(RECEIVE_BYTES if self.shaper is None else BEGIN_BYTES + CHUNK_BYTES)
        )
        self.opened = memoryview(bytearray(0 if self.security is None else len(self.received)))
        self.guard = Guard(len(self.addresses), partial(self.event, "refused"), self.loop.time)
        self._changed = asyncio.Event()
        if self.shaper is not None:
            self.shaper.changed = self.wake

    def check_host(self, host: str, port: int) -> None:
        """Refuse an address that is not loopback where there are no keys."""
        if self.security is None and place_of(host) != "loopback":
            raise BadInput(f"address {host}:{port}: not loopback; accepted: with keys")

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()

    async def changed(self) -> None:
        """Wait until something changed; the caller checks its condition right before and right after."""
        self._changed.clear()
        await self._changed.wait()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that is cancelled when all is closed."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class Peers(dict[int, "Peer"]):
    """The peers that a node has to do with, by rank; a peer is created when it is first asked for."""

    def __missing__(self, rank: int) -> Peer:
        peer = self[rank] = Peer(rank)
        return peer


@dataclass(eq=False)
class Mark:
    """A snapshot that a peer is to be told of: its number, the round after it, and the number of the first message of that
    round or a later one, if one has left."""

    snapshot: int
    round: int
    message: int | None


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
        self.broken = False  # whether the last connection to it broke, and none was made since
        self.dialled = 0
        self.failures = 0  # dials since the last one that was answered
        self.outgoing: Outgoing | None = None
        self.number = 0  # of the next message to it
        # By message number: bytes of chunks on the connection up to its end; the message, unless it was taken back.
        self.unacknowledged: deque[tuple[int, OwnSending | None]] = deque()
        self.accepting: set[OwnSending] = set()  # sent; the acknowledgement takes its simulated time
        self.waiting: OrderedDict[OwnSending, None] = OrderedDict()  # until it is connected
        self.first = (
            0,
            0,
        )  # this node's newest round with a message to it, and that round's first message number
        self.marks: deque[Mark] = deque()  # snapshots to tell it of
        # From it.
        self.answered = 0  # the newest of its connections to this node
        self.incoming: Incoming | None = None
        self.expected = 0  # the number of the next message from it
        self.arrived = 0  # messages from it that came in whole
        self.delivered = 0  # those of them that the network has let through
        self.marked: deque[tuple[int, int, int]] = deque()  # its snapshots: number, message, arrived by then

    @property
    def settled(self) -> bool:
        """Whether it has acknowledged all that was sent to it."""
        return all(sending is None for _, sending in self.unacknowledged)

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
            if sending is not None:
                sending.buffers = ()

    def resume(self, expected: int) -> None:
        """Continue on a new connection with the message that the peer expects; later ones are sent again.

        Raises:
            FrameError: if it can't expect that one.
        """
        behind = (self.number - expected) % NUMBERS
        if behind >= NUMBERS // 2:
            raise FrameError(f"expects message {expected} after message {self.number - 1}")
        got = len(self.unacknowledged) - behind
        again = []
        for index, (_, sending) in enumerate(self.unacknowledged):
            if sending is not None and index < got:
                sending.release()
            elif sending is not None:
                sending.send_again()
                again.append(sending)
        self.unacknowledged.clear()
        self.number = expected
        self.waiting = OrderedDict.fromkeys((*again, *self.waiting))

    def restarted(self, incarnation: int) -> None:
        """Numbers start again, and what the last incarnation may have received isn't sent again."""
        self.incarnation = incarnation
        self.forget()
        self.number = self.expected = self.answered = 0
        self.first = 0, 0
        for mark in self.marks:
            mark.message = None

    def forget(self) -> None:
        """Release the messages that it has not acknowledged."""
        for _, sending in self.unacknowledged:
            if sending is not None:
                sending.release()
        self.unacknowledged.clear()
        for sending in self.accepting:
            sending.release()
        self.accepting.clear()

    def reached(self) -> None:
        """It is not missing."""
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
