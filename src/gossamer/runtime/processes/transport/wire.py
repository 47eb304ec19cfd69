"""Frames on a byte stream, without sockets: functions such as :func:`chunks` write, :class:`Decoder` reads
them.

::

    HELLO   magic (4 bytes), version u16, rank u32, run token (16 bytes),   first on a connection, both ways
            incarnation u32, connection u32, expected u32
    BEGIN   1, message u32, length u16, total u64, head u32, length bytes   a message's first chunk
    DATA    2, message u32, length u16, length bytes                        each later chunk
    ABORT   3, message u32                                                  the message is cancelled
    CREDIT  4, bytes u32                                                    this many more may be sent
    BEAT    5                                                               still alive
    LEAVE   6                                                               closes its connections for good

All numbers are little-endian. A message is its head and its buffers (:mod:`gossamer.messages`), split every
:data:`~gossamer.messages.CHUNK_BYTES`; only its last chunk is shorter. Credit counts the bytes in chunks
without headers.

The incarnation is the number of earlier starts of a node. Its connections to one peer are numbered from 1 in
each incarnation, so that a replayed one is refused; an answer repeats the number. Messages between two nodes
are numbered from 0 in each incarnation of either, over all their connections; the answer to a HELLO has the
number of the expected one, with which the sender continues. The number of a cancelled message goes to the
next message. Messages go from the side that dialled to the other; only HELLO, CREDIT, BEAT and LEAVE go back.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.messages import CHUNK_BYTES, BufferSpec, FrameError, decode, describe, raw, unpack_head
from gossamer.messages.tags import Payload

MAGIC = b"gsmr"
VERSION = 5
TOKEN_BYTES = 16


class Kind(enum.IntEnum):
    """The first byte of a frame after the greeting."""

    BEGIN = 1
    DATA = 2
    ABORT = 3
    CREDIT = 4
    BEAT = 5
    LEAVE = 6


HELLO = struct.Struct("<4sHI16sIII")
BEGIN = struct.Struct("<BIHQI")
DATA = struct.Struct("<BIH")
_NUMBER = struct.Struct("<BI")
_BARE = struct.Struct("<B")
_HEADERS: dict[int, struct.Struct] = {
    Kind.BEGIN: BEGIN,
    Kind.DATA: DATA,
    Kind.ABORT: _NUMBER,
    Kind.CREDIT: _NUMBER,
    Kind.BEAT: _BARE,
    Kind.LEAVE: _BARE,
}
BEAT = _BARE.pack(Kind.BEAT)
LEAVE = _BARE.pack(Kind.LEAVE)


# --- writing


def hello(rank: int, token: bytes, incarnation: int = 0, connection: int = 1, expected: int = 0) -> bytes:
    """The frame that opens a connection, or answers with the caller's ``connection`` and the ``expected``
    number."""
    return HELLO.pack(MAGIC, VERSION, rank, token, incarnation, connection, expected)


def abort(message: int) -> bytes:
    """The frame that cancels the current message."""
    return _NUMBER.pack(Kind.ABORT, message)


def credit(nbytes: int) -> bytes:
    """The frame that acknowledges bytes of chunks."""
    return _NUMBER.pack(Kind.CREDIT, nbytes)


class Chunk(NamedTuple):
    """One chunk with its header, and the number of its bytes without the header, which credit counts."""

    frame: bytes
    nbytes: int


def chunks(message: int, head: bytes, buffers: Sequence[Tensor]) -> Iterator[Chunk]:
    """The chunks of message number ``message``: its head (:func:`gossamer.messages.pack_head`) and contiguous
    CPU tensors. A buffer's bytes are read when its chunk is requested."""
    sources = deque([memoryview(head), *(raw(buffer) for buffer in buffers)])
    left = total = sum(source.nbytes for source in sources)
    while left:
        due = length = min(CHUNK_BYTES, left)
        if left == total:
            header = BEGIN.pack(Kind.BEGIN, message, length, total, len(head))
        else:
            header = DATA.pack(Kind.DATA, message, length)
        pieces: list[bytes | memoryview] = [header]
        while due:
            source = sources.popleft()
            pieces.append(source[:due])
            if source.nbytes > due:
                sources.appendleft(source[due:])
            due -= min(due, source.nbytes)
        left -= length
        yield Chunk(b"".join(pieces), length)


# --- reading


class Hello(NamedTuple):
    """The greeting of the other end."""

    rank: int
    token: bytes
    incarnation: int
    connection: int
    expected: int


@dataclass(frozen=True, eq=False)
class Arrived:
    """A message is complete; ``sent_at`` is the sender's clock in seconds."""

    tag: tuple[str | int, ...]
    sent_at: float
    payload: Payload
    values: int  # those in the tag and in the containers of the payload


class Credited(NamedTuple):
    """The receiver has taken this many bytes of chunks."""

    nbytes: int


Event = Hello | Arrived | Credited | Kind
"""An event of the decoder. Of the kinds, only ABORT, BEAT and LEAVE are events."""


