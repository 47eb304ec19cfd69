"""The mini-batches of a node: a keyed stream of permutations of its samples, split into batches."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from gossamer.errors import BadInput
from gossamer.randomness import generator


class BatchStream:
    """The mini-batches of one node. Batch k is a function of only (seed, rank, k).

    The node's samples [n], indices in the training set, are shuffled in each epoch, and the sequence of
    epochs is split into batches of equal size. Every sample is seen once per epoch, and a batch may straddle
    two epochs. A ``batch_size`` above n counts as n; ``"full"`` is all n samples, unshuffled."""

    __slots__ = ("_epoch", "_full", "_rank", "_samples", "_seed", "batch_size")

    def __init__(
        self, seed: int, rank: int, samples: Int[np.ndarray, " n"], batch_size: int | Literal["full"]
    ) -> None:
        self._seed, self._rank = seed, rank
        self._samples = samples
        self._full = batch_size == "full"
        self.batch_size = len(samples) if batch_size == "full" else min(int(batch_size), len(samples))
        self._epoch: tuple[int, Int[np.ndarray, " n"]] | None = None

    def batch(self, number: int) -> Int[Tensor, " batch"]:
        """Indices of batch ``number`` (from 0) in the training set, int64 [batch size]. BadInput if the node
        has no samples."""
        if len(self._samples) == 0:
            raise BadInput(f"partition: node {self._rank} has no samples to train on")
        if self._full:
            return torch.from_numpy(self._samples)
        start, pieces = number * self.batch_size, []
        stop = start + self.batch_size
        while start < stop:
            epoch, offset = divmod(start, len(self._samples))
            piece = self._permutation(epoch)[offset : offset + stop - start]
            pieces.append(piece)
            start += len(piece)
        return torch.from_numpy(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))

    def _permutation(self, epoch: int) -> Int[np.ndarray, " n"]:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, generator(self._seed, "batch", self._rank, epoch).permutation(self._samples)
        return self._epoch[1]
