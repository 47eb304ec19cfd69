"""Payloads on the wire and on disk: a msgpack structure, and the little-endian memory of the tensors in it.

::

    message   = head, buffer, buffer, ...           the buffers in the order in which the structure names them
    head      = array of 3: tag (array of str and int), sent_at (float64), structure
    structure = nil | bool | int | float64 | str | bin | array | map | tensor | part | model
    map       = str or int -> structure, no key twice
    tensor    = ext 1: dtype (uint8: its place in DTYPES), one uint64 (little-endian) a dimension
    part      = ext 2: tensor (the values), int or str or tensor (where), int (the whole vector's size)
    model     = ext 3: tensor (the parameters), tensor (the buffers)

A structure says how large every buffer is, so a receiver checks it (:func:`describe`) before it allocates
one. Nothing is unpickled, and nothing but :class:`FrameError` comes out of bytes that are wrong.

Both engines use this module: ``processes`` sends what :func:`encode` gives; ``simulate`` hands over what
:func:`freeze` gives and charges :func:`wire_bytes` for it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.messages import Model, Part, Payload, Tag, as_tag

MAX_DEPTH = 32
"""Levels of containers in a payload."""
MAX_ITEMS = 65_536
"""Values in a payload, keys not counted; limited because an empty list is one byte to send and 56 to hold."""
MAX_TENSORS = 4_096
"""Tensors in a payload, those of parts and models included."""
MAX_DIMENSIONS = 32

CHUNK_BYTES = 16 * 1024
"""Bytes of a message that travel in one chunk.

A quarter of the window (:data:`gossamer.messages.WINDOW`): while the credit for one chunk comes back, three
more are under way, so the link does not run dry. Larger chunks would make a sender stop and wait, and take
longer to cancel; smaller ones cost more headers and system calls.
"""
BEGIN_BYTES = 19
"""Header of a message's first chunk (:data:`gossamer.engines.processes.transport.wire.BEGIN`)."""
DATA_BYTES = 7
"""Header of every later chunk (:data:`gossamer.engines.processes.transport.wire.DATA`)."""

# A dtype's code is its place here: append only. complex32 is left out while torch calls it experimental.
DTYPES: tuple[torch.dtype, ...] = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
"""The dtypes that can be sent."""

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SHAPES = tuple(struct.Struct(f"<B{dimensions}Q") for dimensions in range(MAX_DIMENSIONS + 1))
_TENSOR, _PART, _MODEL = 1, 2, 3
_HEAD = b"\x93"  # an array of 3
_TIME = struct.Struct(">Bd")
_ACCEPTED = (
    "None, bool, int, float, str, bytes, a dense torch tensor, Part, Model, and lists and dicts of these"
)


class FrameError(GossamerError, ValueError):
    """Bytes from a socket or a file that are not what they should be; the message is one line."""


