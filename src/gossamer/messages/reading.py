"""Reads payloads: the limits of the wire format, and decoding. Any invalid input raises :class:`FrameError`."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.messages.tags import Coded, Model, Part, Payload

MAX_DEPTH = 32
"""Levels of containers in a payload."""
MAX_ITEMS = 65_536
"""Values in a payload without keys; limited because an empty list is one byte to send and 56 to hold."""
MAX_TENSORS = 4_096
"""Tensors in a payload, those of parts and models included."""
MAX_DIMENSIONS = 32

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
"""The dtypes that can be sent. A dtype's code is its index: append only. (torch calls complex32 experimental.)"""
SHAPES = tuple(struct.Struct(f"<B{dimensions}Q") for dimensions in range(MAX_DIMENSIONS + 1))
"""By number of dimensions: a dtype's code, and the shape."""
TENSOR, PART, MODEL, PARAMETERS, CODED = 1, 2, 3, 4, 5
"""The extension types."""

_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class FrameError(GossamerError, ValueError):
    """Bytes from a socket or a file that are not what they should be; the message is one line."""


class BufferSpec(NamedTuple):
    """The dtype and shape of one buffer that follows a structure."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


def part_fault(values: Any, where: Any, size: Any) -> str | None:
    """The contradiction in a part, by dtypes and shapes alone (tensors' or :class:`BufferSpec`'s)."""
    if not isinstance(values, Tensor | BufferSpec) or len(values.shape) != 1:
        return "a part's values are not a vector"
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
        return f"a part's size is {size!r}; accepted: the length of the whole vector"
    count = values.shape[0]
    if count > size:
        return f"a part of {count} values of a vector of {size}"
    if not isinstance(where, Tensor | BufferSpec) or where.dtype not in _INDEX_DTYPES:
        found = where.dtype if isinstance(where, Tensor | BufferSpec) else type(where).__name__
        return f"a part's indices are {found}; accepted: {', '.join(map(str, _INDEX_DTYPES))}"
    if tuple(where.shape) != (count,):
        return f"a part of {count} values has indices of shape {tuple(where.shape)}"
    return None


def model_fault(parameters: Any, buffers: Any) -> str | None:
    """The contradiction in a model, likewise."""
    for name, vector in (("parameters", parameters), ("buffers", buffers)):
        whole = isinstance(vector, Tensor | BufferSpec) and len(vector.shape) == 1
        if not (whole or (name == "parameters" and isinstance(vector, Part | Coded))):
            return f"a model's {name} are not a vector"
    return None


def raw(buffer: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; an empty tensor has none."""
    return buffer.reshape(-1).view(torch.uint8).numpy().data


def decode(structure: bytes, buffers: Sequence[Tensor]) -> Payload:
    """The payload of a structure and its buffers; its tensors are the buffers themselves.

    Args:
        structure: as in :class:`Encoded`.
        buffers: tensors of the dtypes and shapes that :func:`describe` gives.

    Raises:
        FrameError: for anything that :func:`encode` would not have written, and for other buffers.
    """
    return Reader(structure, buffers).whole()


def describe(structure: bytes) -> list[BufferSpec]:
    """The (dtype, shape) of every buffer that follows a structure, without allocating any.

    Raises:
        FrameError: for anything that :func:`encode` would not have written.
    """
    reader = Reader(structure, None)
    reader.whole()
    return reader.specs


# First byte -> (kind, bytes that the length takes); first byte -> (bytes that the number takes, signed).
_LENGTHS = {
    **{0xC4 + i: ("bin", 1 << i) for i in range(3)},
    **{0xC7 + i: ("ext", 1 << i) for i in range(3)},
    **{0xD9 + i: ("str", 1 << i) for i in range(3)},
    **{0xDC + i: ("array", 2 << i) for i in range(2)},
    **{0xDE + i: ("map", 2 << i) for i in range(2)},
}
_NUMBERS = {
    **{0xCC + i: (1 << i, False) for i in range(4)},
    **{0xD0 + i: (1 << i, True) for i in range(4)},
}


class Reader:
    """Reads the subset of msgpack that :mod:`gossamer.messages.writing` writes.

    msgpack's own reader allocates each array as large as announced before it reads the first element, on each of its
    hundreds of levels, so a megabyte can ask for gigabytes; it also takes types that no payload has. Here nothing is
    allocated ahead of the bytes that fill it, and everything wrong is a :class:`FrameError`.

    Args:
        data: the bytes.
        buffers: of the tensors; without them tensors become :class:`BufferSpec`.
    """

    def __init__(self, data: bytes, buffers: Sequence[Tensor] | None) -> None:
        self._data = data
        self._buffers = buffers
        self._items = 0
        self._open: set[int] = set()  # extensions that are being read: none holds its like
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

    def _inner(self, depth: int = MAX_DEPTH + 1) -> Any:
        """A key, or a component of a part or a model, which does not count as a value."""
        self._items -= 1
        return self.value(depth)

    def _extension(self, length: int, depth: int) -> Any:
        code = self.take(1)[0]
        end = self.at + length
        if code == TENSOR:
            return self._tensor(length)
        if not PART <= code <= CODED:
            raise FrameError(f"extension type {code}, which no payload has")
        if depth > MAX_DEPTH:
            raise FrameError("a part or a model inside a key or a part")
        if code in self._open:
            raise FrameError("a model inside a model")
        self._open.add(code)
        value: Any
        fault = None
        if code == PARAMETERS:
            value = Model(self._tensor(length))  # type: ignore[arg-type]
            fault = model_fault(*value)
        elif code == PART:
            value = Part(self._inner(), self._inner(), self._inner())
            fault = part_fault(value.values, value.where, value.size) or _index_fault(value)
        elif code == MODEL:
            parameters = self._inner(min(depth + 1, MAX_DEPTH))
            value = Model(parameters, self._inner()) if self.at < end else Model(parameters)
            fault = model_fault(*value)
        else:
            value = Coded(self.value(min(depth + 1, MAX_DEPTH)))
        self._open.discard(code)
        if fault is not None:
            raise FrameError(fault)
        if self.at != end:
            raise FrameError("an extension that is not as long as its content")
        return value

    def _tensor(self, length: int) -> Tensor | BufferSpec:
        dimensions, rest = divmod(length - 1, 8)
        header = self.take(length)
        if rest or not 0 <= dimensions <= MAX_DIMENSIONS or header[0] >= len(DTYPES):
            raise FrameError(f"a tensor with the header {header[:16].hex()}")
        spec = BufferSpec(DTYPES[header[0]], SHAPES[dimensions].unpack(header)[1:])
        # Strides are 64-bit too, and torch takes an empty dimension as 1 in them.
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
        if buffer.dtype is not spec.dtype or tuple(buffer.shape) != spec.shape:
            raise FrameError(
                f"buffer {number} is {buffer.dtype} {tuple(buffer.shape)}; {spec.dtype} {spec.shape} is due"
            )
        # A bool that is neither 0 nor 1 has undefined effects in torch.
        if spec.dtype is torch.bool and buffer.numel() > 0 and int(buffer.view(torch.uint8).max()) > 1:
            raise FrameError(f"buffer {number} is torch.bool and has a byte above 1")
        return buffer


def _index_fault(part: Part) -> str | None:
    if not isinstance(part.where, Tensor) or part.where.numel() == 0:
        return None
    lowest, highest = (int(end) for end in part.where.aminmax())
    if lowest >= 0 and highest < part.size:
        return None
    return f"a part's indices run from {lowest} to {highest} in a vector of {part.size}"
