"""What a run sets in its process, and sets back when it is over."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_settings(threads: int) -> Iterator[None]:
    """torch's threads and generator for the run, and the caller's again after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


OBJECTS_A_NODE = 200
"""More new objects than a node holds at any time of a round: messages, tasks, futures, and what they hold."""


@contextmanager
def calm_collector(nodes: int) -> Iterator[None]:
    """Python's cyclic collector looks at what is new, and less often: the nodes live as long as the run, and walking
    them again and again can take longer than all the events. What a round makes and lets go of shall not call it.

    Args:
        nodes: their number.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000 + OBJECTS_A_NODE * nodes, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
