"""One node, as the coordinator sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.faults import StartFrom


@dataclass(eq=False)
class NodeState:
    """The newest process of a node.

    Args:
        rank: the node.
        incarnation: how many processes it had before.
        ready: whether it can be told to go.
        done: whether its protocol has returned.
        final: whether it has handed in its last model.
        round: rounds that it has completed, as far as is known.
        private: bytes of its memory at its end.
        idle: messages sent and received, and what it waits for, if nothing but a message could wake it.
        idle_reports: how often it has said so.
        planned: whether it dies because the experiment says so.
        leaving: whether it was told to leave.
        frozen: whether the schedule has stopped it.
        arriving: whether it is taken for dead, has been heard of again, and is to be introduced.
        start_from: what it begins with.
        restarts: how often it was restarted though the experiment does not say so.
        traffic: its counters in its last row.
    """

    rank: int
    incarnation: int = 0
    ready: bool = False
    done: bool = False
    final: bool = False
    round: int = 0
    private: int | None = None
    idle: tuple[int, int, list[str]] | None = None
    idle_reports: int = 0
    planned: bool = False
    leaving: bool = False
    frozen: bool = False
    arriving: bool = False
    start_from: StartFrom = "initial"
    restarts: int = 0
    traffic: Mapping[str, int] | None = None
