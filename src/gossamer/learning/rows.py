"""The store of parameter vectors: a pool of immutable, reference-counted rows.

Each row is a tensor with a separate storage over the pool's memory. The row is taken while any tensor, slice or view of that
storage exists, and free again when the last one goes. So snapshots, messages and results share rows without copies.

The pool is one matrix, so that many rows can be read by number in one call. Its address space is reserved at once; memory is
used when a row is first written. The lowest free row is taken first, so that rows taken together are adjacent.
"""

from __future__ import annotations

import heapq
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gossamer.messages.tags import Model

ALIGNMENT = 64
"""Rows begin at multiples of this many bytes, so that kernels see the same alignment as in a separate vector."""
SPREAD = 1.5  # largest size of the store, in multiples of the rows in use, for the sake of adjacent rows
SEARCHED = 8  # free rows that are searched for adjacent ones, in multiples of those that are wanted
_RESERVED = 4  # address space in multiples of the machine's memory; less where the system refuses that

# Python has this name from 3.13 on; the number is its value on Linux.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform.startswith("linux") else 0)


class Rows:
    """Rows of one length P; on other devices than the CPU, torch's caching allocator is the pool.

    Attributes:
        rows: number of rows that have memory.
        peak: largest number of rows that were taken at once.
        matrix: all rows, by number [rows, P]; on the CPU only."""

    def __init__(self, length: int, device: str = "cpu") -> None:
        self.length = length
        self.device = torch.device(device)
        self._pooled = self.device.type == "cpu"
        self._stride = -(-length * 4 // ALIGNMENT) * ALIGNMENT // 4
        self._free: list[int] = []  # a heap
        # Any thread, or the garbage collector, may drop a row's last tensor. There, its number is only noted.
        self._ended: deque[int] = deque()
        self._lock = threading.Lock()
        self._taken: dict[int, _RowReference] = {}
        self.rows = self.peak = 0
        if self._pooled:
            self._array = _reserve(self._stride)
            self._base = self._array.ctypes.data
            self.matrix = torch.from_numpy(self._array)[:, :length]

    @property
    def taken(self) -> int:
        """Rows that are in use now."""
        return len(self._taken) - len(self._ended)

    def fresh(self) -> Float[Tensor, " length"]:
        """A new row, writable until it is shared; its values are undefined."""
        if not self._pooled:
            return torch.empty(self.length, device=self.device)
        with self._lock:
            self._collect()
            return self._row(heapq.heappop(self._free) if self._free else self._grow(1))

    def vector(self, length: int) -> Float[Tensor, " length"]:
        """A new, writable vector of any length; a row if it is as long as one."""
        return self.fresh() if length == self.length else torch.empty(length, device=self.device)

    def store(self, vector: Float[Tensor, " length"]) -> Float[Tensor, " length"]:
        """A row of these values: the vector itself if it is a whole row."""
        return vector if self.number(vector) is not None else self.fresh().copy_(vector.detach())

    def block(self, count: int) -> tuple[list[Tensor], Float[Tensor, "count length"]]:
        """New rows, and one writable matrix of their values, over the rows themselves if they are adjacent; :meth:`filled`
        gives the rows their values."""
        if not self._pooled:
            matrix = torch.empty(count, self.length, device=self.device)
            return [row.data for row in matrix.unbind()], matrix  # (plain rows would share a version counter)
        with self._lock:
            self._collect()
            numbers = self._together(count)
            rows = [self._row(index) for index in numbers]
        first = numbers[0]
        if numbers[-1] - first != count - 1:
            return rows, self._apart(count)
        # A separate tensor, since slices of the matrix would share a version counter.
        return rows, torch.from_numpy(self._array[first : first + count, : self.length])

    def _collect(self) -> None:
        while self._ended:
            index = self._ended.popleft()
            del self._taken[index]
            heapq.heappush(self._free, index)

    def _grow(self, count: int) -> int:
        first = self.rows
        if first + count > len(self._array):
            raise MemoryError(f"the store is full: {first} vectors of {self.length} values")
        self.rows += count
        return first

    def _row(self, index: int) -> Float[Tensor, " length"]:
        # A new view object, which exists exactly as long as anything shares the storage.
        view = self._array[index, : self.length]
        reference = self._taken[index] = _RowReference(view, _end)
        reference.ended, reference.index = self._ended, index
        self.peak = max(self.peak, len(self._taken))
        return torch.from_numpy(view)

    def _together(self, count: int) -> list[int]:
        """Numbers of free rows, ascending: the lowest ones if they are adjacent, else the first adjacent ones near these,
        else new ones while the store is not much larger than the rows in use, else the lowest ones."""
        free = self._lowest(count)
        if len(free) == count and free[-1] - free[0] == count - 1:
            return free
        free += self._lowest((SEARCHED - 1) * count)  # not all: there may be a hundred thousand
        ends = enumerate(zip(free, free[count - 1 :], strict=False))
        at = next((place for place, (first, last) in ends if last - first == count - 1), 0)
        found, left = free[at : at + count], free[:at] + free[at + count :]
        small = self.rows + count <= SPREAD * (len(self._taken) + count)
        if len(found) < count or (found[-1] - found[0] != count - 1 and small):
            first = self._grow(count)
            found, left = list(range(first, first + count)), free
        for index in left:
            heapq.heappush(self._free, index)
        return found

    def _lowest(self, count: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]

    def filled(self, rows: list[Tensor], matrix: Float[Tensor, "count length"]) -> list[Tensor]:
        """The rows of a :meth:`block`, or any vectors, with the values of a matrix."""
        for row, values in zip(rows, matrix, strict=True):
            if row.data_ptr() == values.data_ptr():
                break
            row.copy_(values)
        return rows

    def stack(self, vectors: Sequence[Float[Tensor, " length"]]) -> Float[Tensor, "count length"]:
        """Vectors as the rows of a matrix, to be read only: no copy if they are adjacent."""
        numbers = self.numbers(vectors)
        if numbers is not None and isinstance(which := select(numbers), slice):
            return self.matrix[which]
        return torch.stack(list(vectors), out=self._apart(len(vectors)))

    def stack_models(self, models: Sequence[Model]) -> tuple[Tensor, Tensor]:
        """Parameters [models, P] and buffers [models, B], to be read only."""
        parameters = self.stack([model.parameters for model in models])
        return parameters, torch.stack([model.buffers for model in models])

    def _apart(self, count: int) -> Float[Tensor, "count length"]:
        # With the store's distance between rows.
        return torch.empty(count, self._stride, device=self.device)[:, : self.length]

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is a row or a view of one."""
        if not self._pooled or tensor.device.type != "cpu":
            return False
        offset = tensor.untyped_storage().data_ptr() - self._base
        return offset >= 0 and offset // (self._stride * 4) in self._taken

    def number(self, tensor: Tensor) -> int | None:
        """The number of a whole row in :attr:`matrix`; None for any other tensor."""
        if not self._pooled:
            return None
        # Only a whole row has this many values from the start of a row.
        index, rest = divmod(tensor.data_ptr() - self._base, self._stride * 4)
        whole = rest == 0 and 0 <= index < self.rows and tensor.numel() == self.length and tensor.dim() == 1
        return index if whole and tensor.dtype is torch.float32 and tensor.is_contiguous() else None

    def numbers(self, tensors: Sequence[Tensor]) -> Int[np.ndarray, " n"] | None:
        """The numbers of whole rows; None if any of the tensors is not a whole row."""
        known = {id(tensor): tensor for tensor in tensors}  # since many nodes mix the same vector
        numbers = {key: self.number(tensor) for key, tensor in known.items()}
        if None in numbers.values():
            return None
        return np.array([numbers[id(tensor)] for tensor in tensors], dtype=np.int64)

    def is_row(self, tensor: Tensor) -> bool:
        """Whether a tensor is a whole row (or, off the CPU, could be one)."""
        if self._pooled:
            return self.number(tensor) is not None
        alike = tensor.dtype is torch.float32 and tensor.device.type == self.device.type
        return alike and tensor.shape == (self.length,)


def select(numbers: Int[np.ndarray, " n"]) -> slice | Tensor:
    """An index of some rows of the matrix: a slice if they are adjacent, as they mostly are."""
    first, last = int(numbers[0]), int(numbers[-1])
    if np.array_equal(numbers, np.arange(first, last + 1)):
        return slice(first, last + 1)
    return torch.from_numpy(numbers)


class _RowReference(weakref.ref[np.ndarray]):
    """Frees a row when the array that all its tensors hold goes."""

    ended: deque[int]
    index: int


def _end(reference: Any) -> None:  # (at the interpreter's end too, when globals are gone)
    reference.ended.append(reference.index)


def _reserve(stride: int) -> Float[np.ndarray, "rows stride"]:
    """Address space for more rows than the machine can hold; pages that were never written take no memory."""
    size = _RESERVED * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    while True:
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
            break
        except OSError:
            size //= 2
            if size < stride * 4:
                raise
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    count = size // (stride * 4)
    return np.frombuffer(memory, dtype=np.float32, count=count * stride).reshape(count, stride)
