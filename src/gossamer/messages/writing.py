"""Writes payloads: :func:`encode` for sockets and files, :func:`freeze` within a process, and messages' heads and sizes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack
import torch
from torch import Tensor

from gossamer.messages.reading import (
    CODED,
    DTYPES,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_ITEMS,
    MAX_TENSORS,
    MODEL,
    PARAMETERS,
    PART,
    SHAPES,
    TENSOR,
    FrameError,
    Reader,
    model_fault,
    part_fault,
)
from gossamer.messages.tags import Coded, Model, Part, Payload, Tag, as_tag

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

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_ACCEPTED = (
    "None, bool, int, float, str, bytes, a dense torch tensor, Part, Model, and lists and dicts of these"
)
_HEAD = b"\x93"  # an array of 3
_TIME = struct.Struct(">Bd")

Path = tuple[str | int, ...]


@dataclass(frozen=True, eq=False)
class Encoded:
    """A payload as it travels.

    Args:
        structure: everything but the tensors' contents (msgpack).
        buffers: the tensors in the structure's order, contiguous, on the CPU; they may share memory with the
            payload's.
    """

    structure: bytes
    buffers: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of structure and buffers."""
        return len(self.structure) + sum(buffer.nbytes for buffer in self.buffers)


def encode(payload: Payload) -> Encoded:
    """The wire form of a payload; tensors that are contiguous and on the CPU are not copied.

    Raises:
        TypeError: for an object that can't travel; the message has its path inside the payload.
        ValueError: for an int beyond 64 bits, a part that contradicts itself, or a payload beyond the limits
            on depth, values and tensors.
    """
    bare = type(payload) is Model and type(payload.buffers) is Tensor and payload.buffers.shape == (0,)
    alone = payload.parameters if bare else payload
    if _is_plain(alone):
        buffer = alone if alone.is_contiguous() and not alone.requires_grad else _plain(alone).contiguous()
        return Encoded(_structure_of_one(alone.dtype, alone.shape, alone is not payload), (buffer,))
    structure, tensors = _structure_of(payload)
    buffers = tuple(_plain(tensor).cpu().contiguous() for tensor in tensors)
    # Read as the receiver will, so that an index out of range is an error here, not a lost connection there.
    Reader(structure, buffers).whole()
    return Encoded(structure, buffers)


def freeze(payload: Payload, keep: Callable[[Tensor], bool]) -> Payload:
    """The payload that the receiver would get: containers copied (tuples as lists), tensors detached and cloned.

    The clones are contiguous and on their tensor's device.

    Args:
        payload: what is sent.
        keep: whether a tensor can't change any more and may be handed over as it is.

    Raises:
        TypeError, ValueError: as for :func:`encode`.
    """
    if type(payload) is Tensor and keep(payload):
        return payload
    return _Walk(keep).value(payload, ())


# --- heads and sizes


def wire_bytes(tag: Tag, payload: Payload | Encoded) -> int:
    """Bytes that a message takes on the wire: head, buffers and chunk headers; not credit, not handshakes.

    They depend on the tag and the payload, not on ranks, times, sequence numbers or what the tensors contain.

    Raises:
        TypeError, ValueError: as for :func:`encode` and :func:`pack_head`.
    """
    if isinstance(payload, Encoded):
        return framed_bytes(_head_bytes(as_tag(tag)) + payload.nbytes)
    structure, tensors = _structure_of(payload)
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


# --- a pass over a payload


