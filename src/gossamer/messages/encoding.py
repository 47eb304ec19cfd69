"""Payloads as bytes: encoding, decoding and sizes. The package's docstring describes the format.

Any fault in bytes from a socket or a file raises :class:`FrameError`, and no memory is allocated before the
bytes that fill it have arrived."""

from __future__ import annotations

import itertools
import math
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.messages.tags import INDEX_DTYPES, LONGEST_S, Coded, Model, Part, Payload, Tag, as_tag

MAX_DEPTH = 32  # levels of containers in a payload
MAX_ITEMS = 65_536
"""Maximum number of values in a payload, including keys. It is limited because an empty list takes one byte
on the wire and 56 in memory."""
MAX_TAG_BYTES = 1_024  # of a packed tag
MAX_TENSORS = 4_096  # tensors in a payload, including those of parts and models
MAX_DIMENSIONS = 32

CHUNK_BYTES = 16 * 1024
"""Bytes of a message in one chunk: a quarter of the window (:data:`gossamer.messages.tags.WINDOW`), so that
three more chunks are in flight while the credit for one returns."""
BEGIN_BYTES, DATA_BYTES = 19, 7
"""Sizes of the headers of a message's first chunk and of each later one
(:mod:`gossamer.runtime.processes.transport.wire`)."""

DTYPES: tuple[torch.dtype, ...] = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
"""The dtypes that can be sent. A dtype's code is its index: append only."""
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_TENSOR, _PART, _MODEL, _PARAMETERS, _CODED = 1, 2, 3, 4, 5  # the extension types
_SCALARS = {type(None), bool, int, float, str, bytes}
_HEAD = b"\x93"  # an array of 3
_TIME = struct.Struct(">Bd")


class FrameError(GossamerError, ValueError):
    """Invalid bytes from a socket or a file. The message is one line."""


class BufferSpec(NamedTuple):
    """The dtype and shape of one buffer that follows a structure."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Encoded:
    """The wire form of a payload: the structure (msgpack), and the tensors in the structure's order,
    contiguous and on the CPU. They may share memory with the payload's tensors."""

    structure: bytes
    buffers: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of structure and buffers."""
        return len(self.structure) + sum(buffer.nbytes for buffer in self.buffers)


# --- writing


def encode(payload: Payload) -> Encoded:
    """The wire form of a payload. Contiguous tensors on the CPU are not copied. TypeError for an object that
    can't be sent; ValueError for an int beyond 64 bits, a key that is neither str nor int, an inconsistent
    part, or a payload beyond the limits."""
    bare = type(payload) is Model and type(payload.buffers) is Tensor and payload.buffers.shape == (0,)
    alone = payload.parameters if bare else payload
    if (
        type(alone) is Tensor
        and alone.device.type == "cpu"
        and alone.layout is torch.strided
        and alone.dtype in _CODES
    ):
        buffer = alone if alone.is_contiguous() and not alone.requires_grad else alone.detach().contiguous()
        return Encoded(_structure_of_one(alone.dtype, alone.shape, alone is not payload), (buffer,))
    structure, tensors = _structure_of(payload)
    buffers = tuple(tensor.detach().cpu().contiguous() for tensor in tensors)
    # Decode it as the receiver will, so that a fault is an error here, not a lost connection there.
    decode(structure, buffers)
    return Encoded(structure, buffers)


def freeze(payload: Payload, keep: Callable[[Tensor], bool], *, depth: int = 0) -> Payload:
    """The payload that the receiver would get: containers are copied (tuples become lists), tensors are
    detached and cloned. A tensor that can't change any more may be kept. TypeError for an object that can't
    be sent; :func:`encode` checks the other limits. ``depth`` containers are open around the payload."""
    item: Any = payload
    if type(item) in _SCALARS:
        return item
    if isinstance(item, Tensor):
        if keep(item):
            return item
        _check_tensor(item)
        return item.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(item, Model):
        return Model(*(freeze(vector, keep, depth=depth) for vector in item))
    if isinstance(item, Part):
        return Part(freeze(item.values, keep, depth=depth), freeze(item.where, keep, depth=depth), item.size)
    if isinstance(item, dict | list | tuple):
        if depth >= MAX_DEPTH:
            raise ValueError(f"payload: nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, dict):
            return {key: freeze(inner, keep, depth=depth + 1) for key, inner in item.items()}
        return [freeze(inner, keep, depth=depth + 1) for inner in item]
    # A codec's output has no other owner, so it need not be copied.
    return item if isinstance(item, Coded) else _base(item)


_PROTECTED = "_gossamer_protected"


def protect(tensor: Tensor) -> None:
    """Make :func:`overwrite` refuse to change a tensor."""
    setattr(tensor, _PROTECTED, True)


def overwrite(target: Any, saved: Any) -> Any:
    """Give a payload the values of another with the same structure. Tensors, dicts and lists are
    overwritten in place, so that existing references see the new values; for any other object, the
    replacement is returned. ValueError for a protected tensor."""
    if isinstance(target, Tensor) and isinstance(saved, Tensor) and target.shape == saved.shape:
        if hasattr(target, _PROTECTED) and not torch.equal(target, saved.to(target.device)):
            raise ValueError("a vector that others hold would be overwritten")
        target.data.copy_(saved)  # through .data, which torch does not count as a modification
        vars(target).clear()  # drop the notes about the old values
        return target
    if isinstance(target, Model) and isinstance(saved, Model):
        return Model(*map(overwrite, target, saved))
    if isinstance(target, list) and isinstance(saved, list):
        target[:] = [*map(overwrite, target, saved), *saved[len(target) :]]
        return target
    if type(target) is tuple and isinstance(saved, list):
        return tuple(
            overwrite(target[k] if k < len(target) else None, value) for k, value in enumerate(saved)
        )
    if isinstance(target, dict) and isinstance(saved, dict):
        for key in target.keys() - saved.keys():
            del target[key]
        for key, value in saved.items():
            target[key] = overwrite(target.get(key), value)
        return target
    return saved


def _structure_of(payload: Payload) -> tuple[bytes, list[Tensor]]:
    """A payload's structure and its tensors, on their devices. Only coordinates are copied."""
    writer = _Writer()
    return writer.pack(payload), writer.tensors


