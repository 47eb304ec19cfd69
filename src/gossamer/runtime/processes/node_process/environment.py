"""How a node's process comes into a run: what it shares with the others, whom it tells how it is doing, and with what it
begins if it comes later."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gossamer.runtime.processes.protocol import FromNode, ToNode
from gossamer.runtime.processes.transport.transport import Transport

PROGRESS_S = 0.2
"""Seconds between two reports of a node's progress."""


class Overseer(Protocol):
    """Whom a node's process tells how it is doing, and who tells it what to do: the supervisor, through a channel, or
    what does without one (standalone.py)."""

    def send(self, message: FromNode) -> None:
        """Take a message."""


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
        news: where nodes that share the places to compute in tell each other that one is free; None is a node that has its
            own.
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
    oversee: Callable[[Callable[[ToNode], None]], Overseer] | None = None
    connect: Callable[..., Transport] = Transport
    progress_s: float = PROGRESS_S
    news: tuple[int, int] | None = None
