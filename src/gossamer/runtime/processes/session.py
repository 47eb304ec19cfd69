"""A conversation between the coordinator and a worker on another machine, which outlives its connections.

Messages are numbered by their order. Each end keeps what it has sent in a file until the other end has acknowledged it, and
sends it again on the next connection. So nothing is lost or arrives twice, and messages that wait while the other end is out
of reach take no memory.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from gossamer.errors import BadInput
from gossamer.runtime.processes.channel import ChannelError, SelectorChannel, pack
from gossamer.runtime.processes.protocol import Acknowledge, Message

LARGEST = (1 << 32) - 1
"""Bytes of a message from the other end: a file, or a model. It takes memory as it arrives."""
LARGEST_STRANGER = 4096
"""Bytes of a message from an end that has not proved that it knows the token."""

M = TypeVar("M")


def keep_alive(end: socket.socket, silent_s: float) -> None:
    """Have the system give a connection up after ``silent_s`` seconds without an answer."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        every = max(int(silent_s / 4), 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_s))


def parse_address(text: str, option: str = "address") -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 address stands in brackets. ``option`` is what has the text, for messages.

    Raises:
        BadInput: for anything else.
    """
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or int(port) > 65_535 or (":" in host and not bracketed):
        raise BadInput(f"{option}: got {text!r}; accepted: HOST:PORT, e.g. 10.0.0.1:9000 or [::1]:9000")
    return host.strip("[]"), int(port)


class Outbox:
    """Messages in a file without a name, from the oldest that is not acknowledged on.

    Args:
        folder: the file system that holds the file.
    """

    def __init__(self, folder: Path) -> None:
        descriptor, path = tempfile.mkstemp(dir=folder)
        self._file = os.fdopen(descriptor, "w+b")
        Path(path).unlink()
        self._lengths: deque[int] = deque()
        self._first = 0  # the number of the oldest
        self._sent = 0  # how many of those in the file were taken
        self._start = self._position = 0  # in the file: of the oldest, and of the next one to take

    def append(self, frame: bytes) -> None:
        """Keep a message."""
        self._file.seek(0, 2)
        self._file.write(frame)
        self._lengths.append(len(frame))

    def take(self) -> bytes:
        """The next message to send; empty where there is none."""
        if self._sent == len(self._lengths):
            return b""
        self._file.seek(self._position)
        frame = self._file.read(self._lengths[self._sent])
        self._position += len(frame)
        self._sent += 1
        return frame

    def acknowledge(self, count: int) -> None:
        """Forget the first ``count`` messages of the conversation, which have arrived.

        Raises:
            ChannelError: if more or fewer than these were sent.
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
        """The first ``count`` messages have arrived; all after them are sent again. Raises as :meth:`acknowledge` does."""
        self.acknowledge(count)
        self._sent, self._position = 0, self._start

    @property
    def empty(self) -> bool:
        """Whether everything has been acknowledged."""
        return not self._lengths

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Session(Generic[M]):
    """One end of the conversation.

    Args:
        kinds: the union of the messages that may come.
        folder: where messages wait.
        selector: where its connections are registered.
        handle: called with each message.
        gone: called when a connection is gone, or has brought an invalid message; with what is wrong with that, or None.

    Attributes:
        channel: the connection; None while there is none.
        received: messages that have come.
    """

    def __init__(
        self,
        kinds: Any,
        folder: Path,
        selector: selectors.BaseSelector,
        handle: Callable[[M], object],
        gone: Callable[[str | None], object],
    ) -> None:
        self._kinds, self._selector, self._handle, self._gone = kinds, selector, handle, gone
        self._outbox = Outbox(folder)
        self.channel: SelectorChannel[M | Acknowledge] | None = None
        self.received = 0

    def attach(self, end: socket.socket, received: int, *first: Message) -> None:
        """Go on with a new connection.

        Args:
            end: the connection.
            received: how many messages have arrived at the other end, as it says.
            first: unnumbered messages, to be sent before all others.

        Raises:
            ChannelError: for a number that can't be.
        """
        self._outbox.rewind(received)
        self._detach()
        self.channel = SelectorChannel(
            end, self._kinds, self._selector, self._take, self._lose, largest=LARGEST, more=self._outbox.take
        )
        for message in first:
            self.channel.send(message)
        self.channel.flush()
        self.channel.read()  # which may have been decrypted with what came before

    def send(self, message: Message) -> None:
        """Send a message, now or as soon as the other end can be reached."""
        self._outbox.append(pack(message))
        if self.channel is not None:
            self.channel.flush()

    @property
    def settled(self) -> bool:
        """Whether everything has arrived, or there is no connection."""
        return self.channel is None or self._outbox.empty

    def _take(self, messages: list[M | Acknowledge]) -> None:
        before = self.received
        for message in messages:
            if isinstance(message, Acknowledge):
                self._outbox.acknowledge(message.count)
            else:
                self.received += 1
                self._handle(message)
        if self.received > before and self.channel is not None:
            self.channel.send(Acknowledge(self.received))

    def _lose(self, why: str | None) -> None:
        self.channel = None
        self._gone(why)

    def _detach(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def close(self) -> None:
        """End it."""
        self._detach()
        self._outbox.close()
