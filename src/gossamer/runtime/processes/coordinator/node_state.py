"""One node's process, as its supervisor sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.faults import StartFrom
from gossamer.runtime.processes.channel import PatientChannel
from gossamer.runtime.processes.protocol import FromNode


@dataclass(eq=False)
class Child:
    """A node's process.

    Args:
        rank: the node.
        pid: the process.
        channel: the supervisor's end of the channel to it.
        behind: whether the channel has something that it does not read yet.
        ready: whether it can be told to go.
        done: whether its protocol has returned.
        final: whether it has handed in its last model.
        round: rounds that it has completed, as far as is known.
        private: bytes of its memory at its end.
        idle: messages sent and received, and what it waits for, if nothing but a message could wake it.
        idle_reports: how often it has said so.
        planned: whether it dies because the experiment says so.
        leaving: whether it was told to leave.
        frozen: whether the supervisor has stopped it.
        arriving: whether it is taken for dead, has been heard of again, and is to be introduced.
        start_from: what it begins with.
        life: how many it had before.
        restarts: how often it was started anew though the experiment doesn't say so.
        traffic: its counters in its last row.
    """

    rank: int
    pid: int
    channel: PatientChannel[FromNode]
    behind: bool = False
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
    life: int = 0
    restarts: int = 0
    traffic: Mapping[str, int] | None = None
