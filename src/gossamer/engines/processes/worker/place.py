"""Where a node's process finds what it shares with the others, and whom it tells how it is doing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gossamer.engines.processes.transport.transport import Transport

PROGRESS_S = 0.2
"""Seconds between two reports of a node's progress."""


class Overseer(Protocol):
    """Whom a node's process tells how it is doing, and who tells it what to do: the supervisor, through a channel, or
    what does without one (standalone.py)."""

    def send(self, *message: Any) -> None:
        """Take a message: what it is about, and what there is to say."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a node's process finds what it shares with the others.

    Args:
        listener: its listening socket.
        channel: its end of the channel to the supervisor, if it has one.
        addresses: (host, port) of every rank.
        token: what the nodes of this run know each other by.
        memory: descriptor of the shared file: models, and the places to compute in.
        at_once: how many nodes may compute at the same time.
        trims: hand memory back after computing.
        life: how often the node was started before.
        crashes: rounds after which it is to kill itself.
        oversee: gives who is told in place of a supervisor; it tells the node what to do by calling a function.
        connect: makes the node's transport.
        progress_s: seconds between two reports of its progress.
    """

    listener: socket.socket
    channel: socket.socket | None
    addresses: Sequence[tuple[str, int]]
    token: bytes
    memory: int
    at_once: int
    trims: bool
    life: int = 0
    crashes: tuple[int, ...] = ()
    oversee: Callable[[Callable[[list[Any]], None]], Overseer] | None = None
    connect: Callable[..., Transport] = Transport
    progress_s: float = PROGRESS_S
