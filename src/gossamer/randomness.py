"""Keyed randomness: every draw is a function of (experiment seed, purpose, rank, counters).

Nothing is drawn from global state, so what is drawn does not depend on batching, on the number of workers, on
the order of events or on the engine.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

SHARED = -1
"""The rank of draws that are the same on all nodes."""


def key(seed: int, purpose: str, rank: int, *counters: int) -> int:
    """128 bits that depend on every argument and on nothing else."""
    text = "\x1f".join((str(seed), purpose, str(rank), *map(str, counters)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(seed: int, purpose: str, rank: int = SHARED, *counters: int) -> np.random.Generator:
    """A fresh counter-based generator (Philox; Salmon et al., SC 2011) for one key.

    Args:
        seed: the experiment's seed.
        purpose: what is drawn, e.g. ``"partition"``.
        rank: the node that draws, or :data:`SHARED`.
        counters: what tells repeated draws apart, e.g. the round.
    """
    seeds: Any = _Key(key(seed, purpose, rank, *counters))  # an ISeedSequence, which NumPy's types leave out
    return np.random.Generator(np.random.Philox(seeds))


class _Key(ISeedSequence):
    """Philox's key as it is: ``Philox(key=...)`` is the same generator, but asks the system for entropy first."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.array([self._bits & (2**64 - 1), self._bits >> 64], dtype=np.uint64)


def torch_seed(seed: int, purpose: str, rank: int = SHARED, *counters: int) -> int:
    """A seed for ``torch.manual_seed``, where a library draws from torch's own generator."""
    return key(seed, purpose, rank, *counters) & (2**63 - 1)
