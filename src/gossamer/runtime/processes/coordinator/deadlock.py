"""Where a run can't go on: a peer that lives and can't be reached, or nodes that all wait for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set

from gossamer.config import Experiment
from gossamer.runtime.outcome import describe_waits
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.node_state import NodeState

UNREACHABLE_S = 5.0
"""Seconds after which a peer that was reported unreachable, but is alive, is given up."""


class DeadlockWatch:
    """Looks for one.

    Args:
        experiment: what is run.
        children: the newest process of each node, by rank.
        alive: the ranks of those that have not ended.
        record: takes down an event of a node: its rank, what it is, and a text.
    """

    def __init__(
        self,
        experiment: Experiment,
        children: Mapping[int, NodeState],
        alive: Set[int],
        record: Callable[[int, str, str], object],
    ) -> None:
        self._nodes, self._timed = experiment.nodes, experiment.stop.time_s is not None
        self._children, self._alive, self._record = children, alive, record
        self._suspects: list[tuple[float, int, int, str]] = []
        self._wiped = False

    def unreachable(self, reporter: int, rank: int, why: str) -> None:
        """A node says that it can't reach another one."""
        self._suspects.append((time.monotonic(), reporter, rank, why))

    def reachable(self, reporter: int, rank: int) -> None:
        """It can now."""
        self._suspects = [suspect for suspect in self._suspects if suspect[1:3] != (reporter, rank)]

    def wiped(self) -> None:
        """Messages may have been lost with a node: how many came in says nothing any more."""
        self._wiped = True

    def look(self) -> None:
        """Look for one now.

        Raises:
            Ended: if there is one.
        """
        self._look_at_suspects()
        self._look_for_deadlock()

    def _look_at_suspects(self) -> None:
        """A peer that could not be reached is dead, which its channel says, or is given up after a while."""
        now = time.monotonic()
        for since, reporter, rank, why in list(self._suspects):
            if rank in self._alive and now - since < UNREACHABLE_S:
                continue
            self._suspects.remove((since, reporter, rank, why))
            if rank in self._alive and reporter in self._alive:
                text = f"node {reporter} can't reach node {rank}: {why}"
                self._record(reporter, "unreachable", text)
                raise Ended("failed", message=text, node=reporter)

    def _look_for_deadlock(self) -> None:
        """All nodes wait for messages, none is on its way, and no end of time is set: they wait for ever.

        (Not while a peer is given up: that may be what they wait for, and is the better reason.)
        """
        if self._suspects or self._timed or self._wiped or len(self._alive) < self._nodes:
            return
        if any(child.idle is None or child.idle_reports < 2 for child in self._children.values()):
            return
        nodes = [child for _, child in sorted(self._children.items())]
        states = [child.idle for child in nodes if child.idle is not None]
        if sum(sent for sent, _, _ in states) != sum(got for _, got, _ in states):
            return
        waits = {child.rank: state[2] for child, state in zip(nodes, states, strict=True)}
        returned = {child.rank: child.round for child in nodes if child.done}
        said = describe_waits(waits, returned)
        raise Ended("failed", message=f"all nodes wait and nothing is under way: {said}")
