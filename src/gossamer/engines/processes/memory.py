"""Memory that all processes of a run share: snapshots of models, and locks that end with their holder."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gossamer.messages import Model

SNAPSHOTS = 2
"""Evaluations of a node that may wait for the other nodes' ones, at a time."""
FINAL = SNAPSHOTS
"""The slot of the models at the end."""


def shared_file() -> int:
    """A file without a name, in memory where the system can; gives its descriptor, which children may
    inherit."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gossamer", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.set_inheritable(descriptor, True)
    return descriptor


class SharedModels:
    """The models of all nodes, in some slots: [slots, nodes, P + B] float32. Pages that nobody writes take no
    memory.

    Args:
        descriptor: a file from :func:`shared_file`.
        nodes: number of nodes.
        parameters: P.
        buffers: B.
    """

    def __init__(self, descriptor: int, nodes: int, parameters: int, buffers: int) -> None:
        self._parameters = parameters
        width = parameters + buffers
        size = (SNAPSHOTS + 1) * nodes * width * 4
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        values = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.float32)
        self._models = torch.from_numpy(values).view(SNAPSHOTS + 1, nodes, width)

    def write(self, slot: int, rank: int, model: Model) -> None:
        """Put a node's model into a slot."""
        row = self._models[slot, rank]
        row[: self._parameters] = model.parameters
        row[self._parameters :] = model.buffers

    def read(self, slot: int, rank: int) -> Model:
        """A copy of a node's model."""
        row = self._models[slot, rank].clone()
        return Model(row[: self._parameters], row[self._parameters :])

    def all(self, slot: int) -> tuple[Float[Tensor, "nodes params"], Float[Tensor, "nodes buffers"] | None]:
        """Copies of all nodes' parameters, and buffers where there are any."""
        models = self._models[slot].clone()
        buffers = models[:, self._parameters :]
        return models[:, : self._parameters].contiguous(), buffers if buffers.shape[1] else None


@contextmanager
def one_of(descriptor: int, places: int, first: int) -> Iterator[None]:
    """Hold one of some places; waits until one is free.

    A place is a record lock on one byte of a file that all share. The system frees it when its holder dies,
    however it dies.

    Args:
        descriptor: the shared file.
        places: how many processes may be inside at once.
        first: which place to wait for when all are taken.
    """
    place = _free_place(descriptor, places)
    if place is None:
        place = first % places
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, place)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, place)


def _free_place(descriptor: int, places: int) -> int | None:
    for place in range(places):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except BlockingIOError:
            continue
        return place
    return None
