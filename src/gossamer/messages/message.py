"""A whole message: its head, and its size on the wire in chunks."""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import msgpack

from gossamer.messages.format import MAX_DEPTH, FrameError
from gossamer.messages.reading import Reader
from gossamer.messages.tags import Payload, Tag, as_tag
from gossamer.messages.writing import Encoded, structure_of

CHUNK_BYTES = 16 * 1024
"""Bytes of a message that travel in one chunk.

A quarter of the window (:data:`gossamer.messages.tags.WINDOW`): while the credit for one chunk comes back, three
more are under way, so the link does not run dry. Larger chunks would make a sender stop and wait, and take
longer to cancel; smaller ones cost more headers and system calls.
"""
BEGIN_BYTES = 19
"""Header of a message's first chunk (:data:`gossamer.runtime.processes.transport.wire.BEGIN`)."""
DATA_BYTES = 7
"""Header of every later chunk (:data:`gossamer.runtime.processes.transport.wire.DATA`)."""

_HEAD = b"\x93"  # an array of 3
_TIME = struct.Struct(">Bd")


def wire_bytes(tag: Tag, payload: Payload | Encoded) -> int:
    """Bytes that a message takes on the wire: head, buffers and chunk headers; not credit, not handshakes.

    They depend on the tag and the payload, not on ranks, times, sequence numbers or what the tensors contain.

    Raises:
        TypeError, ValueError: as for :func:`encode` and :func:`pack_head`.
    """
    if isinstance(payload, Encoded):
        return framed_bytes(_head_bytes(as_tag(tag)) + payload.nbytes)
    structure, tensors = structure_of(payload)
    return framed_bytes(len(pack_head(tag, 0.0, structure)) + sum(tensor.nbytes for tensor in tensors))


@lru_cache(maxsize=4096, typed=True)
def _head_bytes(tag: tuple[str | int, ...]) -> int:
    return len(pack_head(tag, 0.0, b""))


def framed_bytes(nbytes: int) -> int:
    """Bytes on the wire of a message of ``nbytes`` (head and buffers), chunk headers included."""
    chunks = -(-nbytes // CHUNK_BYTES)
    return nbytes + BEGIN_BYTES + (chunks - 1) * DATA_BYTES


def pack_head(tag: Tag, sent_at: float, structure: bytes) -> bytes:
    """The head of a message: its tag, the sender's clock in seconds, and the payload's structure.

    Raises:
        TypeError: for a tag that is not str, int or a tuple of these.
        ValueError: for a tag with an int beyond 64 bits or text that is not Unicode.
    """
    parts = as_tag(tag)
    try:
        packed: bytes = msgpack.packb(parts)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"tag {tag!r}: {error}; accepted: 64-bit ints and Unicode text") from None
    return _HEAD + packed + _TIME.pack(0xCB, sent_at) + structure


def unpack_head(head: bytes) -> tuple[tuple[str | int, ...], float, bytes]:
    """(tag, sent_at, structure) of a head; the structure is not looked at.

    Raises:
        FrameError: for a head that :func:`pack_head` would not have written.
    """
    reader = Reader(head, None)
    if reader.take(1) != _HEAD:
        raise FrameError("the head is not an array of 3")
    tag = reader.value(MAX_DEPTH - 1)
    if not isinstance(tag, list) or not all(type(part) is str or type(part) is int for part in tag):
        raise FrameError("the tag is not a list of str and int")
    sent_at = reader.value(MAX_DEPTH + 1)
    if type(sent_at) is not float or not math.isfinite(sent_at):
        raise FrameError("the time of sending is not a finite float")
    return tuple(tag), sent_at, head[reader.at :]
