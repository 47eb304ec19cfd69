"""Threads that share a simulation's computation. Each uses one torch thread, so that results do not depend on the number of
threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from gossamer.cores import cores

# Maximum bytes in a chunk of nodes or models, and their maximum number: limited by a CPU's cache, and large
# on a GPU for few kernel launches.
LIMITS = {"cpu": (8 << 20, 256), "gpu": (1 << 30, 8192)}

T = TypeVar("T")
R = TypeVar("R")


class ThreadPool:
    """The calling thread and further ones, ``count`` in total (None is one per core), each with ``threads``
    torch threads. The calling thread calls ``between`` after each of its items."""

    def __init__(
        self, count: int | None = None, threads: int = 1, between: Callable[[], None] = lambda: None
    ) -> None:
        self.count = cores() if count is None else count
        self.between = between
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._local = threading.local()

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """``[function(item) for item in items]``, shared among the threads. The first exception is raised
        when all have ended."""
        inputs = list(items)
        numbers = iter(range(len(inputs)))
        results: list[Any] = [None] * len(inputs)

        def work(between: Callable[[], None]) -> None:
            for number in numbers:  # threads can share an iterator over a range: next() on it is atomic
                results[number] = function(inputs[number])
                between()

        helpers = min(self.count, len(inputs)) - 1
        if helpers > 0 and self._pool is None:
            options = "compute", torch.set_num_threads, (self._threads,)
            self._pool = ThreadPoolExecutor(self.count - 1, *options)
        futures = [self._pool.submit(work, lambda: None) for _ in range(helpers) if self._pool]
        try:
            work(self.between)
        finally:
            errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return results

    def own(self, make: Callable[[], T]) -> T:
        """This thread's instance, created at the first call."""
        instances: dict[Callable[[], T], T] = self._local.__dict__.setdefault("made", {})
        if make not in instances:
            instances[make] = make()
        return instances[make]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread in the calling thread, as in the threads of a pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chunks(items: Sequence[T], largest: int) -> list[Sequence[T]]:
    """Split items into chunks of ``largest`` and a remainder."""
    return [items[start : start + largest] for start in range(0, len(items), largest)]


def chunk_size(item_bytes: int, device_type: str) -> int:
    """The number of items of this many bytes that one thread computes at once."""
    max_bytes, max_items = LIMITS["cpu" if device_type == "cpu" else "gpu"]
    return min(max(max_bytes // item_bytes, 1), max_items)
