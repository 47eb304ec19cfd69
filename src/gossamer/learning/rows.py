"""The store of parameter vectors: a pool of immutable, reference-counted rows.

Each row is a tensor with its own storage over the pool's memory. The row is in use while any tensor, slice or
view of that storage exists, and is freed with the last one. Snapshots, messages and results thus share rows
without copies.

The pool is one matrix. Its address space is reserved at the start; memory is used when a row is first
written. The lowest free row is taken first, so that rows taken together are adjacent.
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
from jaxtyping import Float
from torch import Tensor

from gossamer.messages.tags import Model

ALIGNMENT = 64
"""Alignment of rows in bytes, which is that of a separate vector."""
_ROW = "_gossamer_row"  # an attribute of the rows on other devices than the CPU
_RESERVED = 4  # address space in multiples of the machine's memory; less if the system refuses it
_WITHOUT_OPTIONS = 2**34  # bytes of it on Windows, halved until it is given

# Python has this name from 3.13 on; the number is its value on Linux.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform.startswith("linux") else 0)


class Rows:
    """Rows of one length P. On devices other than the CPU, torch's caching allocator is the pool.

    Attributes:
        rows: number of rows that have memory.
        peak: largest number of rows in use at the same time.
        memory: all rows, each padded to ``stride`` values [rows, stride]; on the CPU only."""

    def __init__(self, length: int, device: str = "cpu") -> None:
        self.length = length
        self.device = torch.device(device)
        self._pooled = self.device.type == "cpu"
        self.stride = -(-length * 4 // ALIGNMENT) * ALIGNMENT // 4
        self._free: list[int] = []  # a heap
        # Any thread, or the garbage collector, may drop a row's last tensor, so only its number is noted then.
        self._ended: deque[int] = deque()
        self._lock = threading.Lock()
        self._taken: dict[int, _RowReference] = {}
        self.rows = self.peak = 0
        if self._pooled:
            self.memory = _reserve(self.stride)
            self._base = self.memory.ctypes.data

    def fresh(self) -> Float[Tensor, " length"]:
        """A new row, writable until it is shared; its values are undefined."""
        if not self._pooled:
            row = torch.empty(self.length, dtype=torch.float32, device=self.device)
            setattr(row, _ROW, True)
            return row
        with self._lock:
            while self._ended:
                ended = self._ended.popleft()
                del self._taken[ended]
                heapq.heappush(self._free, ended)
            index = heapq.heappop(self._free) if self._free else self._grow()
            # A new view object, which exists exactly as long as the storage is shared.
            view = self.memory[index, : self.length]
            reference = self._taken[index] = _RowReference(view, _end)
            reference.ended, reference.index = self._ended, index
            self.peak = max(self.peak, len(self._taken))
            return torch.from_numpy(view)

    def _grow(self) -> int:
        if self.rows == len(self.memory):
            raise MemoryError(f"the store is full: {self.rows} vectors of {self.length} values")
        self.rows += 1
        return self.rows - 1

    def vector(self, length: int) -> Float[Tensor, " length"]:
        """A new, writable vector of any length; a row if it has the length of one."""
        if length == self.length:
            return self.fresh()
        return torch.empty(length, dtype=torch.float32, device=self.device)

    def store(self, vector: Float[Tensor, " length"]) -> Float[Tensor, " length"]:
        """A row with these values: the vector itself if it is a whole row."""
        stored = self.is_row(vector) if self._pooled else self.owns(vector)
        if stored:
            return vector
        return self.fresh().copy_(vector.detach() if vector.requires_grad else vector)

    def stack(self, vectors: Sequence[Float[Tensor, " n"]]) -> Float[Tensor, "count n"]:
        """Copies of vectors as the rows of a matrix, aligned like the rows of the store."""
        if len(vectors[0]) != self.length:
            return torch.stack(list(vectors))
        padded = torch.empty(len(vectors), self.stride, dtype=torch.float32, device=self.device)
        return torch.stack(list(vectors), out=padded[:, : self.length])

    def stack_models(self, models: Sequence[Model]) -> tuple[Tensor, Tensor]:
        """Copies of parameters [models, P] and buffers [models, B]."""
        parameters = self.stack([model.parameters for model in models])
        return parameters, torch.stack([model.buffers for model in models])

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is a row or, on the CPU, a view of one."""
        if not self._pooled:
            return hasattr(tensor, _ROW)
        if tensor.device.type != "cpu":
            return False
        offset = tensor.untyped_storage().data_ptr() - self._base
        return offset >= 0 and offset // (self.stride * 4) in self._taken

    def is_row(self, tensor: Tensor) -> bool:
        """Whether a tensor is a whole row (or, off the CPU, could be one)."""
        if tensor.dtype is not torch.float32 or tensor.shape != (self.length,):
            return False
        if not self._pooled:
            return tensor.device.type == self.device.type and tensor.is_contiguous()
        if not tensor.is_cpu:
            return False
        # Only a whole row has this many values from the start of a row.
        index, rest = divmod(tensor.data_ptr() - self._base, self.stride * 4)
        return rest == 0 and 0 <= index < self.rows and tensor.is_contiguous()


class _RowReference(weakref.ref[np.ndarray]):
    """Frees a row when the array shared by all its tensors is deleted."""

    __slots__ = ("ended", "index")

    ended: deque[int]
    index: int


def _end(reference: Any) -> None:  # also called at interpreter shutdown, when globals are gone
    reference.ended.append(reference.index)


def _reserve(stride: int) -> Float[np.ndarray, "rows stride"]:
    """Address space for more rows than the machine can hold; pages that were never written take no memory."""
    options: dict[str, int] = {}
    if hasattr(mmap, "MAP_ANONYMOUS"):
        size = _RESERVED * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        options["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    else:  # Windows, which reserves no more than it could give
        size = _WITHOUT_OPTIONS
    while True:
        try:
            memory = mmap.mmap(-1, size, **options)
            break
        except OSError:
            size //= 2
            if size < stride * 4:
                raise
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    count = size // (stride * 4)
    return np.frombuffer(memory, dtype=np.float32, count=count * stride).reshape(count, stride)
