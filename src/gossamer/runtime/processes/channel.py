"""Channels between the processes of one run: typed messages (``protocol``) in msgpack, each behind its length.

The length is checked before any part of a message is kept or decoded. A message is refused if it does not have the fields and
types of its class. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import ssl
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from gossamer.runtime.processes.protocol import Message

LARGEST = 1 << 30
"""Bytes of a message between processes of one machine, which start one another."""
_LENGTH = struct.Struct("<I")
_READ = 1 << 16
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

M = TypeVar("M")


class ChannelError(Exception):
    """The other end has sent an invalid message."""


def pack(message: Message) -> bytes:
    """A message as it travels."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


@cache
def _decoder(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kinds)


class Unpacker(Generic[M]):
    """Messages from a stream of bytes, wherever it is divided.

    Args:
        kinds: the union of the messages that may come.
        largest: bytes of a message at most.
    """

    def __init__(self, kinds: Any, largest: int = LARGEST) -> None:
        self._decode = _decoder(kinds).decode
        self._largest = largest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Take some bytes; gives the messages that are complete.

        Raises:
            ChannelError: for a message that is too long, or of no expected kind.
        """
        self._buffer += data
        messages: list[M] = []
        start = 0
        while len(self._buffer) >= start + _LENGTH.size:
            end = start + _LENGTH.size + self.length(self._buffer[start : start + _LENGTH.size])
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view, view[start + _LENGTH.size : end] as body:
                messages.append(self.decoded(body))
            start = end
        del self._buffer[:start]
        return messages

    def length(self, head: bytes | bytearray) -> int:
        """The length of a message that begins so; raises as :meth:`feed` does."""
        [length] = _LENGTH.unpack(head)
        if length > self._largest:
            raise ChannelError(f"a message of {length} bytes; accepted: {self._largest}")
        return int(length)

    def decoded(self, body: bytes | memoryview) -> M:
        """A message; raises as :meth:`feed` does."""
        try:
            message: M = self._decode(body)
        except msgspec.MsgspecError as error:
            raise ChannelError(f"a message that can't be read: {error}") from None
        return message


class Channel(Generic[M]):
    """One end of a connection, with blocking reads and writes.

    Args:
        end: the socket.
        kinds: the union of the messages that may come.
        largest: bytes of a message at most.
    """

    def __init__(self, end: socket.socket, kinds: Any, largest: int = LARGEST) -> None:
        self._socket = end
        self._unpacker: Unpacker[M] = Unpacker(kinds, largest)

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Write a message; False if the other end is gone."""
        try:
            self._socket.sendall(pack(message))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> M | None:
        """Wait for one message, and read no further; None when the other end is gone."""
        head = self._exactly(_LENGTH.size)
        body = None if head is None else self._exactly(self._unpacker.length(head))
        return None if body is None else self._unpacker.decoded(body)

    def _exactly(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            try:
                piece = self._socket.recv(count - len(data))
            except ConnectionResetError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class SelectorChannel(Generic[M]):
    """One end, for a process that waits on a selector and must not block: messages wait here until the other end reads.

    Args:
        end: a connected socket, perhaps with TLS.
        kinds: the union of the messages that may come.
        selector: where it is registered while it is open; the data of a key is a function to call with the events.
        handle: called with the messages that have come together; raises :class:`ChannelError` for one that is invalid.
        gone: called when the other end is gone, or has sent an invalid message; with what is wrong with that, or None.
        largest: bytes of a message at most.
        more: gives a frame to send once everything else is sent; empty where there is none.

    Attributes:
        waiting: bytes that the system has not taken.
    """

    def __init__(
        self,
        end: socket.socket,
        kinds: Any,
        selector: selectors.BaseSelector,
        handle: Callable[[list[M]], object],
        gone: Callable[[str | None], object],
        *,
        largest: int = LARGEST,
        more: Callable[[], bytes] = bytes,
    ) -> None:
        end.setblocking(False)
        self._socket, self._selector = end, selector
        self._unpacker: Unpacker[M] = Unpacker(kinds, largest)
        self._handle, self._gone, self._more = handle, gone, more
        self.waiting = bytearray()
        self._events = selectors.EVENT_READ
        self._open = True
        selector.register(end, self._events, self._serve)

    def send(self, message: Message) -> None:
        """Send a message, now or when there is room."""
        self.waiting += pack(message)
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        try:
            while self.waiting or self._refill():
                del self.waiting[: self._socket.send(self.waiting)]
        except _NOT_NOW:
            pass
        except OSError:
            self.waiting.clear()  # reading tells that the other end is gone
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.waiting else 0)
        if self._open and events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self._serve)

    def _refill(self) -> bool:
        self.waiting += self._more()
        return bool(self.waiting)

    def _serve(self, events: int) -> None:
        if self._open and events & selectors.EVENT_WRITE:
            self.flush()
        if self._open and events & selectors.EVENT_READ:
            self.read()

    def read(self) -> None:
        """Handle what has come, if anything has."""
        try:
            data = self._socket.recv(_READ)
        except _NOT_NOW:
            return
        except OSError:
            data = b""
        why = None
        try:
            if messages := self._unpacker.feed(data):
                self._handle(messages)
        except ChannelError as error:
            why = str(error)
        if not data or why is not None:
            self.close()
            self._gone(why)

    def release(self) -> socket.socket:
        """Give the socket away."""
        self._open = False
        self._selector.unregister(self._socket)
        return self._socket

    def close(self) -> None:
        """Close this end; a second time does nothing."""
        if self._open:
            self.release().close()


class AsyncChannel(Generic[M]):
    """One end, for a node's event loop.

    Args:
        end: the socket.
        kinds: the union of the messages that may come.
        handle: called with each message.
        gone: called when the other end is gone.
    """

    def __init__(
        self, end: socket.socket, kinds: Any, handle: Callable[[M], None], gone: Callable[[], None]
    ) -> None:
        self._socket = end
        self._handle, self._gone = handle, gone
        self._unpacker: Unpacker[M] = Unpacker(kinds)
        end.setblocking(True)
        asyncio.get_running_loop().add_reader(end, self._readable)

    def send(self, message: Message) -> None:
        """Write a message. Messages are small and the other end always reads, so this hardly ever blocks."""
        try:
            self._socket.sendall(pack(message))
        except (BrokenPipeError, ConnectionResetError):
            self._gone()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except ConnectionResetError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._gone()
            return
        for message in self._unpacker.feed(data):
            self._handle(message)