class _Message:
    """An incomplete message: memory for its head, and then for the buffers that the head describes."""

    def __init__(self, total: int, head: int) -> None:
        self.left = total
        self._head, self._body = bytearray(head), total - head
        self._targets = deque([memoryview(self._head)])
        self._buffers: list[Tensor] | None = None

    def fill(self, data: memoryview) -> None:
        self.left -= data.nbytes
        while data:
            target = self._targets.popleft()
            count = min(target.nbytes, data.nbytes)
            target[:count] = data[:count]
            data = data[count:]
            if count < target.nbytes:
                self._targets.appendleft(target[count:])
            elif self._buffers is None:
                self._read_head()

    def _read_head(self) -> None:
        self._tag, self._sent_at, self._structure = unpack_head(bytes(self._head))
        self._head = bytearray()  # it may hold megabytes, if the payload has bytes objects
        specs, self._values = describe(self._structure)
        due = sum(spec.nbytes for spec in specs)
        if due != self._body:
            raise FrameError(f"{self._body} bytes after the head, but its tensors take {due}")
        self._buffers = [_allocate(spec) for spec in specs]
        self._targets.extend(raw(buffer) for buffer in self._buffers if buffer.nbytes)

    def arrived(self) -> Arrived:
        payload = decode(self._structure, self._buffers or ())
        return Arrived(self._tag, self._sent_at, payload, self._values + len(self._tag))


def _allocate(spec: BufferSpec) -> Tensor:
    # torch aligns CPU tensors to 64 bytes, as the simulator aligns its rows, so both engines round alike.
    return torch.empty(spec.shape, dtype=spec.dtype)


class Decoder:
    """Reads one direction of a connection, in pieces of any size, and trusts nothing.

    It holds at most one message of at most ``limit`` bytes (None: only credit comes in) and the Python
    objects in its structure, whose number :mod:`gossamer.messages` limits. It checks sizes before it
    allocates, and must not be used after an error."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit or 0
        frames = (Kind.CREDIT,) if limit is None else (Kind.BEGIN, Kind.DATA, Kind.ABORT)
        self._accepted = (Kind.BEAT, Kind.LEAVE, *frames)
        self._header = bytearray()
        self._greeted = False
        self._message: _Message | None = None
        self._chunk_left = 0
        self.expected = 0
        """The number of the next message, or of the one to be repeated if the stream ends here."""
        self.frame_bytes = 0
        """Bytes of chunks, headers included, and of aborts so far."""
        self.chunk_bytes = 0
        """Bytes of chunks without headers so far, which credit counts."""

    @property
    def idle(self) -> bool:
        """Whether the stream may end here: between two frames, without an incomplete message."""
        return not self._header and self._message is None

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Event]:
        """Take bytes, and yield the events that they complete, including those before an error. Must be iterated to
        the end.

        Raises:
            FrameError: for anything that a correct peer does not send.
        """
        view = memoryview(data)
        while view:
            if self._chunk_left:
                count = min(self._chunk_left, view.nbytes)
                event = self._take_chunk(view[:count])
            else:
                layout = self._layout(view[0])
                count = min(layout.size - len(self._header), view.nbytes)
                event = self._take_header(view[:count], layout)
            view = view[count:]
            if event is not None:
                yield event

    def _take_chunk(self, data: memoryview) -> Event | None:
        message = self._message
        assert message is not None
        self._chunk_left -= data.nbytes
        self.frame_bytes += data.nbytes
        self.chunk_bytes += data.nbytes
        try:
            message.fill(data)
            if message.left:
                return None
            self._message = None
            self.expected += 1
            return message.arrived()
        except FrameError as error:
            raise FrameError(f"sent a bad message: {error}") from None

    def _layout(self, first: int) -> struct.Struct:
        if not self._greeted:
            return HELLO
        kind = self._header[0] if self._header else first
        if kind not in self._accepted:
            raise FrameError(f"sent an unexpected frame of type {kind}")
        return _HEADERS[kind]

    def _take_header(self, data: memoryview, layout: struct.Struct) -> Event | None:
        self._header += data
        if not self._greeted and not MAGIC.startswith(self._header[: len(MAGIC)]):
            raise FrameError("does not speak gossamer's protocol")
        if len(self._header) < layout.size:
            return None
        fields = layout.unpack(self._header)
        self._header.clear()
        return self._frame(*fields) if self._greeted else self._greet(*fields)

    def _greet(self, _: bytes, version: int, *fields: Any) -> Hello:
        if version != VERSION:
            raise FrameError(f"speaks version {version} of the protocol; accepted: {VERSION}")
        self._greeted = True
        return Hello(*fields)

    def _frame(self, kind: int, *values: int) -> Event | None:
        if kind == Kind.CREDIT:
            return Credited(*values)
        if kind in (Kind.BEAT, Kind.LEAVE):
            return Kind(kind)
        self.frame_bytes += _HEADERS[kind].size
        if kind == Kind.BEGIN:
            self._begin(values[0], *values[2:])
        elif self._message is None or values[0] != self.expected:
            raise FrameError(f"continued message {values[0]}, which is not in progress")
        if kind == Kind.ABORT:
            self._message = None
            return Kind.ABORT
        assert self._message is not None
        length, due = values[1], min(CHUNK_BYTES, self._message.left)
        if length != due:
            raise FrameError(f"sent a chunk of {length} bytes where {due} were due")
        self._chunk_left = length
        return None

    def _begin(self, number: int, total: int, head: int) -> None:
        if self._message is not None:
            raise FrameError(f"began message {number} before the end of message {self.expected}")
        if number != self.expected:
            raise FrameError(f"began message {number} where message {self.expected} was due")
        if total > self._limit:
            raise FrameError(f"announced {total} bytes, limit {self._limit}")
        if not 0 < head <= total:
            raise FrameError(f"announced a head of {head} bytes in a message of {total}")
        self._message = _Message(total, head)