class _Walk:
    """One pass over a payload: checks every object and rebuilds it, with lists for tuples.

    Args:
        keep: whether a tensor may stay as it is; others are cloned.
    """

    def __init__(self, keep: Callable[[Tensor], bool]) -> None:
        self._keep = keep
        self._items = self._tensors = 0

    def make_tensor(self, item: Tensor) -> Any:
        return item if self._keep(item) else _plain(item).clone(memory_format=torch.contiguous_format)

    def make_part(self, item: Part, values: Any, where: Any) -> Any:
        return Part(values, where, item.size)

    def make_model(self, *inner: Any) -> Any:
        return Model(*inner)

    def make_coded(self, item: Coded, path: Path) -> Any:
        return item  # what a codec has made belongs to nobody else: it need not be copied

    def value(self, item: Any, path: Path) -> Any:
        self._items += 1
        if self._items > MAX_ITEMS:
            raise ValueError(f"payload: more than {MAX_ITEMS} values; accepted: fewer, or a tensor of them")
        if isinstance(item, Tensor):
            return self._tensor(item, path)
        if item is None or isinstance(item, bool | bytes):
            return item
        # Subclasses (numpy.float64, enumerations) travel as what they are underneath.
        if isinstance(item, float):
            return float(item)
        if isinstance(item, int):
            return _number(int(item), path)
        if isinstance(item, str):
            return _text(item, path)
        if isinstance(item, Model):
            return self._model(item, path)
        if isinstance(item, Part):
            return self._part(item, path)
        if isinstance(item, Coded):
            return self.make_coded(item, path)
        if not isinstance(item, list | tuple | dict):
            raise TypeError(f"{_show(path)}: {type(item).__name__} can't be sent; accepted: {_ACCEPTED}")
        if len(path) >= MAX_DEPTH:
            raise ValueError(f"{_show(path)}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, dict):
            return {_key(key, path): self.value(inner, (*path, key)) for key, inner in item.items()}
        return [self.value(inner, (*path, index)) for index, inner in enumerate(item)]

    def _tensor(self, item: Tensor, path: Path) -> Any:
        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise ValueError(
                f"payload: more than {MAX_TENSORS} tensors; accepted: fewer, joined into larger ones"
            )
        if item.layout is not torch.strided or item.is_meta:
            what = "meta" if item.is_meta else str(item.layout)
            raise TypeError(f"{_show(path)}: a {what} tensor can't be sent; accepted: {_ACCEPTED}")
        if item.dtype not in _CODES:
            names = ", ".join(map(str, DTYPES))
            raise TypeError(f"{_show(path)}: a tensor of {item.dtype} can't be sent; accepted: {names}")
        if item.dim() > MAX_DIMENSIONS:
            raise ValueError(
                f"{_show(path)}: a tensor of {item.dim()} dimensions; accepted: at most {MAX_DIMENSIONS}"
            )
        return self.make_tensor(item)

    def _model(self, item: Model, path: Path) -> Any:
        if fault := model_fault(*item):
            raise ValueError(f"{_show(path)}: {fault}")
        vector: Any = item.parameters
        inside = (*path, "parameters")
        if isinstance(vector, Part):
            parameters = self._part(vector, inside)
        elif isinstance(vector, Coded):
            parameters = self.make_coded(vector, inside)
        else:
            parameters = self._tensor(vector, inside)
        if not item.buffers.shape[0]:
            return self.make_model(parameters)
        return self.make_model(parameters, self._tensor(item.buffers, (*path, "buffers")))

    def _part(self, item: Part, path: Path) -> Any:
        if fault := part_fault(item.values, item.where, item.size):
            raise ValueError(f"{_show(path)}: {fault}")
        values = self._tensor(item.values, (*path, "values"))
        return self.make_part(item, values, self._tensor(item.where, (*path, "where")))


class _Structure(_Walk):
    """Builds what msgpack writes, and gathers the tensors as they are."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: True)
        self.tensors: list[Tensor] = []

    def make_tensor(self, item: Tensor) -> msgpack.ExtType:
        self.tensors.append(item)
        return msgpack.ExtType(TENSOR, SHAPES[item.dim()].pack(_CODES[item.dtype], *item.shape))

    def make_part(self, item: Part, values: Any, where: Any) -> msgpack.ExtType:
        return msgpack.ExtType(PART, b"".join(map(msgpack.packb, (values, where, item.size))))

    def make_model(self, *inner: msgpack.ExtType) -> msgpack.ExtType:
        if len(inner) == 1 and inner[0].code == TENSOR:
            return msgpack.ExtType(PARAMETERS, inner[0].data)
        return msgpack.ExtType(MODEL, b"".join(map(msgpack.packb, inner)))

    def make_coded(self, item: Coded, path: Path) -> msgpack.ExtType:
        return msgpack.ExtType(CODED, msgpack.packb(self.value(item.payload, (*path, "payload"))))


def _structure_of(payload: Payload) -> tuple[bytes, list[Tensor]]:
    """A payload's structure, and its tensors as they are: nothing is copied, whatever device they are on."""
    walk = _Structure()
    return msgpack.packb(walk.value(payload, ())), walk.tensors


@lru_cache(maxsize=1024)
def _structure_of_one(dtype: torch.dtype, shape: torch.Size, is_model: bool) -> bytes:
    """The structure of a payload that is one tensor, or a model without buffers: by far the most frequent ones."""
    tensor = torch.empty(shape, dtype=dtype)
    structure, _ = _structure_of(Model(tensor) if is_model else tensor)
    return structure


def _is_plain(payload: Payload) -> bool:
    return (
        type(payload) is Tensor
        and payload.device.type == "cpu"
        and payload.layout is torch.strided
        and payload.dtype in _CODES
        and not payload.is_conj()
        and not payload.is_neg()
    )


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without gradient, and with conjugation and negation carried out, which torch does lazily."""
    return tensor.detach().resolve_conj().resolve_neg()


def _key(key: Any, path: Path) -> str | int:
    # No subclasses here: two keys that differ could become one.
    if type(key) is str:
        return _text(key, path)
    if type(key) is int:
        return _number(key, path, "key ")
    raise TypeError(f"{_show(path)}: {type(key).__name__} {key!r} as a key; accepted: str and int")


def _number(item: int, path: Path, what: str = "") -> int:
    if not -(2**63) <= item < 2**64:
        raise ValueError(f"{_show(path)}: {what}{item} does not fit into 64 bits")
    return item


def _text(item: str, path: Path) -> str:
    if not item.isascii():
        try:
            item.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{_show(path)}: {item!r} has lone surrogates, which UTF-8 can't hold") from None
    return str.__str__(item)


def _show(path: Path) -> str:
    return "payload" + "".join(f"[{key!r}]" for key in path)