class _Writer:
    """Writes structures, and collects the tensors in them. (These are methods and not closures, since a cycle of closures
    would keep the tensors until Python looks for cycles.)"""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pack(self, *items: Any) -> bytes:
        return b"".join(msgpack.packb(item, default=self._extension, strict_types=True) for item in items)

    def _extension(self, item: Any) -> Any:
        """The msgpack form of an object that msgpack does not know."""
        if isinstance(item, Tensor):
            _check_tensor(item)
            self.tensors.append(item)
            return msgpack.ExtType(_TENSOR, struct.pack(f"<B{item.dim()}Q", _CODES[item.dtype], *item.shape))
        if isinstance(item, Part):
            _checked(item)
            return msgpack.ExtType(_PART, self.pack(item.values, narrow(item.where, item.size), item.size))
        if isinstance(item, Coded):
            return msgpack.ExtType(_CODED, self.pack(item.payload))
        if isinstance(item, Model):
            _checked(item)
            if item.buffers.shape[0]:
                return msgpack.ExtType(_MODEL, self.pack(*item))
            if isinstance(item.parameters, Tensor):
                return msgpack.ExtType(_PARAMETERS, self._extension(item.parameters).data)
            return msgpack.ExtType(_MODEL, self.pack(item.parameters))
        if isinstance(item, list | tuple):
            return list(item)
        return dict(item) if isinstance(item, dict) else _base(item)


@lru_cache(maxsize=1024)
def _structure_of_one(dtype: torch.dtype, shape: torch.Size, is_model: bool) -> bytes:
    """The structure of a payload that is one tensor, or a model without buffers: the most frequent payloads
    by far."""
    tensor = torch.empty(shape, dtype=dtype)
    return _structure_of(Model(tensor) if is_model else tensor)[0]


def narrow(where: Tensor, size: int) -> Tensor:
    """The coordinates of a part [k] in the narrowest type that holds all coordinates of a vector of length
    ``size``."""
    for dtype in (torch.uint8, torch.uint16, torch.uint32):
        if size <= 1 << 8 * dtype.itemsize:
            return where.cpu().to(dtype)
    return where


