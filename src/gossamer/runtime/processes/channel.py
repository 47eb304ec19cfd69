"""Channels between the processes of one run: typed messages (``protocol``) in msgpack, each behind its length.

The length is checked before anything of a message is kept or decoded, and a message that does not have the fields and types
of its class is refused. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import socket
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

M = TypeVar("M")


class ChannelError(Exception):
    """The other end said something that no process of this version says."""


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

    @property
    def rest(self) -> bytes:
        """What has come, and was not given yet."""
        return bytes(self._buffer)

    def feed(self, data: bytes | memoryview, most: int | None = None) -> list[M]:
        """Take some bytes; gives the messages that are complete, or the first so many of them.

        Raises:
            ChannelError: for a message that is too long, or none of those that may come.
        """
        self._buffer += data
        messages: list[M] = []
        start = 0
        while len(self._buffer) >= start + _LENGTH.size and (most is None or len(messages) < most):
            [length] = _LENGTH.unpack_from(self._buffer, start)
            if length > self._largest:
                raise ChannelError(f"a message of {length} bytes; accepted: {self._largest}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                messages.append(self._decoded(view[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages

    def _decoded(self, body: memoryview) -> M:
        try:
            message: M = self._decode(body)
        except msgspec.MsgspecError as error:
            raise ChannelError(f"a message that can't be read: {error}") from None
        finally:
            body.release()
        return message


class Channel(Generic[M]):
    """One end of a socket pair, for code without an event loop: blocking writes, reads when something is there.

    Args:
        end: the socket.
        kinds: the union of the messages that may come.
    """

    def __init__(self, end: socket.socket, kinds: Any) -> None:
        self._socket = end
        self._unpacker: Unpacker[M] = Unpacker(kinds)
        self._read: list[M] = []

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

    def read(self) -> list[M] | None:
        """The messages that have come, after waiting for some bytes; None when the other end is gone."""
        try:
            data = self._socket.recv(_READ)
        except ConnectionResetError:
            data = b""
        return self._unpacker.feed(data) if data else None

    def receive(self) -> M | None:
        """Wait for one message; None when the other end is gone."""
        while not self._read:
            messages = self.read()
            if messages is None:
                return None
            self._read += messages
        return self._read.pop(0)

    def pending(self) -> list[M]:
        """Messages that came along with one that was received."""
        messages, self._read = self._read, []
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class PatientChannel(Channel[M]):
    """One end, for a process that must not block: a stopped process does not read, and its messages wait here.

    Attributes:
        waiting: bytes to be written; call :meth:`flush` when the socket is writable again.
    """

    def __init__(self, end: socket.socket, kinds: Any) -> None:
        super().__init__(end, kinds)
        self.waiting = bytearray()

    def send(self, message: Message) -> bool:
        """Write as much as there is room for; False if the other end is gone."""
        self.waiting += pack(message)
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
