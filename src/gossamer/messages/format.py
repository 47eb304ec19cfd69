"""What the two sides of the wire format agree on: limits, dtypes, and what contradicts itself."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.messages.tags import Coded, Part

MAX_DEPTH = 32
"""Levels of containers in a payload."""
MAX_ITEMS = 65_536
"""Values in a payload, keys not counted; limited because an empty list is one byte to send and 56 to hold."""
MAX_TENSORS = 4_096
"""Tensors in a payload, those of parts and models included."""
MAX_DIMENSIONS = 32

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

CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
SHAPES = tuple(struct.Struct(f"<B{dimensions}Q") for dimensions in range(MAX_DIMENSIONS + 1))
"""By number of dimensions: a dtype's code, and the shape."""
TENSOR, PART, MODEL, PARAMETERS, CODED = 1, 2, 3, 4, 5
"""The extension types."""

_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


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


def part_fault(values: Any, where: Any, size: Any) -> str | None:
    """What contradicts itself in a part, by dtypes and shapes alone (tensors' or :class:`BufferSpec`'s)."""
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
    """What contradicts itself in a model, likewise."""
    for name, vector in (("parameters", parameters), ("buffers", buffers)):
        if name == "parameters" and isinstance(vector, Part | Coded):
            continue
        if not isinstance(vector, Tensor | BufferSpec) or len(vector.shape) != 1:
            return f"a model's {name} are not a vector"
    return None


def raw(buffer: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; an empty tensor has none."""
    return buffer.reshape(-1).view(torch.uint8).numpy().data