def _base(item: Any) -> Any:
    """The plain number or text as which a subclass (numpy.float64, an enumeration) is sent."""
    if isinstance(item, int) and not -(2**63) <= item < 2**64:
        raise ValueError(f"payload: {item} does not fit into 64 bits")
    for base in (float, int, str, bytes):
        if isinstance(item, base):
            return base(item)  # type: ignore[arg-type]
    raise TypeError(
        f"payload: {type(item).__name__} can't be sent; accepted: None, bool, int, float, str, bytes, a dense torch tensor,"
        " Part, Model, and lists and dicts of these"
    )


def _check_tensor(item: Tensor) -> None:
    if item.layout is not torch.strided or item.is_meta or item.dtype not in _CODES:
        layout = "meta" if item.is_meta else str(item.layout)
        names = ", ".join(map(str, DTYPES))
        raise TypeError(
            f"payload: a {layout} tensor of {item.dtype} can't be sent; accepted: dense ones of {names}"
        )
    if item.dim() > MAX_DIMENSIONS:
        raise ValueError(f"payload: a tensor of {item.dim()} dimensions; accepted: at most {MAX_DIMENSIONS}")


# --- heads and sizes


def wire_bytes(tag: Tag, payload: Payload | Encoded) -> int:
    """Size of a message on the wire in bytes: head, buffers and chunk headers, without credit and handshakes.
    It depends on the tag and the payload, not on ranks, times, sequence numbers or the tensors' contents.
    Errors are those of :func:`encode` and :func:`pack_head`."""
    encoded = payload if isinstance(payload, Encoded) else encode(payload)
    return framed_bytes(_head_bytes(as_tag(tag)) + encoded.nbytes)


@lru_cache(maxsize=4096, typed=True)
def _head_bytes(tag: tuple[str | int, ...]) -> int:
    return len(pack_head(tag, 0.0, b""))


def framed_bytes(nbytes: int) -> int:
    """Bytes on the wire of a message of ``nbytes`` (head and buffers), chunk headers included."""
    chunks = -(-nbytes // CHUNK_BYTES)
    return nbytes + BEGIN_BYTES + (chunks - 1) * DATA_BYTES


def pack_head(tag: Tag, sent_at: float, structure: bytes) -> bytes:
    """The head of a message: its tag, the sender's clock in seconds, and the payload's structure. TypeError or ValueError for
    a tag that is not str, int (64 bits) or a tuple of these, or is longer than :data:`MAX_TAG_BYTES`."""
    parts = as_tag(tag)
    try:
        packed: bytes = msgpack.packb(parts)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"tag {tag!r}: {error}; accepted: 64-bit ints and Unicode text") from None
    if len(packed) > MAX_TAG_BYTES:
        raise ValueError(f"tag {tag!r:.60}...: {len(packed)} bytes; accepted: at most {MAX_TAG_BYTES}")
    return _HEAD + packed + _TIME.pack(0xCB, sent_at) + structure


def unpack_head(head: bytes) -> tuple[tuple[str | int, ...], float, bytes]:
    """(tag, sent_at, structure) of a head. FrameError for a head that :func:`pack_head` would not write. The
    structure is not checked."""
    if head[:1] != _HEAD:
        raise FrameError("the head is not an array of 3")
    reader = Reader(head[1:], None)
    tag = reader.next(MAX_DEPTH - 1)
    if reader.at() > MAX_TAG_BYTES:
        raise FrameError(f"a tag of {reader.at()} bytes; accepted: at most {MAX_TAG_BYTES}")
    sent_at = reader.next(MAX_DEPTH + 1)
    if not isinstance(tag, list) or not all(type(part) is str or type(part) is int for part in tag):
        raise FrameError("the tag is not a list of str and int")
    if type(sent_at) is not float or not 0 <= sent_at <= LONGEST_S:
        raise FrameError(f"the time of sending is not a float from 0 to {LONGEST_S:g}")
    return tuple(tag), sent_at, head[1 + reader.at() :]


# --- reading


