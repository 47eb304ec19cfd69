"""A reader of frames (wire.py) that trusts nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gossamer.messages import CHUNK_BYTES, BufferSpec, FrameError, decode, describe, raw, unpack_head
from gossamer.runtime.processes.transport.wire import (
    HEADERS,
    HELLO,
    MAGIC,
    NUMBERS,
    STATUS_BYTES,
    VERSION,
    Aborted,
    Arrived,
    Beat,
    Credited,
    Event,
    Hello,
    Kind,
    Left,
    Marked,
)


class _Message:
    """A message under way: memory for its head, then, when the head is there, exactly for its buffers."""

    def __init__(self, total: int, head: int) -> None:
        self.left = total
        self._head = bytearray(head)
        self._body = total - head
        self._targets = deque([memoryview(self._head)])
        self._buffers: list[Tensor] | None = None
        self._tag: tuple[str | int, ...] = ()
        self._sent_at = 0.0
        self._structure = b""

    def fill(self, data: memoryview) -> None:
        """Take bytes, not more than are left of the message."""
        self.left -= data.nbytes
        while data:
            target = self._targets.popleft()
            count = min(target.nbytes, data.nbytes)
            target[:count] = data[:count]
            data = data[count:]
            if count < target.nbytes:
                self._targets.appendleft(target[count:])
            elif self._buffers is None:
                self._open()

    def _open(self) -> None:
        self._tag, self._sent_at, self._structure = unpack_head(bytes(self._head))
        self._head = bytearray()  # it may hold megabytes, if the payload has bytes objects
        specs = describe(self._structure)
        due = sum(spec.nbytes for spec in specs)
        if due != self._body:
            raise FrameError(f"{self._body} bytes after the head, but its tensors take {due}")
        self._buffers = [_allocate(spec) for spec in specs]
        self._targets.extend(raw(buffer) for buffer in self._buffers if buffer.nbytes)

    def arrived(self) -> Arrived:
        """The whole message, once nothing is left."""
        return Arrived(self._tag, self._sent_at, decode(self._structure, self._buffers or ()))


def _allocate(spec: BufferSpec) -> Tensor:
    # On the CPU torch aligns to 64 bytes, as the simulator aligns its rows: both engines then round alike.
    return torch.empty(spec.shape, dtype=spec.dtype)


class Decoder:
    """Reads one direction of a connection, in whatever pieces it comes.

    Holds at most one message, of at most ``limit`` bytes, and one status (and the Python objects that its structure is made
    of, whose number :mod:`gossamer.messages` limits); nothing is allocated before its size was checked. After
    an error the decoder is of no more use.

    Args:
        limit: bytes (head and buffers) of the largest message that is accepted; None on the side that
            dialled, where only credit comes in.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._accepted = (
            Kind.BEAT,
            Kind.LEAVE,
            *((Kind.CREDIT,) if limit is None else (Kind.BEGIN, Kind.DATA, Kind.ABORT, Kind.MARK)),
        )
        self._header = bytearray()
        self._greeted = False
        self._number = -1
        self._message: _Message | None = None
        self._chunk_left = 0
        self._status: bytearray | None = None
        self._status_left = 0
        self.frame_bytes = 0
        """Bytes taken so far of chunks, headers included, and of aborts."""
        self.chunk_bytes = 0
        """Bytes taken so far of chunks, headers apart: what credit counts."""

    @property
    def expected(self) -> int:
        """The number of the message that is to come next, or must come again if the stream ends here."""
        return (self._number + (self._message is None)) % NUMBERS

    def expect(self, number: int) -> None:
        """Messages go on with this number, as the peer was told before it sent one."""
        self._number = number - 1

    @property
    def idle(self) -> bool:
        """Whether the stream may end here: between two frames, with no message under way."""
        return not self._header and self._message is None and self._status is None

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Event]:
        """Take bytes and give what they complete; iterate it to its end, for bytes are taken on the way.

        (An iterator and not a list: what was complete before an error is given, however the stream was cut.)

        Raises:
            FrameError: for anything that a peer would not have sent.
        """
        view = memoryview(data)
        while view:
            if self._chunk_left:
                view, event = self._take_chunk(view)
            elif self._status is not None:
                view, event = self._take_status(view, self._status)
            else:
                view, event = self._take_header(view)
            if event is not None:
                yield event

    def _take_chunk(self, view: memoryview) -> tuple[memoryview, Event | None]:
        message = self._message
        assert message is not None
        count = min(self._chunk_left, view.nbytes)
        self._chunk_left -= count
        self.frame_bytes += count
        self.chunk_bytes += count
        try:
            message.fill(view[:count])
            if message.left:
                return view[count:], None
            self._message = None
            return view[count:], message.arrived()
        except FrameError as error:
            raise FrameError(f"sent a bad message: {error}") from None

    def _take_status(self, view: memoryview, status: bytearray) -> tuple[memoryview, Event | None]:
        count = min(self._status_left, view.nbytes)
        status += view[:count]
        self._status_left -= count
        if self._status_left:
            return view[count:], None
        self._status = None
        return view[count:], Beat(bytes(status))

    def _take_header(self, view: memoryview) -> tuple[memoryview, Event | None]:
        if self._greeted:
            kind = self._header[0] if self._header else view[0]
            if kind not in self._accepted:
                raise FrameError(f"sent a frame of type {kind}, which has no place here")
            layout = HEADERS[kind]
            if not self._header and view.nbytes >= layout.size:  # as nearly all are: whole
                return view[layout.size :], self._frame(layout.unpack_from(view))
        else:
            layout = HELLO
        count = min(layout.size - len(self._header), view.nbytes)
        self._header += view[:count]
        if not self._greeted and not MAGIC.startswith(self._header[: len(MAGIC)]):
            raise FrameError("does not speak gossamer's protocol")
        if len(self._header) < layout.size:
            return view[count:], None
        fields = layout.unpack(self._header)
        self._header.clear()
        return view[count:], self._frame(fields) if self._greeted else self._hello(fields)

    def _hello(self, fields: tuple[Any, ...]) -> Hello:
        _, version, *said = fields
        if version != VERSION:
            raise FrameError(f"speaks version {version} of the protocol; accepted: {VERSION}")
        self._greeted = True
        return Hello(*said)

    def _frame(self, fields: tuple[int, ...]) -> Event | None:
        kind, *values = fields
        if kind > Kind.ABORT:
            return self._say(kind, values)
        self.frame_bytes += HEADERS[kind].size
        if kind == Kind.BEGIN:
            number, length, total, head = values
            self._begin(number, total, head)
        else:
            number = values[0]
            if self._message is None or number != self._number:
                raise FrameError(f"went on with message {number}, which is not under way")
            if kind == Kind.ABORT:
                self._message = None
                return Aborted(number)
            length = values[1]
        assert self._message is not None
        due = min(CHUNK_BYTES, self._message.left)
        if length != due:
            raise FrameError(f"sent a chunk of {length} bytes where {due} were due")
        self._chunk_left = length
        return None

    def _say(self, kind: int, values: list[int]) -> Event | None:
        """A frame that is no part of a message."""
        if kind == Kind.CREDIT:
            return Credited(values[0])
        if kind == Kind.LEAVE:
            return Left()
        if kind == Kind.MARK:
            return Marked(*values)
        return self._begin_status(values[0])

    def _begin_status(self, length: int) -> Beat | None:
        if length > STATUS_BYTES:
            raise FrameError(f"announced a status of {length} bytes, limit {STATUS_BYTES}")
        if length == 0:
            return Beat(b"")
        self._status, self._status_left = bytearray(), length
        return None

    def _begin(self, number: int, total: int, head: int) -> None:
        if self._message is not None:
            raise FrameError(f"began message {number} before the end of message {self._number}")
        if number != (self._number + 1) % NUMBERS:
            raise FrameError(f"began message {number} after message {self._number}")
        if self._limit is None or total > self._limit:
            raise FrameError(f"announced {total} bytes, limit {self._limit}")
        if not 0 < head <= total:
            raise FrameError(f"announced a head of {head} bytes in a message of {total}")
        self._number = number
        self._message = _Message(total, head)
