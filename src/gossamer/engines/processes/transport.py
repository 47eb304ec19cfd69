"""Messages between processes: asyncio TCP, one connection a pair and direction, under the receiver's credit.

A node dials each peer when it first has a message for it, and sends on that connection only; the peer's
credit comes back on it, and the peer's own messages come on a connection that the peer dials. So two nodes
that dial each other at once need no tie-break, and a connection's reader knows which frames may come.

One task per node sends, message by message in the order of :meth:`Transport.send`, as a node has one uplink:
a message is not begun before the one ahead of it was handed to the kernel, whoever its receiver is. At most
:data:`~gossamer.messages.WINDOW` bytes of a connection's chunks are unacknowledged; the kernel is told to
hold little that it has not put on the wire (TCP_NOTSENT_LOWAT), and asyncio's own buffer holds at most a
chunk. So what was "sent" is at the receiver or within one window of it, and a message can be taken back while
most of it is still here.

With a :class:`~gossamer.engines.processes.shaping.Shaper`, chunks leave and are acknowledged as a network of an
experiment lets them.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gossamer.engines.processes.connection import Connection, Incoming, Outgoing
from gossamer.engines.processes.sending import OwnSending, State
from gossamer.engines.processes.shaping import CATCH_UP_S, LATE_S, Departure, Shaper
from gossamer.engines.processes.wire import TOKEN_BYTES, abort, chunks
from gossamer.errors import GossamerError
from gossamer.messages import WINDOW, Message, Payload, Sending, Tag, Traffic
from gossamer.payload import BEGIN_BYTES, CHUNK_BYTES, Encoded, encode, freeze, pack_head

DIAL_TIMEOUT_S = 10.0
"""Seconds after which a peer that does not answer a dial is lost."""
_RECEIVE_BYTES = 64 * 1024
_BACKLOG = 4096


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket, for :class:`Transport` to accept from; port 0 lets the system choose one.

    Its small receive buffer is inherited by what it accepts, from the first connection on: also by peers that
    dial before the transport has started.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        listener.setblocking(False)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


class Transport:
    """One node's end of all its connections; lives in one event loop, and is called from there only.

    Args:
        rank: this node.
        listener: a listening socket (:func:`listen`); closed by :meth:`close`.
        addresses: (host, port) of every rank.
        token: 16 bytes that only this run's nodes know; who has not got them is refused.
        limit: bytes (head and buffers; chunk headers apart) of the largest message that is sent and accepted.
        deliver: called with each message, in the order in which its sender sent it.
        lost: called with a rank and why, once, when a peer's connection fails, closes or is refused.
        event: called with a kind and a text; the kind is ``"refused"``.
        now: this node's clock in seconds, for ``Message.sent_at``.
        failed: called with what the node did wrong (it modified what it had sent).
        watch: called when a message has left, or was taken back on its way: receiver, when its first chunk and its last
            one were written (seconds of this node's clock), bytes.
        shaper: what the network does to messages; None is nothing. Closed by :meth:`close`.

    Raises:
        ValueError: for a token of another length, or a rank without address.
    """

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        addresses: Sequence[tuple[str, int]],
        token: bytes,
        *,
        limit: int,
        deliver: Callable[[Message], None],
        lost: Callable[[int, str], None],
        event: Callable[[str, str], None],
        now: Callable[[], float],
        failed: Callable[[Exception], None],
        watch: Callable[[int, float, float, int], None] | None = None,
        shaper: Shaper | None = None,
    ) -> None:
        if len(token) != TOKEN_BYTES:
            raise ValueError(f"token: {len(token)} bytes; accepted: {TOKEN_BYTES}")
        if not 0 <= rank < len(addresses):
            raise ValueError(f"rank: {rank}; accepted: 0 to {len(addresses) - 1}, one address each")
        self.rank = rank
        self.limit = limit
        self.traffic = Traffic()
        self.lost_on_the_way = 0
        """Messages that were sent, and that the network lost."""
        self._listener = listener
        self._addresses = addresses
        self._token = token
        self._deliver, self._lost_callback, self._event, self._now = deliver, lost, event, now
        self._failed, self._watch = failed, watch
        self._shaper = shaper
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._queue: OrderedDict[OwnSending, None] = OrderedDict()
        self._current: OwnSending | None = None
        self._connections: set[Connection] = set()
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, Outgoing] = {}
        self._dials: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: dict[int, str] = {}
        # What is shaped is read chunk by chunk.
        self._received = memoryview(
            bytearray(_RECEIVE_BYTES if shaper is None else BEGIN_BYTES + CHUNK_BYTES)
        )
        self._closing = False
        # Set whenever something changed that the sender, flush() or close() may wait for.
        self._wake = asyncio.Event()
        if shaper is not None:
            shaper.changed = self._wake.set

    async def start(self) -> None:
        """Accept connections, and begin to send."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        self._server = await self._loop.create_server(
            lambda: Incoming(self), sock=self._listener, backlog=_BACKLOG
        )
        self._spawn(self._send_all())

    def send(self, to: int, payload: Payload | Encoded, tag: Tag) -> Sending:
        """Queue a message; what becomes of the payload afterwards makes no difference to it.

        Args:
            to: the receiver's rank.
            payload: what is sent. An :class:`~gossamer.payload.Encoded` is not copied and must not change: a
                broadcast encodes once, and an immutable snapshot need not be copied at all.
            tag: what it is about.

        Raises:
            TypeError: for a payload or tag that can't travel.
            ValueError: for a rank that can't be sent to, and a message larger than the limit.
            RuntimeError: when closed.
        """
        if self._closing:
            raise RuntimeError("the transport is closed")
        if not 0 <= to < len(self._addresses) or to == self.rank:
            raise ValueError(
                f"to: rank {to}; accepted: 0 to {len(self._addresses) - 1}, this node ({self.rank}) apart"
            )
        encoded = payload if isinstance(payload, Encoded) else encode(freeze(payload, lambda tensor: False))
        head = pack_head(tag, self._now(), encoded.structure)
        sending = OwnSending(self, to, head, encoded)
        if sending.nbytes > self.limit:
            raise ValueError(
                f"a message of {sending.nbytes} bytes to rank {to}; the limit is {self.limit} bytes"
            )
        if to in self._lost:
            self._give_up(sending)
        else:
            self._queue[sending] = None
            self._wake.set()
        return sending

    def mark_lost(self, rank: int, why: str) -> None:
        """Take a peer for dead: what is queued for it and sent to it later counts as lost and does not wait.

        Its connections are closed; ``lost`` is not called. A message of it that comes on a new connection is
        still delivered (it was restarted): see :meth:`mark_found`.
        """
        if rank in self._lost:
            return
        self._lost[rank] = why
        for sending in [sending for sending in self._queue if sending.to == rank]:
            del self._queue[sending]
            self._give_up(sending)
        if self._current is not None and self._current.to == rank and not self._current.over:
            self._give_up(self._current)
        if rank in self._dials:
            self._dials.pop(rank).cancel()
        for connection in (self._incoming.pop(rank, None), self._outgoing.pop(rank, None)):
            if connection is not None:
                connection.close()
        self._wake.set()

    def mark_found(self, rank: int) -> None:
        """Take a lost peer for alive again: the next message to it dials it."""
        self._lost.pop(rank, None)

    @property
    def busy(self) -> bool:
        """Whether a message is still to be sent."""
        return bool(self._queue) or self._current is not None

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every message was handed over and acknowledged, was cancelled, or is lost.

        Raises:
            TimeoutError: after so many seconds.
        """
        async with asyncio.timeout(timeout):
            while (
                self._queue or self._current or any(link.unacknowledged for link in self._outgoing.values())
            ):
                await self._changed()

    async def close(self) -> None:
        """Close everything at once and wait until it is closed; what was not :meth:`flush` ed may be lost."""
        self._closing = True
        if self._shaper is not None:
            self._shaper.close()
        if self._server is None:
            self._listener.close()
        else:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()
        while self._connections:
            await self._changed()
        if self._server is not None:
            await self._server.wait_closed()
        for sending in [*self._queue, *([self._current] if self._current is not None else [])]:
            if not sending.over:
                self._give_up(sending)
            sending.release()
        self._queue.clear()
        self._current = None
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _changed(self) -> None:
        """Wait until something changed; the caller checks its condition right before and right after."""
        self._wake.clear()
        await self._wake.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send_all(self) -> None:
        while True:
            while not self._queue:
                await self._changed()
            self._current, _ = self._queue.popitem(last=False)
            await self._transmit(self._current)
            if self._shaper is None or self._current.state is not State.SENT:
                self._current.accept()
            self._current.buffers = ()
            self._current = None
            self._wake.set()

    async def _transmit(self, sending: OwnSending) -> None:
        sending.state = State.LEAVING
        departure = None if self._shaper is None else self._shaper.depart(sending.to)
        lost = departure is not None and departure.lost
        link = None if lost else await self._connect(sending)
        if sending.over:
            return
        if departure is not None:
            self._expect_acceptance(sending, departure, link)
        number = 0 if link is None else link.begun
        free_at = max(sending.queued_at, self._loop.time() - LATE_S)
        start_s, sent_before = self._now(), self.traffic.bytes_sent
        for chunk in chunks(number, sending.head, sending.buffers):
            while not (sending.over or link is None or link.room(chunk.nbytes)):
                await self._changed()
                free_at = self._loop.time() - CATCH_UP_S
            if self._shaper is not None:
                await self._pass_uplink(self._shaper, sending, len(chunk.frame), free_at)
                free_at = -math.inf
                if link is not None and not self._shaper.reaches(sending.to):
                    self._call_off(link, number)
                    link, lost = None, True
            if sending.over:
                break
            if not sending.unchanged():
                self._failed(
                    GossamerError(
                        f"a vector of a message to node {sending.to} was modified in place after it was sent; what is in"
                        " a message is immutable: compute a new vector"
                    )
                )
                self._cancel(sending)
                break
            self._write(link, chunk.frame)
            if link is not None:
                link.begun = number + 1
                link.written += chunk.nbytes
                link.unacknowledged += chunk.nbytes
        else:
            # From here on the receiver will see it: it can't be taken back any more.
            sending.state = State.SENT
            self.traffic.messages_sent += 1
            if lost:
                self.traffic.messages_lost += 1
                self.lost_on_the_way += 1
                sending.accept()
        if self._watch is not None and (sent := self.traffic.bytes_sent - sent_before):
            self._watch(sending.to, start_s, self._now(), sent)
        if link is not None:
            if sending.state is State.CANCELLED:
                self._call_off(link, number)
            while not (link.writable or link.closed):
                await self._changed()

    async def _connect(self, sending: OwnSending) -> Outgoing | None:
        """The connection to a message's receiver; None if the message needs none any more."""
        to = sending.to
        if to not in self._outgoing and to not in self._dials:
            self._dials[to] = self._spawn(self._dial(to))
        while not (sending.over or to in self._outgoing):
            await self._changed()
        return self._outgoing.get(to)

    async def _pass_uplink(self, shaper: Shaper, sending: OwnSending, nbytes: int, since: float) -> None:
        """Wait until some bytes of a message have passed the uplink, or needn't any more."""
        shaper.uplink.take(nbytes, since)
        while not sending.over and (wait := shaper.uplink.free - self._loop.time()) > 0:
            timer = self._loop.call_later(wait, self._wake.set)
            await self._changed()
            timer.cancel()
        if sending.over:
            shaper.uplink.give_back(self._loop.time())

    def _expect_acceptance(self, sending: OwnSending, departure: Departure, link: Outgoing | None) -> None:
        """A message that begins to leave is accepted when all but a window of it is acknowledged, a round trip later."""
        beyond = sending.nbytes - WINDOW
        if beyond <= 0:
            sending.accept()
        elif link is not None:
            link.accept_after(beyond, departure.round_trip_s, sending)

    def _call_off(self, link: Outgoing, number: int) -> None:
        """Have the receiver discard what it has of a message."""
        if link.begun > number and not link.closed:
            self._write(link, abort(number))

    def _write(self, link: Outgoing | None, frame: bytes) -> None:
        self.traffic.bytes_sent += len(frame)
        if link is not None:
            link.link.write(frame)

    async def _dial(self, to: int) -> None:
        host, port = self._addresses[to]
        failure = None
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                _, link = await asyncio.get_running_loop().create_connection(
                    lambda: Outgoing(self, to), host, port
                )
        except OSError as error:  # of which TimeoutError is one
            failure = str(error) or f"did not answer within {DIAL_TIMEOUT_S} s"
        # (Cancelled: mark_lost or close has removed it.)
        del self._dials[to]
        if failure is not None:
            self._lose(to, failure)
        elif not link.closed:
            self._outgoing[to] = link
        self._wake.set()

    def _cancel(self, sending: OwnSending) -> bool:
        if sending.over:
            return sending.state is not State.SENT
        sending.state = State.CANCELLED
        self.traffic.messages_cancelled += 1
        self._queue.pop(sending, None)
        sending.release()
        self._wake.set()
        return True

    def _arrived(self, message: Message) -> None:
        self.traffic.messages_received += 1
        self._deliver(message)

    def _give_up(self, sending: OwnSending) -> None:
        sending.state = State.LOST
        self.traffic.messages_lost += 1
        sending.release()

    def _lose(self, rank: int, why: str) -> None:
        """A connection to or from a peer failed."""
        if self._closing or rank in self._lost:
            return
        self.mark_lost(rank, why)
        self._lost_callback(rank, why)
