"""Frames on a byte stream, without any socket: what is written, and what a reader (decoder.py) makes of it.

::

    HELLO   magic (4 bytes), version u16, rank u32, run token (16 bytes),   first on a connection, both ways
            incarnation u32, connection u32, expected u32
    BEGIN   1, message u32, length u16, total u64, head u32, length bytes   a message's first chunk
    DATA    2, message u32, length u16, length bytes                        each later chunk
    ABORT   3, message u32                                                  the message won't be completed
    CREDIT  4, bytes u32                                                    so much more may be sent
    BEAT    5, length u16, length bytes (a status)                          still alive
    LEAVE   6                                                               won't come back in this life
    MARK    7, cut u32, message u32                                         sent before a checkpoint: what is before that

All numbers are little-endian. A message is its head and its buffers (:mod:`gossamer.messages`), one after the
other, cut every :data:`~gossamer.messages.CHUNK_BYTES`; only its last chunk is shorter. Credit counts the bytes in
chunks, headers apart.

The incarnation says how often a node was started before; the connection, which one of that life this is to that peer, from 1
on; its answer repeats the number. Messages between two nodes are numbered from 0 in each life of either, over all their
connections, and come one after the other; the answer says which one is expected, and there the messages go on.

Messages go from the side that dialled to the side that was dialled; only HELLO, CREDIT, BEAT and LEAVE go back.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gossamer.messages import BEGIN_BYTES, CHUNK_BYTES, DATA_BYTES, raw
from gossamer.messages.tags import Payload

MAGIC = b"gsmr"
VERSION = 2
TOKEN_BYTES = 16

HELLO = struct.Struct("<4sHI16sIII")
BEGIN = struct.Struct("<BIHQI")
DATA = struct.Struct("<BIH")
ABORT = struct.Struct("<BI")
CREDIT = struct.Struct("<BI")
BEAT = struct.Struct("<BH")
LEAVE = struct.Struct("<B")
MARK = struct.Struct("<BII")
NUMBERS = 2**32
"""Message numbers go up to here, and then begin again."""
STATUS_BYTES = 4096
"""Bytes of the largest status in a heartbeat."""

assert (BEGIN.size, DATA.size) == (BEGIN_BYTES, DATA_BYTES)  # what payload.wire_bytes charges


class Kind(enum.IntEnum):
    """The first byte of a frame, after the greeting."""

    BEGIN = 1
    DATA = 2
    ABORT = 3
    CREDIT = 4
    BEAT = 5
    LEAVE = 6
    MARK = 7


HEADERS: Mapping[int, struct.Struct] = {
    Kind.BEGIN: BEGIN,
    Kind.DATA: DATA,
    Kind.ABORT: ABORT,
    Kind.CREDIT: CREDIT,
    Kind.BEAT: BEAT,
    Kind.LEAVE: LEAVE,
    Kind.MARK: MARK,
}
"""How each kind of frame begins."""


class Hello(NamedTuple):
    """Who is at the other end."""

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


class Aborted(NamedTuple):
    """The message under way was taken back."""

    message: int


class Credited(NamedTuple):
    """So many bytes of chunks were taken by the receiver."""

    nbytes: int


class Beat(NamedTuple):
    """The peer is alive, and says how it is."""

    status: bytes


class Left(NamedTuple):
    """The peer won't come back in this life."""


class Marked(NamedTuple):
    """The peer has made a cut for a checkpoint: it had sent the messages before this number until then."""

    cut: int
    message: int


Event = Hello | Arrived | Aborted | Credited | Beat | Left | Marked


def hello(rank: int, token: bytes, incarnation: int = 0, connection: int = 1, expected: int = 0) -> bytes:
    """The frame that opens a connection.

    Args:
        rank: who says it.
        token: the run's, 16 bytes.
        incarnation: how often that node was started before.
        connection: which one of that life this is to that peer, from 1 on; in an answer, what was asked with.
        expected: in an answer, the number of the message that is to come next.
    """
    return HELLO.pack(MAGIC, VERSION, rank, token, incarnation, connection, expected % NUMBERS)


def abort(message: int) -> bytes:
    """The frame that takes back the message under way."""
    return ABORT.pack(Kind.ABORT, message % NUMBERS)


def credit(nbytes: int) -> bytes:
    """The frame that acknowledges bytes of chunks."""
    return CREDIT.pack(Kind.CREDIT, nbytes)


def beat(status: bytes = b"") -> bytes:
    """The frame that says that a node is alive, and how it is.

    Raises:
        ValueError: for a status of more than 4 KiB.
    """
    if len(status) > STATUS_BYTES:
        raise ValueError(f"a status of {len(status)} bytes; accepted: at most {STATUS_BYTES}")
    return BEAT.pack(Kind.BEAT, len(status)) + status


def leave() -> bytes:
    """The frame that says that a node closes its connections for good."""
    return LEAVE.pack(Kind.LEAVE)


def mark(cut: int, message: int) -> bytes:
    """The frame that says which messages were sent before a cut: those before this one."""
    return MARK.pack(Kind.MARK, cut % NUMBERS, message % NUMBERS)


class Chunk(NamedTuple):
    """One chunk, header and all, and how many of its bytes are the message's (what credit counts)."""

    frame: bytes
    nbytes: int


def chunks(message: int, head: bytes, buffers: Sequence[Tensor]) -> Iterator[Chunk]:
    """A message cut into chunks; a buffer's bytes are read when its chunk is asked for.

    Args:
        message: how many messages were begun on this connection before.
        head: what :func:`gossamer.messages.pack_head` gives.
        buffers: contiguous CPU tensors.
    """
    sources = deque([memoryview(head), *(raw(buffer) for buffer in buffers)])
    left = total = sum(source.nbytes for source in sources)
    while left:
        length = min(CHUNK_BYTES, left)
        number = message % NUMBERS
        pieces: list[bytes | memoryview]
        if left == total:
            pieces = [BEGIN.pack(Kind.BEGIN, number, length, total, len(head))]
        else:
            pieces = [DATA.pack(Kind.DATA, number, length)]
        left -= length
        due = length
        while due:
            source = sources.popleft()
            pieces.append(source[:due])
            if source.nbytes > due:
                sources.appendleft(source[due:])
            due -= min(due, source.nbytes)
        yield Chunk(b"".join(pieces), length)
