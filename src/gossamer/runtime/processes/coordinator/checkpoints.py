"""Checkpoints of the whole run: which nodes have taken a snapshot, and whose files are written.

What is said is in :mod:`gossamer.runtime.processes.node_process.checkpoints`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gossamer.config import Experiment
from gossamer.results.checkpoints import CheckpointFolder, Cut, highest
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes.protocol import Drop, Expect, Kept, Snapshot, ToNode


@dataclass(eq=False)
class _Open:
    """A checkpoint that is not complete.

    Args:
        told: by node that was cut, whom it has told so.
        asked: whether the nodes know from whom they have to hear.
        rounds: of the nodes whose files are written.
        times_s: their clocks.
    """

    told: dict[int, set[int]] = field(default_factory=dict)
    asked: bool = False
    rounds: dict[int, int] = field(default_factory=dict)
    times_s: dict[int, float] = field(default_factory=dict)


class CheckpointCoordinator:
    """Puts the checkpoints of a run together.

    Args:
        experiment: what is run.
        folder: the run's.
        cut: the checkpoint from which it goes on, if it does.
        tell: sends a message to a node.
        say: told of a checkpoint that can't be written, or is given up.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        cut: Cut | None,
        tell: Callable[[int, ToNode], None],
        say: Callable[[str], None],
    ) -> None:
        self._on = experiment.checkpoint.on
        self._folder = CheckpointFolder(folder.checkpoints, experiment)
        self._tell, self._say = tell, say
        self._alive: set[int] = set()
        self._done: set[int] = set()
        self._open: dict[int, _Open] = {}
        self._abandoned: set[int] = set()
        self._highest = highest(folder.checkpoints)
        self._complete = 0
        self._wall_start = time.monotonic()
        self._wall_before_s = 0.0 if cut is None else cut.wall_s

    def begin(self, alive: Iterable[int], start: float) -> None:
        """The nodes are on their way."""
        self._alive = set(alive)
        self._wall_start = start

    def marked(self, rank: int, number: int, told: Iterable[int]) -> None:
        """A node was cut."""
        if number < self._complete:
            return  # a newer one was complete first
        if number in self._abandoned:
            self._tell(rank, Drop(number))
            return
        if number not in self._open:
            self._open[number] = _Open()
            self._highest = max(self._highest, number)
            for other in self._done & self._alive:
                self._tell(other, Snapshot(number))
        self._open[number].told[rank] = set(told)
        self._look(number)

    def saved(self, rank: int, number: int, rounds: int, time_s: float) -> None:
        """A node's file is written."""
        cut = self._open.get(number)
        if cut is None:
            return
        cut.rounds[rank], cut.times_s[rank] = rounds, time_s
        self._look(number)

    def done(self, rank: int) -> None:
        """A node's rounds are over: it is part of all later checkpoints as it is now."""
        self._done.add(rank)
        for number, cut in self._open.items():
            if rank not in cut.told:
                self._tell(rank, Snapshot(number))

    def lost(self, rank: int) -> None:
        """A node has died."""
        self._alive.discard(rank)
        for number in list(self._open):
            self._look(number)

    def broken(self, rank: int, number: int, peer: int) -> None:
        """A node was cut, and a connection of it broke and was made again."""
        self._abandon(number, f"the connection from node {rank} to node {peer} broke")

    def away(self, rank: int) -> None:
        """A node runs, but is out of reach for the others."""
        self._abandon_all(f"node {rank} was out of reach")
        self._alive.discard(rank)

    def back(self, rank: int) -> None:
        """A node takes part again."""
        self._abandon_all(f"node {rank} came back")
        self._alive.add(rank)
        for number in sorted(self._abandoned):
            self._tell(rank, Drop(number))

    def _abandon_all(self, why: str) -> None:
        for number in sorted(self._open):
            self._abandon(number, why)

    def _abandon(self, number: int, why: str) -> None:
        if number <= self._complete or number in self._abandoned:
            return
        self._abandoned.add(number)
        self._highest = max(self._highest, number)
        self._open.pop(number, None)
        self._say(f"checkpoint {number} is given up: {why}; the next one is made when it is due")
        for rank in sorted(self._alive):
            self._tell(rank, Drop(number))

    def last(self) -> int | None:
        """The number of the checkpoint at the end, which every node is about to be told; None where there is none."""
        return self._highest + 1 if self._on else None

    def _look(self, number: int) -> None:
        cut = self._open[number]
        if not self._alive:
            return  # it would be one of no node
        if not cut.asked and self._alive <= cut.told.keys():
            cut.asked = True
            for rank in sorted(self._alive):
                heard = [other for other in sorted(self._alive) if rank in cut.told[other]]
                self._tell(rank, Expect(number, heard))
        if cut.asked and self._alive <= cut.rounds.keys():
            self._finish(number, cut)

    def _finish(self, number: int, cut: _Open) -> None:
        rounds = {rank: cut.rounds[rank] for rank in sorted(self._alive)}
        times_s = {rank: cut.times_s[rank] for rank in rounds}
        wall_s = self._wall_before_s + time.monotonic() - self._wall_start
        try:
            self._folder.complete(number, rounds, times_s, wall_s, "sequential")
        except OSError as error:  # (disk full, ...) no reason to end a run
            self._say(f"checkpoint {number} could not be written: {error}")
        self._complete = number
        self._open = {other: each for other, each in self._open.items() if other > number}
        self._abandoned = {other for other in self._abandoned if other > number}
        for rank in rounds:
            self._tell(rank, Kept(number))