def raw(buffer: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; an empty tensor has none."""
    return buffer.reshape(-1).view(torch.uint8).numpy().data


def decode(structure: bytes, buffers: Sequence[Tensor]) -> Payload:
    """The payload of a structure and its buffers, whose dtypes and shapes must be those of :func:`describe`.
    Its tensors are the buffers themselves. FrameError for anything that :func:`encode` would not write, and
    for other buffers."""
    reader = Reader(structure, buffers)
    payload = reader.whole()
    if len(buffers) != len(reader.specs):
        raise FrameError(f"{len(buffers)} buffers for {len(reader.specs)} tensors")
    return payload


class Description(NamedTuple):
    """The buffers that follow a structure, and the number of values in it, which take memory of their own."""

    specs: list[BufferSpec]
    values: int


def describe(structure: bytes) -> Description:
    """The description of a structure, without allocating any buffer; FrameError as for :func:`decode`."""
    reader = Reader(structure, None)
    reader.whole()
    return Description(reader.specs, next(reader.count) - 1)


_ARRAYS = {*range(0x90, 0xA0), 0xDC, 0xDD}
_MAPS = {*range(0x80, 0x90), 0xDE, 0xDF}


class Reader:
    """Reads values in sequence. Without buffers, tensors become :class:`BufferSpec`. msgpack
    allocates an array of the announced size before it reads the first element, on each of its hundreds of
    levels; it is therefore used only for scalars, extensions and the headers of containers. The reader of an
    extension's content shares the count and the tensors of the enclosing reader."""

    def __init__(self, data: bytes, buffers: Sequence[Tensor] | None, outer: Reader | None = None) -> None:
        self._data, self._buffers = data, buffers
        proxy = weakref.proxy(self)  # so that no cycle keeps the buffers
        hook = lambda code, data: proxy._extension(code, data)  # noqa: E731
        self._unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1), ext_hook=hook)
        self._unpacker.feed(data)
        self.at: Callable[[], int] = self._unpacker.tell  # number of bytes read
        self.count: Iterator[int] = itertools.count(1) if outer is None else outer.count
        self.specs: list[BufferSpec] = [] if outer is None else outer.specs
        # Extensions being read. None may contain its own type, since each copies its content.
        self._open: set[int] = set() if outer is None else outer._open
        self._depth = 0  # depth of the extension being read

    def whole(self) -> Any:
        """The only value in the bytes. FrameError if anything follows it."""
        value = self.next(0)
        if trailing := len(self._data) - self.at():
            raise FrameError(f"{trailing} bytes after the end of the structure")
        return value

    def next(self, depth: int) -> Any:
        """The next value; ``depth`` containers are open around it."""
        try:
            return self.value(depth)
        except FrameError:
            raise
        except (msgpack.UnpackException, ValueError) as error:
            raise FrameError(f"the structure is not msgpack, or ends early: {error}") from None

    def value(self, depth: int) -> Any:
        """As :meth:`next`, with msgpack's own errors."""
        if next(self.count) > MAX_ITEMS:
            raise FrameError(f"more than {MAX_ITEMS} values")
        first = self._data[self.at()] if self.at() < len(self._data) else 0
        if first not in _ARRAYS and first not in _MAPS:
            self._depth = depth
            value = self._unpacker.unpack()
            if isinstance(value, msgpack.Timestamp):
                raise FrameError("a timestamp, which no payload has")
            return value
        _check_depth(depth)
        if first in _ARRAYS:
            return [self.value(depth + 1) for _ in range(self._unpacker.read_array_header())]
        items: dict[str | int, Any] = {}
        for _ in range(self._unpacker.read_map_header()):
            key = self.value(MAX_DEPTH)
            if type(key) is not str and type(key) is not int:
                raise FrameError(f"a key that is {type(key).__name__}, not str or int")
            if key in items:
                raise FrameError(f"key {key!r:.60} twice")
            items[key] = self.value(depth + 1)
        return items

    def _extension(self, code: int, data: bytes) -> Any:
        if code == _TENSOR:
            return self._tensor(data)
        if code == _PARAMETERS:
            return _checked(Model(self._tensor(data)))  # type: ignore[arg-type]
        _check_depth(self._depth)
        if code in self._open:
            raise FrameError(f"extension type {code} inside itself")
        self._open.add(code)
        inner, values = Reader(data, self._buffers, self), []
        while inner.at() < len(data):
            values.append(inner.value(self._depth + 1))
        self._open.discard(code)
        if code == _CODED and len(values) == 1:
            return Coded(*values)
        if code == _PART and len(values) == 3:
            return _checked(Part(*values))
        if code == _MODEL and len(values) in (1, 2):
            return _checked(Model(*values))
        raise FrameError(f"extension type {code} with {len(values)} values, which no payload has")

    def _tensor(self, header: bytes) -> Tensor | BufferSpec:
        dimensions, rest = divmod(len(header) - 1, 8)
        if rest or not 0 <= dimensions <= MAX_DIMENSIONS or header[0] >= len(DTYPES):
            raise FrameError(f"a tensor with the header {header[:16].hex()}")
        spec = BufferSpec(DTYPES[header[0]], struct.unpack(f"<{dimensions}Q", header[1:]))
        # Strides are 64-bit too, and torch counts an empty dimension as 1 in them.
        if math.prod(max(length, 1) for length in spec.shape) * spec.dtype.itemsize >= 2**63:
            raise FrameError(f"a tensor of shape {spec.shape}")
        number = len(self.specs)
        if number >= MAX_TENSORS:
            raise FrameError(f"more than {MAX_TENSORS} tensors")
        self.specs.append(spec)
        if self._buffers is None:
            return spec
        if number >= len(self._buffers):
            raise FrameError(f"{len(self._buffers)} buffers for more tensors")
        buffer = self._buffers[number]
        if (buffer.dtype, tuple(buffer.shape)) != spec:
            actual = f"{buffer.dtype} {tuple(buffer.shape)}"
            raise FrameError(f"buffer {number} is {actual}; accepted: {spec.dtype} {spec.shape}")
        # A bool that is neither 0 nor 1 has undefined effects in torch.
        if spec.dtype is torch.bool and buffer.numel() > 0 and int(buffer.view(torch.uint8).max()) > 1:
            raise FrameError(f"buffer {number} is torch.bool and has a byte above 1")
        return buffer


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise FrameError(f"nested deeper than {MAX_DEPTH} levels")