class BufferSpec(NamedTuple):
    """One buffer that follows a structure: the tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


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
    if _is_plain(payload):
        buffer = (
            payload if payload.is_contiguous() and not payload.requires_grad else _plain(payload).contiguous()
        )
        return Encoded(_structure_of_tensor(payload.dtype, payload.shape), (buffer,))
    structure, tensors = _structure(payload)
    buffers = tuple(_plain(tensor).cpu().contiguous() for tensor in tensors)
    # Read as the receiver will, so that an index out of range is an error here, not a lost connection there.
    _Reader(structure, buffers).whole()
    return Encoded(structure, buffers)


def _is_plain(payload: Payload) -> bool:
    return (
        type(payload) is Tensor
        and payload.device.type == "cpu"
        and payload.layout is torch.strided
        and payload.dtype in _CODES
        and not payload.is_conj()
        and not payload.is_neg()
    )


@lru_cache(maxsize=1024)
def _structure_of_tensor(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """The structure of a payload that is one tensor: by far the most frequent one."""
    structure, _ = _structure(torch.empty(shape, dtype=dtype))
    return structure


def decode(structure: bytes, buffers: Sequence[Tensor]) -> Payload:
    """The payload that a structure and its buffers stand for; its tensors are the buffers themselves.

    Args:
        structure: as in :class:`Encoded`.
        buffers: tensors of the dtypes and shapes that :func:`describe` gives.

    Raises:
        FrameError: for anything that :func:`encode` would not have written, and for buffers of another
            number, dtype or shape.
    """
    return _Reader(structure, buffers).whole()


def describe(structure: bytes) -> list[BufferSpec]:
    """The (dtype, shape) of every buffer that follows a structure, without allocating any.

    Raises:
        FrameError: for anything that :func:`encode` would not have written.
    """
    reader = _Reader(structure, None)
    reader.whole()
    return reader.specs


def freeze(payload: Payload, keep: Callable[[Tensor], bool]) -> Payload:
    """What the receiver would get: containers copied (tuples as lists), tensors detached and cloned.

    The clones are contiguous and on their tensor's device.

    Args:
        payload: what is sent.
        keep: whether a tensor can't change any more and may be handed over as it is.

    Raises:
        TypeError, ValueError: as for :func:`encode`.
    """

    if type(payload) is Tensor and keep(payload):
        return payload

    def tensor(item: Tensor) -> Tensor:
        return item if keep(item) else _plain(item).clone(memory_format=torch.contiguous_format)

    return _Walk(tensor, lambda part, values, where: Part(values, where, part.size), Model).value(payload, ())


def wire_bytes(tag: Tag, payload: Payload | Encoded) -> int:
    """Bytes that a message takes on the wire: head, buffers and chunk headers; not credit, not handshakes.

    They depend on the tag and the payload, not on ranks, times, sequence numbers or what the tensors contain.

    Raises:
        TypeError, ValueError: as for :func:`encode` and :func:`pack_head`.
    """
    if isinstance(payload, Encoded):
        return framed_bytes(_head_bytes(as_tag(tag)) + payload.nbytes)
    structure, tensors = _structure(payload)
    return framed_bytes(len(pack_head(tag, 0.0, structure)) + sum(tensor.nbytes for tensor in tensors))


@lru_cache(maxsize=4096, typed=True)
def _head_bytes(tag: tuple[str | int, ...]) -> int:
    return len(pack_head(tag, 0.0, b""))


def framed_bytes(nbytes: int) -> int:
    """Bytes on the wire of a message of some bytes (head and buffers) once it is cut into chunks."""
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
    reader = _Reader(head, None)
    if reader.take(1) != _HEAD:
        raise FrameError("the head is not an array of 3")
    tag = reader.value(MAX_DEPTH - 1)
    if not isinstance(tag, list) or not all(type(part) is str or type(part) is int for part in tag):
        raise FrameError("the tag is not a list of str and int")
    sent_at = reader.value(MAX_DEPTH + 1)
    if type(sent_at) is not float or not math.isfinite(sent_at):
        raise FrameError("the time of sending is not a finite float")
    return tuple(tag), sent_at, head[reader.at :]


def raw(buffer: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; an empty tensor has none."""
    return buffer.reshape(-1).view(torch.uint8).numpy().data


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without gradient, and with conjugation and negation carried out, which torch does lazily."""
    return tensor.detach().resolve_conj().resolve_neg()


def _structure(payload: Payload) -> tuple[bytes, list[Tensor]]:
    """A payload's structure, and its tensors as they are: nothing is copied, whatever device they are on."""
    tensors: list[Tensor] = []

    def tensor(item: Tensor) -> msgpack.ExtType:
        tensors.append(item)
        return msgpack.ExtType(_TENSOR, _SHAPES[item.dim()].pack(_CODES[item.dtype], *item.shape))

    def part(item: Part, values: msgpack.ExtType, where: int | str | msgpack.ExtType) -> msgpack.ExtType:
        return msgpack.ExtType(_PART, msgpack.packb(values) + msgpack.packb(where) + msgpack.packb(item.size))

    def model(parameters: msgpack.ExtType, buffers: msgpack.ExtType) -> msgpack.ExtType:
        return msgpack.ExtType(_MODEL, msgpack.packb(parameters) + msgpack.packb(buffers))

    return msgpack.packb(_Walk(tensor, part, model).value(payload, ())), tensors


