"""Channels between the processes of a run: typed messages (``protocol``) in msgpack, preceded by their
length.

The length is checked before any part of a message is kept or decoded. A message is refused if it does not
have the fields, types and ranges of its class. Nothing is unpickled."""

from __future__ import annotations

import selectors
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from gossamer.errors import BadInput
from gossamer.runtime.processes.protocol import Acknowledge, ProtocolMessage, Violation, line

LARGEST = (1 << 32) - 1
"""Most bytes in a message, which may contain a file. Memory is allocated only as bytes arrive."""
LARGEST_STRANGER = 4096
"""Most bytes in a message from an end that has not proved that it knows the token."""
_LONGEST_KEEP_ALIVE_S = 32_767
"""The longest time between two questions whether the other end is there that Linux takes: nine hours."""
_LENGTH = struct.Struct("<I")
_READ = 1 << 16
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

M = TypeVar("M")


def pack(message: ProtocolMessage) -> bytes:
    """A message in its wire format."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


@cache
def _decoder(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kinds)


class Unpacker(Generic[M]):
    """Decodes messages of some ``kinds`` (a union), of at most ``largest`` bytes, from a byte stream that may
    be split anywhere.

    Its methods raise :class:`Violation` for a message that is too long, or of no expected kind.
    """

    def __init__(self, kinds: Any, largest: int = LARGEST) -> None:
        self._decode = _decoder(kinds).decode
        self._largest = largest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Take some bytes, and yield the messages that they complete, including those before an error."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + self.length(self._buffer[: _LENGTH.size])
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view, view[_LENGTH.size : end] as part:
                message = self.decoded(part)
            del self._buffer[:end]
            yield message

    def length(self, head: bytes | bytearray) -> int:
        [length] = _LENGTH.unpack(head)
        if length > self._largest:
            raise Violation(f"a message of {length} bytes; accepted: {self._largest}")
        return int(length)

    def decoded(self, body: bytes | memoryview) -> M:
        try:
            message: M = self._decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Violation(f"a message that can't be read: {line(str(error))}") from None
        return message


class Channel(Generic[M]):
    """One end of a connection, with blocking reads and writes. ``kinds`` and ``largest`` are as for
    :class:`Unpacker`."""

    def __init__(self, end: socket.socket, kinds: Any, largest: int = LARGEST) -> None:
        self._socket = end
        self._unpacker: Unpacker[M] = Unpacker(kinds, largest)
        self.fileno, self.close = end.fileno, end.close

    def send(self, message: ProtocolMessage) -> bool:
        """Write a message; False if the other end is gone."""
        try:
            self._socket.sendall(pack(message))
        except OSError:
            return False
        return True

    def receive(self) -> M | None:
        """Wait for one message, and read nothing after it; None when the other end is gone."""
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


class SelectorChannel(Generic[M]):
    """One end of a connection, for a process that waits on a selector and must not block. Messages wait here
    until the other end reads them.

    While it is open, it is registered with ``selector``; the data of a key is a function to call with the
    events. ``handle`` is called with each message, and raises :class:`Violation` if it is invalid. ``gone``
    is called with None when the other end is gone, or with the error after an invalid message."""

    def __init__(
        self,
        end: socket.socket,
        kinds: Any,
        selector: selectors.BaseSelector,
        handle: Callable[[M], object],
        gone: Callable[[str | None], object],
        *,
        largest: int = LARGEST,
    ) -> None:
        end.setblocking(False)
        self._socket, self._selector = end, selector
        self._unpacker: Unpacker[M] = Unpacker(kinds, largest)
        self._handle, self._gone = handle, gone
        self.waiting = bytearray()  # bytes that the system has not accepted yet
        self.arrived = 0  # bytes
        self._events = selectors.EVENT_READ
        self._open = True
        selector.register(end, self._events, self._serve)

    def send(self, message: ProtocolMessage) -> None:
        """Send a message, now or when there is room."""
        self.write(pack(message))

    def write(self, frame: bytes = b"") -> None:
        """Write a packed message after those that wait, as far as there is room."""
        self.waiting += frame
        try:
            while self.waiting:
                del self.waiting[: self._socket.send(self.waiting)]
        except _WOULD_BLOCK:
            pass
        except OSError:
            self.waiting.clear()  # the next read reports that the other end is gone
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.waiting else 0)
        if self._open and events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self._serve)

    def _serve(self, events: int) -> None:
        if self._open and events & selectors.EVENT_WRITE:
            self.write()
        if self._open and events & selectors.EVENT_READ:
            self.read()

    def read(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except _WOULD_BLOCK:
            return
        except OSError:
            data = b""
        self.arrived += len(data)
        problem = None
        try:
            for message in self._unpacker.feed(data):
                if self._open:
                    self._handle(message)
        except Violation as error:
            problem = str(error)
        if not data or problem is not None:
            self.close()
            self._gone(problem)

    def release(self) -> socket.socket:
        self._open = False
        self._selector.unregister(self._socket)
        return self._socket

    def close(self) -> None:
        if self._open:
            self.release().close()


class Session(Generic[M]):
    """One end of a conversation between machines, which outlives its connections (``channel``, None if there
    is none).

    Messages are numbered in order. Each end keeps its messages until the other end acknowledges them, and
    sends the remaining ones again on the next connection. So no message is lost or arrives twice.
    ``received`` counts the messages received."""

    def __init__(
        self,
        kinds: Any,
        selector: selectors.BaseSelector,
        handle: Callable[[M], object],
        gone: Callable[[str | None], object],
    ) -> None:
        self._kinds, self._selector, self._handle, self._gone = kinds, selector, handle, gone
        self._acknowledged = 0
        self._kept: deque[bytes] = deque()  # the messages sent since
        self.channel: SelectorChannel[M | Acknowledge] | None = None
        self.received = 0

    def attach(self, end: socket.socket, received: int, *first: ProtocolMessage) -> None:
        """Continue on a new connection, whose other end has received ``received`` messages."""
        self._acknowledge(received)
        self.close()
        self.channel = SelectorChannel(end, self._kinds, self._selector, self._take, self._lose)
        self.channel.write(b"".join([*map(pack, first), *self._kept]))
        self.channel.read()  # TLS may already have decrypted more data

    def send(self, message: ProtocolMessage) -> None:
        """Send a message, now or as soon as the other end can be reached."""
        self._kept.append(pack(message))
        if self.channel is not None:
            self.channel.write(self._kept[-1])

    @property
    def heard(self) -> int:
        """The number of bytes that have arrived on this connection, also of messages that are incomplete."""
        return 0 if self.channel is None else self.channel.arrived

    def show_life(self) -> None:
        """Let the other end hear something."""
        if self.channel is not None:
            self.channel.send(Acknowledge(self.received))

    @property
    def settled(self) -> bool:
        """Whether all messages have arrived, or there is no connection."""
        return self.channel is None or not self._kept

    def _acknowledge(self, count: int) -> None:
        """Forget the kept messages among the first ``count`` ones, which have arrived."""
        if not 0 <= count - self._acknowledged <= len(self._kept):
            raise Violation(f"acknowledged {count} messages of {self._acknowledged + len(self._kept)}")
        while self._acknowledged < count:
            self._kept.popleft()
            self._acknowledged += 1

    def _take(self, message: M | Acknowledge) -> None:
        if isinstance(message, Acknowledge):
            self._acknowledge(message.count)
            return
        self.received += 1
        self._handle(message)
        if self.channel is not None:
            self.channel.send(Acknowledge(self.received))

    def _lose(self, error: str | None) -> None:
        self.channel = None
        self._gone(error)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def keep_alive(end: socket.socket, silent_s: float) -> None:
    """Make the system drop a connection after ``silent_s`` seconds without an answer."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        every = min(max(int(silent_s / 4), 1), _LONGEST_KEEP_ALIVE_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(1000 * silent_s), 2**31 - 1))


def parse_address(text: str, option: str = "address") -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 address is in brackets. Raises BadInput for anything else, naming
    ``option``."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or int(port) > 65_535 or (":" in host and not bracketed):
        raise BadInput(f"{option}: got {text!r}; accepted: HOST:PORT, e.g. 10.0.0.1:9000 or [::1]:9000")
    return host.strip("[]"), int(port)