def _checked(item: Any) -> Any:
    """The part or model itself, if it is consistent. Its tensors may be :class:`BufferSpec`."""
    if fault := part_fault(item) if isinstance(item, Part) else _model_fault(*item):
        raise FrameError(fault)
    return item


def _is_vector(item: Any) -> bool:
    return isinstance(item, Tensor | BufferSpec) and len(item.shape) == 1


def part_fault(part: Part) -> str | None:
    """The inconsistency in a part, if any. Its tensors may be :class:`BufferSpec`."""
    values, where, size = part.values, part.where, part.size
    if not _is_vector(values):
        return "a part's values are not a vector"
    if isinstance(size, bool) or not isinstance(size, int) or not values.shape[0] <= size < 2**63:
        return f"a part of {values.shape[0]} values of a vector of {size!r}; accepted: the length of the whole vector"
    if not isinstance(where, Tensor | BufferSpec) or where.dtype not in INDEX_DTYPES:
        kind = where.dtype if isinstance(where, Tensor | BufferSpec) else type(where).__name__
        return f"a part's indices are {kind}; accepted: {', '.join(map(str, INDEX_DTYPES))}"
    if where.shape != values.shape:
        return f"a part of {values.shape[0]} values has indices of shape {tuple(where.shape)}"
    if isinstance(where, Tensor) and where.numel():
        lowest, highest = (int(end) for end in where.aminmax())
        if lowest < 0 or highest >= size:
            return f"a part's indices run from {lowest} to {highest} in a vector of {size}"
    return None


def _model_fault(parameters: Any, buffers: Any) -> str | None:
    """The inconsistency in a model, if any."""
    if not (_is_vector(parameters) or isinstance(parameters, Part | Coded)):
        return "a model's parameters are not a vector"
    return None if _is_vector(buffers) else "a model's buffers are not a vector"