class _Walk:
    """One pass over a payload: checks every object, and rebuilds it with what is made of its tensors."""

    def __init__(
        self,
        tensor: Callable[[Tensor], Any],
        part: Callable[[Part, Any, Any], Any],
        model: Callable[[Any, Any], Any],
    ) -> None:
        self._make_tensor, self._make_part, self._make_model = tensor, part, model
        self._items = 0
        self._tensors = 0

    def value(self, item: Any, path: tuple[str | int, ...]) -> Any:
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
            if not -(2**63) <= item < 2**64:
                raise ValueError(f"{_show(path)}: {item} does not fit into 64 bits")
            return int(item)
        if isinstance(item, str):
            return _text(item, path)
        if isinstance(item, Model):
            return self._model(item, path)
        if isinstance(item, Part):
            return self._part(item, path)
        if not isinstance(item, list | tuple | dict):
            raise TypeError(f"{_show(path)}: {type(item).__name__} can't be sent; accepted: {_ACCEPTED}")
        if len(path) >= MAX_DEPTH:
            raise ValueError(f"{_show(path)}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, dict):
            return {self._key(key, path): self.value(inner, (*path, key)) for key, inner in item.items()}
        return [self.value(inner, (*path, place)) for place, inner in enumerate(item)]

    def _key(self, key: Any, path: tuple[str | int, ...]) -> str | int:
        # No subclasses here: two keys that differ could become one.
        if type(key) is not str and type(key) is not int:
            raise TypeError(f"{_show(path)}: {type(key).__name__} {key!r} as a key; accepted: str and int")
        if type(key) is int and not -(2**63) <= key < 2**64:
            raise ValueError(f"{_show(path)}: key {key} does not fit into 64 bits")
        return _text(key, path) if type(key) is str else key

    def _tensor(self, item: Tensor, path: tuple[str | int, ...]) -> Any:
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
        return self._make_tensor(item)

    def _model(self, item: Model, path: tuple[str | int, ...]) -> Any:
        for name, vector in zip(Model._fields, item, strict=True):
            if not isinstance(vector, Tensor):
                raise TypeError(f"{_show((*path, name))}: {type(vector).__name__}; accepted: a tensor")
        if fault := _model_fault(item.parameters, item.buffers):
            raise ValueError(f"{_show(path)}: {fault}")
        return self._make_model(
            self._tensor(item.parameters, (*path, "parameters")),
            self._tensor(item.buffers, (*path, "buffers")),
        )

    def _part(self, item: Part, path: tuple[str | int, ...]) -> Any:
        if fault := _part_fault(item.values, item.where, item.size):
            raise ValueError(f"{_show(path)}: {fault}")
        where = item.where
        values = self._tensor(item.values, (*path, "values"))
        if isinstance(where, Tensor):
            return self._make_part(item, values, self._tensor(where, (*path, "where")))
        return self._make_part(
            item, values, _text(where, (*path, "where")) if isinstance(where, str) else int(where)
        )


def _text(item: str, path: tuple[str | int, ...]) -> str:
    if not item.isascii():
        try:
            item.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{_show(path)}: {item!r} has lone surrogates, which UTF-8 can't hold") from None
    return str.__str__(item)


def _show(path: tuple[str | int, ...]) -> str:
    return "payload" + "".join(f"[{key!r}]" for key in path)


def _part_fault(values: Any, where: Any, size: Any) -> str | None:
    """What contradicts itself in a part, by dtypes and shapes alone (tensors' or :class:`BufferSpec`'s)."""
    if not isinstance(values, Tensor | BufferSpec) or len(values.shape) != 1:
        return "a part's values are not a vector"
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
        return f"a part's size is {size!r}; accepted: the length of the whole vector"
    count = values.shape[0]
    if count > size:
        return f"a part of {count} values of a vector of {size}"
    if isinstance(where, str):
        return None
    if isinstance(where, int) and not isinstance(where, bool):
        if not 0 <= where <= size - count:
            return f"a part of {count} values from {where} in a vector of {size}"
        return None
    if not isinstance(where, Tensor | BufferSpec):
        return f"a part's where is {type(where).__name__}; accepted: int, str or an integer tensor"
    if where.dtype not in _INDEX_DTYPES:
        return f"a part's indices are {where.dtype}; accepted: {', '.join(map(str, _INDEX_DTYPES))}"
    if tuple(where.shape) != (count,):
        return f"a part of {count} values has indices of shape {tuple(where.shape)}"
    return None


def _model_fault(parameters: Any, buffers: Any) -> str | None:
    for name, vector in (("parameters", parameters), ("buffers", buffers)):
        if not isinstance(vector, Tensor | BufferSpec) or len(vector.shape) != 1:
            return f"a model's {name} are not a vector"
    return None


# First byte -> (kind, bytes that the length takes); first byte -> (bytes that the number takes, signed).
_LENGTHS = {
    **{0xC4 + i: ("bin", 1 << i) for i in range(3)},
    **{0xC7 + i: ("ext", 1 << i) for i in range(3)},
    **{0xD9 + i: ("str", 1 << i) for i in range(3)},
    **{0xDC + i: ("array", 2 << i) for i in range(2)},
    **{0xDE + i: ("map", 2 << i) for i in range(2)},
}
_NUMBERS: dict[int, tuple[int, bool]] = {
    **{0xCC + i: (1 << i, False) for i in range(4)},
    **{0xD0 + i: (1 << i, True) for i in range(4)},
}


class _Reader:
    """Reads the subset of msgpack that :func:`_structure` and :func:`pack_head` write.

    Why not msgpack's own reader: it allocates each array as large as announced before it reads the first
    element, on each of its hundreds of levels, so a megabyte can ask for gigabytes; it takes types that no
    payload has; and its errors are of many classes. Here nothing is allocated ahead of the bytes that fill
    it, and everything wrong is a :class:`FrameError`.

    Args:
        data: the bytes.
        buffers: what the tensors stand for; without them tensors become :class:`BufferSpec`.
    """

    def __init__(self, data: bytes, buffers: Sequence[Tensor] | None) -> None:
        self._data = data
        self._buffers = buffers
        self._items = 0
        self.at = 0
        self.specs: list[BufferSpec] = []

    def whole(self) -> Any:
        """The one value that the bytes hold, with nothing after it."""
        value = self.value(0)
        if self.at != len(self._data):
            raise FrameError(f"{len(self._data) - self.at} bytes after the end of the structure")
        if self._buffers is not None and len(self._buffers) != len(self.specs):
            raise FrameError(f"{len(self._buffers)} buffers for {len(self.specs)} tensors")
        return value

    def take(self, count: int) -> bytes:
        """The next bytes."""
        end = self.at + count
        if end > len(self._data):
            raise FrameError(f"the structure ends {end - len(self._data)} bytes early")
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def value(self, depth: int) -> Any:
        """The next value; ``depth`` containers are open around it."""
        self._items += 1
        if self._items > MAX_ITEMS:
            raise FrameError(f"more than {MAX_ITEMS} values")
        first = self.take(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first < 0x90:
            return self._map(first & 0x0F, depth)
        if first < 0xA0:
            return self._array(first & 0x0F, depth)
        if first < 0xC0:
            return self._text(first & 0x1F)
        if first == 0xC0:
            return None
        if first in (0xC2, 0xC3):
            return first == 0xC3
        if first == 0xCB:
            return struct.unpack(">d", self.take(8))[0]
        if first in _NUMBERS:
            width, signed = _NUMBERS[first]
            return int.from_bytes(self.take(width), "big", signed=signed)
        if 0xD4 <= first <= 0xD8:
            return self._extension(1 << (first - 0xD4), depth)
        if first not in _LENGTHS:
            raise FrameError(f"type byte {first:#04x}, which no payload has")
        kind, width = _LENGTHS[first]
        length = int.from_bytes(self.take(width), "big")
        if kind == "bin":
            return self.take(length)
        if kind == "str":
            return self._text(length)
        if kind == "ext":
            return self._extension(length, depth)
        return self._array(length, depth) if kind == "array" else self._map(length, depth)

    def _text(self, length: int) -> str:
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise FrameError("text that is not UTF-8") from None

    def _deeper(self, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise FrameError(f"nested deeper than {MAX_DEPTH} levels")
        return depth + 1

    def _array(self, length: int, depth: int) -> list[Any]:
        inner = self._deeper(depth)
        return [self.value(inner) for _ in range(length)]

    def _map(self, length: int, depth: int) -> dict[str | int, Any]:
        inner = self._deeper(depth)
        found: dict[str | int, Any] = {}
        for _ in range(length):
            key = self._inner()
            if type(key) is not str and type(key) is not int:
                raise FrameError(f"a key that is {type(key).__name__}, not str or int")
            if key in found:
                raise FrameError(f"key {key!r:.60} twice")
            found[key] = self.value(inner)
        return found

    def _inner(self) -> Any:
        """A key, or what stands in a part or a model: no container, and not counted as a value of its own."""
        self._items -= 1
        return self.value(MAX_DEPTH + 1)

    def _extension(self, length: int, depth: int) -> Any:
        code = self.take(1)[0]
        end = self.at + length
        if code == _TENSOR:
            return self._tensor(length)
        if code not in (_PART, _MODEL):
            raise FrameError(f"extension type {code}, which no payload has")
        if depth > MAX_DEPTH:
            raise FrameError("a part or a model inside a key, a part or a model")
        if code == _PART:
            values, where, size = self._inner(), self._inner(), self._inner()
            fault = _part_fault(values, where, size) or _index_fault(where, size)
        else:
            parameters, buffers = self._inner(), self._inner()
            fault = _model_fault(parameters, buffers)
        if fault is not None:
            raise FrameError(fault)
        if self.at != end:
            raise FrameError("an extension that is not as long as what it holds")
        if self._buffers is None:
            return None
        return Part(values, where, size) if code == _PART else Model(parameters, buffers)

    def _tensor(self, length: int) -> Tensor | BufferSpec:
        dimensions, rest = divmod(length - 1, 8)
        header = self.take(length)
        if rest or not 0 <= dimensions <= MAX_DIMENSIONS or header[0] >= len(DTYPES):
            raise FrameError(f"a tensor with the header {header[:16].hex()}")
        spec = BufferSpec(DTYPES[header[0]], _SHAPES[dimensions].unpack(header)[1:])
        # Strides are 64-bit too, and torch takes an empty dimension as 1 in them.
        if math.prod(max(length, 1) for length in spec.shape) * spec.dtype.itemsize >= 2**63:
            raise FrameError(f"a tensor of shape {spec.shape}")
        place = len(self.specs)
        if place >= MAX_TENSORS:
            raise FrameError(f"more than {MAX_TENSORS} tensors")
        self.specs.append(spec)
        if self._buffers is None:
            return spec
        if place >= len(self._buffers):
            raise FrameError(f"{len(self._buffers)} buffers for more tensors")
        buffer = self._buffers[place]
        if buffer.dtype is not spec.dtype or tuple(buffer.shape) != spec.shape:
            raise FrameError(
                f"buffer {place} is {buffer.dtype} {tuple(buffer.shape)}; {spec.dtype} {spec.shape} is due"
            )
        # What torch does with a bool that is neither 0 nor 1 is undefined.
        if spec.dtype is torch.bool and buffer.numel() > 0 and int(buffer.view(torch.uint8).max()) > 1:
            raise FrameError(f"buffer {place} is torch.bool and has a byte above 1")
        return buffer


def _index_fault(where: Any, size: int) -> str | None:
    """Whether indices lie outside the vector."""
    if not isinstance(where, Tensor) or where.numel() == 0:
        return None
    lowest, highest = (int(end) for end in where.aminmax())
    return (
        None
        if lowest >= 0 and highest < size
        else f"a part's indices run from {lowest} to {highest} in a vector of {size}"
    )
