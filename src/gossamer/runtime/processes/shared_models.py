"""The models of all nodes in a file that a run's processes share."""

from __future__ import annotations

import os

import torch
from jaxtyping import Float
from torch import Tensor

from gossamer.messages import raw
from gossamer.messages.tags import Model

SNAPSHOTS = 2
"""Snapshots of a node that the coordinator may still have to read, at a time."""
FINAL = SNAPSHOTS
"""The slot of the models at the end."""


class SharedModels:
    """The models of all nodes, of P parameters and B buffers each, in some slots: [slots, nodes, P + B] float32, in a file
    from :func:`~gossamer.runtime.processes.system.shared_file`. A slot that was not written takes no memory.

    It is not mapped: a mapping takes page tables in each process, and a thousand nodes write a few rows each.
    """

    def __init__(self, descriptor: int, nodes: int, parameters: int, buffers: int) -> None:
        self._descriptor, self._nodes = descriptor, nodes
        self._parameters, self._width = parameters, parameters + buffers
        size = self._start(SNAPSHOTS + 1, 0)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)

    def write(self, slot: int, rank: int, model: Model) -> None:
        self.write_bytes(slot, rank, b"".join(raw(vector.contiguous()) for vector in model))

    def read(self, slot: int, rank: int) -> Model:
        row, start = torch.empty(self._width), self._start(slot, rank)
        left = raw(row)
        while left:  # the system may do it in parts
            if not (count := os.preadv(self._descriptor, [left], start)):
                raise OSError(f"the shared models end {left.nbytes} bytes early")
            left, start = left[count:], start + count
        return Model(row[: self._parameters], row[self._parameters :])

    def read_bytes(self, slot: int, rank: int) -> bytes:
        """A node's model, as it travels between machines."""
        return b"".join(map(raw, self.read(slot, rank)))

    def write_bytes(self, slot: int, rank: int, data: bytes) -> None:
        """Put a model that has travelled into a slot; ValueError for one of another length, or no slot."""
        if len(data) != 4 * self._width or not 0 <= slot <= SNAPSHOTS:
            raise ValueError(f"a model of {len(data)} bytes of node {rank} for slot {slot}")
        left, start = memoryview(data), self._start(slot, rank)
        while left:
            count = os.pwrite(self._descriptor, left, start)
            left, start = left[count:], start + count

    def all(self, slot: int) -> tuple[Float[Tensor, "nodes params"], Float[Tensor, "nodes buffers"] | None]:
        """Copies of all nodes' parameters, and buffers where there are any."""
        models = [self.read(slot, rank) for rank in range(self._nodes)]
        parameters, buffers = (torch.stack(vectors) for vectors in zip(*models, strict=True))
        return parameters, buffers if buffers.shape[1] else None

    def _start(self, slot: int, rank: int) -> int:
        return (slot * self._nodes + rank) * self._width * 4
