"""A conversation between the coordinator and a worker on another machine, which outlives its connections.

Messages are numbered by their order. Each end keeps what it has sent in a file until the other end has acknowledged it, and
sends it again on the next connection: so nothing is lost or arrives twice, and what waits while the other end is out of
reach costs no memory. A :class:`Stream` is one connection, with TLS.
"""

from __future__ import annotations

import socket
import ssl
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from gossamer.messages import FrameError
from gossamer.runtime.processes.channel import ChannelError, Unpacker, pack
from gossamer.runtime.processes.protocol import Acknowledge, Message
from gossamer.runtime.processes.security.trust import Tls

LARGEST = 64 << 20
"""Bytes of a message from another machine; files and models travel in parts (``protocol.Part``)."""
LARGEST_STRANGER = 4096
"""The same of one that has not proved that it knows the token."""
_READ = 1 << 16
_WAITING = 1 << 18
"""Bytes that are handed to a connection and not taken by the system, beyond which the next message stays in its file."""

M = TypeVar("M")


class Stream:
    """One connection under TLS, without blocking.

    Args:
        end: a connected socket.
        context: of TLS.
        server_side: whether the other end dialled.
        silent_s: seconds without an answer after which the system gives the connection up.
    """

    def __init__(
        self, end: socket.socket, context: ssl.SSLContext, *, server_side: bool, silent_s: float
    ) -> None:
        self._socket = end
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform.startswith("linux"):
            every = max(int(silent_s / 4), 1)
            for option, value in [
                (socket.TCP_KEEPIDLE, every),
                (socket.TCP_KEEPINTVL, every),
                (socket.TCP_KEEPCNT, 3),
                (socket.TCP_USER_TIMEOUT, int(1000 * silent_s)),
            ]:
                end.setsockopt(socket.IPPROTO_TCP, option, value)
        self._tls = Tls(context, server_side=server_side)
        self._opened = memoryview(bytearray(_READ))
        self.waiting = bytearray()
        """Bytes that the system has not taken."""
        if not server_side:
            self.waiting += self._tls.begin()

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def secure(self) -> bool:
        """Whether the handshake of TLS is done."""
        return self._tls.secure

    @property
    def certificate(self) -> bytes | None:
        """The other end's certificate (DER)."""
        return self._tls.certificate

    @property
    def host(self) -> str:
        """The other end's address."""
        return str(self._socket.getpeername()[0])

    @property
    def own_host(self) -> str:
        """This end's address."""
        return str(self._socket.getsockname()[0])

    def write(self, data: bytes) -> None:
        """Write, as far as there is room; the rest waits for :meth:`flush`."""
        self.waiting += self._tls.seal(data)
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        try:
            while self.waiting:
                del self.waiting[: self._socket.send(self.waiting)]
        except BlockingIOError:
            return
        except OSError:
            self.waiting.clear()  # whoever reads learns that the connection is gone

    def read(self) -> bytes | None:
        """What has come; None when the connection is gone, or the other end breaks TLS."""
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return b""
        except OSError:
            return None
        if not data:
            return None
        try:
            came = b"".join(bytes(piece) for piece in self._tls.open(data, self._opened))
        except FrameError:
            return None
        self.waiting += self._tls.due()
        self.flush()
        return came

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Outbox:
    """Messages in a file, from the oldest that is not acknowledged on.

    Args:
        path: of the file; there is nothing of worth in it when the run is over.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._lengths: deque[int] = deque()
        self._first = 0  # the number of the oldest
        self._sent = 0  # how many of those kept were taken
        self._start = self._position = 0  # in the file: of the oldest, and of the next to take

    def append(self, frame: bytes) -> None:
        """Keep a message."""
        self._file.seek(0, 2)
        self._file.write(frame)
        self._lengths.append(len(frame))

    def take(self) -> bytes | None:
        """The next message to send; None where there is none."""
        if self._sent == len(self._lengths):
            return None
        self._file.seek(self._position)
        frame = self._file.read(self._lengths[self._sent])
        self._position += len(frame)
        self._sent += 1
        return frame

    def acknowledge(self, count: int) -> None:
        """The first so many messages of all have arrived.

        Raises:
            ChannelError: for more than were sent.
        """
        if not self._first <= count <= self._first + self._sent:
            raise ChannelError(f"acknowledged {count} messages of {self._first + self._sent}")
        while self._first < count:
            self._start += self._lengths.popleft()
            self._first += 1
            self._sent -= 1
        if not self._lengths:
            self._file.truncate(0)
            self._start = self._position = 0

    def rewind(self, count: int) -> None:
        """The first so many messages have arrived; all after them are sent again.

        Raises:
            ChannelError: for fewer than were acknowledged, or more than were sent.
        """
        self.acknowledge(count)
        self._sent, self._position = 0, self._start

    @property
    def empty(self) -> bool:
        """Whether all has been acknowledged."""
        return not self._lengths

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Session(Generic[M]):
    """One end of the conversation.

    Args:
        kinds: the union of the messages that may come.
        path: where messages wait.

    Attributes:
        stream: the connection; None while there is none.
        received: messages that have come.
    """

    def __init__(self, kinds: Any, path: Path) -> None:
        self._kinds = kinds
        self._outbox = Outbox(path)
        self._unpacker: Unpacker[M | Acknowledge] = Unpacker(kinds, LARGEST)
        self.stream: Stream | None = None
        self.received = 0

    def attach(self, stream: Stream, received: int, came: bytes = b"") -> list[M]:
        """Go on with a new connection.

        Args:
            stream: the connection.
            received: how many messages have arrived at the other end, as it says.
            came: what has come already.

        Returns:
            The messages in that.

        Raises:
            ChannelError: for a number that can't be.
        """
        self._outbox.rewind(received)
        self.detach()
        self.stream = stream
        self._unpacker = Unpacker(self._kinds, LARGEST)
        self.flush()
        return self._took(came)

    def detach(self) -> None:
        """The connection is gone."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def send(self, message: Message) -> None:
        """Send a message, now or as soon as the other end can be reached."""
        self._outbox.append(pack(message))
        self.flush()

    def send_all(self, messages: Sequence[Message]) -> None:
        """Send some messages."""
        for message in messages:
            self.send(message)

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        if (stream := self.stream) is None:
            return
        stream.flush()
        while len(stream.waiting) < _WAITING and (frame := self._outbox.take()) is not None:
            stream.write(frame)

    @property
    def behind(self) -> bool:
        """Whether something waits for room in the connection."""
        return self.stream is not None and bool(self.stream.waiting)

    @property
    def settled(self) -> bool:
        """Whether all has arrived."""
        return self._outbox.empty

    def read(self) -> list[M] | None:
        """The messages that have come; None when the connection is gone.

        Raises:
            ChannelError: for what the other end would not say.
        """
        data = None if self.stream is None else self.stream.read()
        return None if data is None else self._took(data)

    def _took(self, data: bytes) -> list[M]:
        messages: list[M] = []
        for message in self._unpacker.feed(data):
            if isinstance(message, Acknowledge):
                self._outbox.acknowledge(message.count)
            else:
                messages.append(message)
        if messages and self.stream is not None:
            self.received += len(messages)
            self.stream.write(pack(Acknowledge(self.received)))
        self.flush()
        return messages

    def close(self) -> None:
        """End it."""
        self.detach()
        self._outbox.close()
