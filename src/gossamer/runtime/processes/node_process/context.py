"""What the process of a node gets from the worker that forks it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes.security.trust import Security


@dataclass(frozen=True, eq=False)
class NodeContext:
    """What a node's process shares with others, and how it starts.

    Args:
        listener: its listening socket.
        channel: its end of the channel to the worker.
        addresses: (host, port) of every rank.
        token: 16 bytes by which the nodes of this run know each other.
        security: keys for TLS between nodes; None is for loopback.
        memory: descriptor of the shared file: models, and the CPU slots.
        at_once: how many nodes of this machine may compute at the same time.
        wakeup: where nodes that share CPU slots tell each other that one is free; None for a node that shares with none.
        trims: hand memory back after computing.
        folder: where it writes files.
        cut: the checkpoint from which it goes on; None is the start.
        checkpoints: the digest that its checkpoints carry, and the number of the next one; None: as the folder says.
        incarnation: how often the node was started before.
        crashes: rounds after which it kills itself.
    """

    listener: socket.socket
    channel: socket.socket
    addresses: Sequence[tuple[str, int]]
    token: bytes
    memory: int
    at_once: int
    trims: bool
    folder: RunFolder
    security: Security | None = None
    wakeup: tuple[int, int] | None = None
    cut: Cut | None = None
    checkpoints: tuple[str, int] | None = None
    incarnation: int = 0
    crashes: tuple[int, ...] = ()
