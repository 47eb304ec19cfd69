"""A scene for tests of the transport: several nodes in one event loop, and raw sockets that the test controls."""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from gossamer.messages import encode, pack_head
from gossamer.messages.tags import Message, Sending
from gossamer.runtime.processes.security import Security
from gossamer.runtime.processes.transport.transport import Transport, listen
from gossamer.runtime.processes.transport.wire import Decoder, Event, chunks, hello

TOKEN = b"the run's token."
LIMIT = 4_000_000

securities: list[Security] = []
"""The keys of the nodes of a network; none if empty. Set by the fixture ``wire``."""


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop; fail if it hangs, or leaves a task behind."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(30):
                await test(*args, **kwargs)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(main())

    return run


class Peer:
    """A transport and everything that it reported."""

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        addresses: list[tuple[str, int]],
        limit: int = LIMIT,
        **options: Any,
    ) -> None:
        self.address = addresses[rank]
        self.inbox: list[Message] = []
        self.lost: list[tuple[int, str]] = []
        self.events: list[tuple[str, str]] = []
        self.found: list[int] = []
        self.failures: list[BaseException] = []
        self.changed = asyncio.Event()
        clock = itertools.count()
        self.transport = Transport(
            listener,
            rank,
            addresses,
            TOKEN,
            limit=limit,
            deliver=lambda message: self._note(self.inbox, message),
            contact=self._hear_of,
            refused=lambda text: self._note(self.events, ("refused", text)),
            now=lambda: float(next(clock)),
            failed=lambda error: self._note(self.failures, error),
            **{"security": securities[rank] if securities else None, **options},
        )
        self.send = self.transport.send
        self.traffic = self.transport.traffic

    def _hear_of(self, rank: int, why: str | None) -> None:
        if why is None:
            self._note(self.found, rank)
        else:
            self._note(self.lost, (rank, why))

    def _note(self, notes: list[Any], item: Any) -> None:
        notes.append(item)
        self.changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def receive(self, count: int) -> list[Message]:
        await self.until(lambda: len(self.inbox) >= count)
        return self.inbox


@asynccontextmanager
async def network(
    size: int, *, limit: int = LIMIT, raw_ranks: int = 0, **options: Any
) -> AsyncIterator[tuple[list[Peer], list[Any]]]:
    """Transports, and listening sockets of the ranks after them, which the test serves itself."""
    listeners = [listen() for _ in range(size + raw_ranks)]
    addresses = [listener.getsockname()[:2] for listener in listeners]
    peers = [Peer(rank, listeners[rank], addresses, limit, **options) for rank in range(size)]
    try:
        for peer in peers:
            await peer.transport.start()
        yield peers, listeners[size:]
    finally:
        for peer in peers:
            await peer.transport.close()
        for listener in listeners:
            listener.close()


class RawEnd:
    """A socket that the test controls."""

    def __init__(self, end: socket.socket, limit: int | None = LIMIT) -> None:
        self.end = end
        self.decoder = Decoder(limit)
        self.events: list[Event] = []
        self.eof = False

    async def __aenter__(self) -> RawEnd:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end.close()

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.end, data)

    async def read(self) -> None:
        try:
            data = await asyncio.get_running_loop().sock_recv(self.end, 65_536)
        except ConnectionError:
            data = b""
        self.eof = not data
        self.events.extend(self.decoder.feed(data))

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            assert not self.eof, "the connection was closed"
            await self.read()

    async def until_closed(self) -> None:
        while not self.eof:
            await self.read()

    def reset(self) -> None:
        reset(self.end)


async def accept(listener: socket.socket, rank: int, **greeting: int) -> RawEnd:
    end, _ = await asyncio.get_running_loop().sock_accept(listener)
    end.setblocking(False)
    peer = RawEnd(end)
    await peer.say(hello(rank, TOKEN, **greeting))
    return peer


async def dial(peer: Peer, first: bytes) -> RawEnd:
    end = socket.socket()
    end.setblocking(False)
    await asyncio.get_running_loop().sock_connect(end, peer.address)
    dialled = RawEnd(end, None)
    await dialled.say(first)
    return dialled


async def settle() -> None:
    """Run everything that is ready, without waiting."""
    for _ in range(50):
        await asyncio.sleep(0)


async def is_done(sending: Sending) -> bool:
    async def wait() -> None:
        await sending

    task = asyncio.ensure_future(wait())
    await settle()
    done = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return done


def message(number: int, payload: Any, tag: str = "t") -> list[bytes]:
    encoded = encode(payload)
    return [chunk.frame for chunk in chunks(number, pack_head(tag, 0.0, encoded.structure), encoded.buffers)]


class Proxy:
    """Stands in front of a node: forwards connections, and cuts, stops or records them.

    Args:
        to: the node's address.
        cuts: the bytes after which each successive connection is cut; later ones are not cut.
    """

    def __init__(self, to: tuple[str, int], cuts: list[int] | None = None) -> None:
        self.to = to
        self.cuts = list(cuts or ())
        self.passed = bytearray()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.connections = 0
        self._listener = listen()
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, sock=self._listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.flowing.set()
        while self._tasks:
            self.cut()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Cut every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        left = [self.cuts.pop(0) if self.cuts else 2**62]
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.to)
            ends.append(far_writer)
            self._writers.update(ends)
            await asyncio.gather(
                self._forward(reader, far_writer, left, ends), self._forward(far_reader, writer, left, ends)
            )
        finally:
            for end in ends:
                end.transport.abort()
            self._writers.difference_update(ends)
            self._tasks.discard(task)

    async def _forward(
        self,
        source: asyncio.StreamReader,
        to: asyncio.StreamWriter,
        left: list[int],
        ends: list[asyncio.StreamWriter],
    ) -> None:
        try:
            while left[0] and (data := await source.read(65_536)):
                await self.flowing.wait()
                self.passed += data
                to.write(data[: left[0]])
                left[0] -= min(left[0], len(data))
                await to.drain()
        except ConnectionError:
            pass  # the other direction was cut
        for end in ends:
            end.transport.abort()


def reset(end: socket.socket) -> None:
    """Reset a connection instead of closing it."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


@asynccontextmanager
async def proxied(cuts: list[list[int]], **options: Any) -> AsyncIterator[tuple[list[Peer], list[Proxy]]]:
    """Two transports that reach each other through proxies (proxy i stands in front of node i)."""
    async with AsyncExitStack() as stack:
        listeners = [stack.enter_context(listen()) for _ in range(2)]
        real = [listener.getsockname()[:2] for listener in listeners]
        proxies = [await stack.enter_async_context(Proxy(real[i], cuts[i])) for i in range(2)]
        seen = [[real[0], proxies[1].address], [proxies[0].address, real[1]]]
        peers = [Peer(rank, listeners[rank], seen[rank], **options) for rank in range(2)]
        for peer in peers:
            await peer.transport.start()
            stack.push_async_callback(peer.transport.close)
        yield peers, proxies
