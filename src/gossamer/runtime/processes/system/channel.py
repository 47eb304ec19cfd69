"""Channels between the processes of one run: msgpack messages behind a length, over a Unix socket pair.

Both ends are ours; nodes talk to each other over TCP (transport.py), never here.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")
_READ = 1 << 16


def pack(*message: Any) -> bytes:
    """One message: what it is about, and what there is to say."""
    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Messages out of a stream of bytes, however it is cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """Take some bytes; gives the messages that are complete."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            messages.append(msgpack.unpackb(bytes(self._buffer[_LENGTH.size : end]), strict_map_key=False))
            del self._buffer[:end]
        return messages


class Channel:
    """One end, for code without an event loop: blocking writes, reads when something is there."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unpacker = Unpacker()
        self._read: list[list[Any]] = []

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, *message: Any) -> bool:
        """Write a message; False if the other end is gone."""
        try:
            self._socket.sendall(pack(*message))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def read(self) -> list[list[Any]] | None:
        """The messages that have come, after waiting for some bytes; None when the other end is gone."""
        try:
            data = self._socket.recv(_READ)
        except ConnectionResetError:
            data = b""
        return self._unpacker.feed(data) if data else None

    def receive(self) -> list[Any] | None:
        """Wait for one message; None when the other end is gone."""
        while not self._read:
            messages = self.read()
            if messages is None:
                return None
            self._read += messages
        return self._read.pop(0)

    def pending(self) -> list[list[Any]]:
        """Messages that came along with one that was received."""
        messages, self._read = self._read, []
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class PatientChannel(Channel):
    """One end, for who has others to care for: what the other end does not read, since its process was stopped, waits here,
    and nobody waits for that.

    Attributes:
        waiting: bytes that are to be written; whoever has them calls :meth:`flush` when the socket takes some again.
    """

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self.waiting = bytearray()

    def send(self, *message: Any) -> bool:
        """Write a message, as much of it as there is room for; False if the other end is gone."""
        self.waiting += pack(*message)
        return self.flush()

    def flush(self) -> bool:
        """Write what waits, as far as there is room; False if the other end is gone."""
        try:
            while self.waiting:
                del self.waiting[: self._socket.send(self.waiting, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return True
        except (BrokenPipeError, ConnectionResetError):
            self.waiting.clear()
            return False
        return True


class AsyncChannel:
    """One end, for a node's event loop.

    Args:
        end: the socket.
        handle: called with each message.
        gone: called when the other end is gone.
    """

    def __init__(
        self, end: socket.socket, handle: Callable[[list[Any]], None], gone: Callable[[], None]
    ) -> None:
        self._socket = end
        self._handle, self._gone = handle, gone
        self._unpacker = Unpacker()
        end.setblocking(True)
        asyncio.get_running_loop().add_reader(end, self._readable)

    def send(self, *message: Any) -> None:
        """Write a message. Messages are small and the other end always reads, so this hardly ever blocks."""
        try:
            self._socket.sendall(pack(*message))
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
