"""The workers of a run, as the coordinator sees them: one on this machine, or some that join from others.

A worker takes commands about nodes, and tells what becomes of them (``protocol``: coordinator -> worker, and back). The
worker of an ordinary run is the coordinator's own process, which forks the nodes itself: its commands and events are calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from gossamer.runtime.processes.protocol import (
    Addresses,
    Fork,
    Listen,
    Listening,
    PoolEvent,
    Signal,
    Tell,
    ToNode,
)
from gossamer.runtime.processes.worker.pool import ProcessPool

RESTART_S = 10.0
"""Seconds in which a node's port has to be free again, and a process to be had, when it is restarted."""


@runtime_checkable
class Workers(Protocol):
    """Where the nodes of a run are."""

    def assemble(self, ranks: Collection[int], wait: Callable[[], None]) -> None:
        """Give each of these ranks an address, calling ``wait`` while workers are still to come."""

    def has_room(self, rank: int) -> bool:
        """Whether a node can be started now."""

    def fork(self, rank: int, incarnation: int, crashes: Sequence[int], wait_s: float) -> None:
        """Start a node."""

    def tell(self, rank: int, message: ToNode) -> None:
        """Send a node a message."""

    def signal(self, rank: int, number: int) -> None:
        """Send a node's process a signal."""

    def look(self) -> None:
        """See to what is due."""

    def close(self, reason: str) -> None:
        """End all nodes."""


class LocalWorkers:
    """This process's own nodes.

    Args:
        pool: makes the pool, given what takes its events.
        emit: takes events.
    """

    def __init__(
        self, pool: Callable[[Callable[[PoolEvent], None]], ProcessPool], emit: Callable[[PoolEvent], None]
    ) -> None:
        self._pool, self._emit = pool(self._take), emit

    def _take(self, event: PoolEvent) -> None:
        if isinstance(event, Listening):
            self._pool.do(Addresses(event.nodes))
        else:
            self._emit(event)

    def assemble(self, ranks: Collection[int], wait: Callable[[], None]) -> None:
        """Give each of these ranks an address."""
        self._pool.do(Listen(sorted(ranks)))

    def has_room(self, rank: int) -> bool:
        """Whether a node can be started now."""
        return True

    def fork(self, rank: int, incarnation: int, crashes: Sequence[int], wait_s: float) -> None:
        """Start a node."""
        self._pool.do(Fork(rank, incarnation, list(crashes), wait_s))

    def tell(self, rank: int, message: ToNode) -> None:
        """Send a node a message."""
        self._pool.do(Tell(rank, message))

    def signal(self, rank: int, number: int) -> None:
        """Send a node's process a signal."""
        self._pool.do(Signal(rank, number))

    def look(self) -> None:
        """See to what is due."""
        self._pool.look()

    def close(self, reason: str) -> None:
        """End all nodes."""
        self._pool.close()


def placed(nodes: int, slots: Mapping[str, int]) -> dict[str, list[int]]:
    """Which ranks each worker gets: contiguous ones, in the order of the workers, in proportion to their slots.

    Args:
        nodes: their number.
        slots: of each worker, in the order in which they joined; at least as many as nodes together.
    """
    total, before, given, ranks = sum(slots.values()), 0, 0, {}
    for name, count in slots.items():
        before += count
        until = -(-nodes * before // total)  # rounded up: never more than its slots
        ranks[name] = list(range(given, until))
        given = until
    return ranks
