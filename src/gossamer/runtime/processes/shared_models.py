"""The models of all nodes in a file that a run's processes share."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from gossamer.messages import raw
from gossamer.messages.tags import Model

SNAPSHOTS = 2
"""Evaluations of a node that may wait for the other nodes' ones, at a time."""
FINAL = SNAPSHOTS
"""The slot of the models at the end."""


class SharedModels:
    """The models of all nodes, in some slots: [slots, nodes, P + B] float32. A slot that was not written takes no memory.

    It is not mapped: a mapping takes page tables in each process, and a thousand nodes write a few rows each.

    Args:
        descriptor: a file from :func:`~gossamer.runtime.processes.system.shared_file`.
        nodes: number of nodes.
        parameters: P.
        buffers: B.
    """

    def __init__(self, descriptor: int, nodes: int, parameters: int, buffers: int) -> None:
        self._descriptor, self._nodes = descriptor, nodes
        self._parameters, self._width = parameters, parameters + buffers
        size = self._start(SNAPSHOTS + 1, 0)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)

    def write(self, slot: int, rank: int, model: Model) -> None:
        start = self._start(slot, rank)
        for vector in model:
            _transfer(os.pwrite, self._descriptor, vector.contiguous(), start)
            start += vector.nbytes

    def read(self, slot: int, rank: int) -> Model:
        row = torch.empty(self._width)
        _transfer(_pread, self._descriptor, row, self._start(slot, rank))
        return Model(row[: self._parameters], row[self._parameters :])

    def read_bytes(self, slot: int, rank: int) -> bytes:
        """A node's model, as it travels between machines."""
        return os.pread(self._descriptor, 4 * self._width, self._start(slot, rank))

    def write_bytes(self, slot: int, rank: int, data: bytes) -> None:
        """Put a model that has travelled into a slot.

        Raises:
            ValueError: for one of another length, or no slot.
        """
        if len(data) != 4 * self._width or not 0 <= slot <= SNAPSHOTS or not 0 <= rank < self._nodes:
            raise ValueError(f"a model of {len(data)} bytes of node {rank} for slot {slot}")
        os.pwrite(self._descriptor, data, self._start(slot, rank))

    def all(self, slot: int) -> tuple[Float[Tensor, "nodes params"], Float[Tensor, "nodes buffers"] | None]:
        """Copies of all nodes' parameters, and buffers where there are any."""
        models = torch.empty(self._nodes, self._width)
        _transfer(_pread, self._descriptor, models, self._start(slot, 0))
        buffers = models[:, self._parameters :]
        return models[:, : self._parameters].contiguous(), buffers if buffers.shape[1] else None

    def _start(self, slot: int, rank: int) -> int:
        return (slot * self._nodes + rank) * self._width * 4


def _transfer(
    move: Callable[[int, memoryview, int], int], descriptor: int, tensor: Tensor, start: int
) -> None:
    """Write or read a whole contiguous tensor; the system may do it in parts."""
    left = raw(tensor)
    while left:
        count = move(descriptor, left, start)
        if count == 0:
            raise OSError(f"the shared models end {left.nbytes} bytes early")
        left, start = left[count:], start + count


def _pread(descriptor: int, into: memoryview, start: int) -> int:
    return os.preadv(descriptor, [into], start)
