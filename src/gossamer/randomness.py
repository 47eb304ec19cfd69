"""Keyed randomness: every draw is a function of (experiment seed, purpose, rank, counters), never of global
state. Draws therefore do not depend on batching, the number of workers, the order of events or the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

SHARED = -1
"""The rank for draws that are the same on all nodes."""

_drawer: ContextVar[str] = ContextVar("drawer", default="algorithm")


@contextmanager
def draws_of(component: str) -> Iterator[None]:
    """Within this context, a node's draws (:meth:`~gossamer.Node.rng`) are keyed by this component, e.g. "wrappers.0", and
    not by the algorithm. So two components that use one purpose draw different numbers."""
    token = _drawer.set(component)
    try:
        yield
    finally:
        _drawer.reset(token)


def node_generator(seed: int, purpose: str, rank: int, *counters: int) -> np.random.Generator:
    """:func:`generator` for the component that draws at a node now."""
    return generator(seed, f"{_drawer.get()}/{purpose}", rank, *counters)


def key(seed: int, purpose: str, rank: int, *counters: int) -> int:
    """128 bits that depend on every argument and on nothing else."""
    return int.from_bytes(_digest(seed, purpose, rank, *counters), "little")


def _digest(seed: int, purpose: str, rank: int, *counters: int) -> bytes:
    text = "\x1f".join((str(seed), purpose, str(rank), *map(str, counters)))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def generator(seed: int, purpose: str, rank: int = SHARED, *counters: int) -> np.random.Generator:
    """A new counter-based generator (Philox; Salmon et al., SC 2011) for one key. ``purpose`` names the draw,
    e.g. ``"partition"``; ``rank`` is the drawing node; counters, e.g. the round, distinguish repeated
    draws."""
    seeds: Any = _Key(
        _digest(seed, purpose, rank, *counters)
    )  # an ISeedSequence, which NumPy's types leave out
    return np.random.Generator(np.random.Philox(seeds))


class _Key(ISeedSequence):
    """Passes a key to Philox unchanged. (``Philox(key=...)`` is the same generator, but first requests
    entropy from the system.)"""

    __slots__ = ("_digest",)

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.frombuffer(self._digest, dtype="<u8").astype(np.uint64, copy=False)


def torch_seed(seed: int, purpose: str, rank: int = SHARED, *counters: int) -> int:
    """A seed for a generator of torch, for libraries that draw from torch's global generator."""
    return key(seed, purpose, rank, *counters) & (2**63 - 1)
