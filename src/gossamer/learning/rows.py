"""The store of parameter vectors: a pool of immutable, reference-counted rows.

A row is a tensor with a storage of its own over the pool's memory. While any tensor, slice or view of that
storage is alive the row is taken; when the last one goes, the row is free again. So snapshots, messages and
results share rows without copies, and memory is not handed back and taken again at every step.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

ALIGNMENT = 64
"""Bytes. Rows begin at multiples of it, so that kernels see the offsets that they see in a vector of its
own."""

BLOCK_BYTES = 16 * 2**20
"""The pool grows by this much (by one row at least)."""


class Rows:
    """Rows of one length.

    Args:
        length: values a row, P.
        device: where; on other devices than the CPU, torch's own caching allocator is the pool.
        block_bytes: the pool grows by this much, by one row at least.

    Attributes:
        rows: rows in the pool.
        peak: the most rows that were taken at once.
    """

    def __init__(self, length: int, device: str = "cpu", block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self.length = length
        self._device = torch.device(device)
        self._stride = -(-length * 4 // ALIGNMENT) * ALIGNMENT // 4
        self._free: list[Float[np.ndarray, " stride"]] = []
        self._live: set[int] = set()
        self.rows = 0
        self.peak = 0

    def fresh(self) -> Float[Tensor, " length"]:
        """A new row, writable until it is shared; its values are undefined."""
        if self._device.type != "cpu":
            return torch.empty(self.length, device=self._device)
        if not self._free:
            self._grow()
        memory = self._free.pop()
        # A view object of its own, whose end is the end of everything that shares the storage.
        view = memory[: self.length]
        row = torch.from_numpy(view)
        address = view.ctypes.data
        self._live.add(address)
        self.peak = max(self.peak, len(self._live))
        weakref.finalize(view, self._release, memory, address).atexit = False
        return row

    def store(self, vector: Float[Tensor, " length"]) -> Float[Tensor, " length"]:
        """A row of these values: the same object if it is a whole row already."""
        if self.owns(vector) and vector.storage_offset() == 0:
            return vector
        return self.fresh().copy_(vector.detach())

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is a row or a view of one."""
        return tensor.untyped_storage().data_ptr() in self._live

    def _release(self, memory: Float[np.ndarray, " stride"], address: int) -> None:
        self._live.discard(address)
        self._free.append(memory)

    def _grow(self) -> None:
        count = max(1, self._block_bytes // (self._stride * 4))
        raw = np.empty(count * self._stride + ALIGNMENT // 4, dtype=np.float32)
        skip = (-raw.ctypes.data % ALIGNMENT) // 4
        block = raw[skip : skip + count * self._stride].reshape(count, self._stride)
        self._free.extend(block)
        self.rows += count
