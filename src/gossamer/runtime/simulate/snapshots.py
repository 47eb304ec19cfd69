"""Checkpoints of a simulation: who was cut, and what is on its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from gossamer.config import Checkpoints
from gossamer.node.checkpoint import Arrival, Checkpoint
from gossamer.results.checkpoints import CheckpointFolder
from gossamer.runtime.simulate.clock import NS
from gossamer.runtime.simulate.flights import Flights
from gossamer.runtime.snapshots import NodeSnapshots

Sent = Mapping[int, int]
"""How many messages a node has sent, by receiver."""


class Cuts:
    """Makes the checkpoints of all nodes of a simulation, and writes them in a thread of its own.

    A checkpoint is whole when every node has been cut and all that it had sent before has arrived, or won't.

    Args:
        asked: when nodes are cut.
        nodes: each node's cuts, by rank.
        flights: what is on its way.
        folder: where checkpoints are written.
        settle: writes what is owed to vectors, before they are written to disk.
        wall: real seconds since the run's start.
        trainer: which trainer computes, as far as that is known.
        say: told of a checkpoint that can't be written.
        made: how many cuts need not be made any more, in a run that is resumed.
        first: the number of the next checkpoint in the folder.
    """

    def __init__(
        self,
        asked: Checkpoints,
        nodes: Sequence[NodeSnapshots],
        flights: Flights,
        folder: CheckpointFolder,
        settle: Callable[[], None],
        wall: Callable[[], float],
        trainer: Callable[[], str | None],
        say: Callable[[str], None],
        made: int = 0,
        first: int = 1,
    ) -> None:
        self._asked, self._nodes, self._flights, self._folder = asked, nodes, flights, folder
        self._settle, self._wall, self._trainer, self._say = settle, wall, trainer, say
        self._number = first - made - 1  # what a cut's number is in the folder, less its own
        self._made = [made] * len(nodes)
        self._sent: list[Sent] = [{}] * len(nodes)
        self._open: dict[int, _Open] = {}
        self._over: set[int] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        flights.landed = self._landed

    def round_ended(self, saved: Checkpoint) -> None:
        """A node is at the end of a round (or at its start), and is cut if that is due."""
        rank = saved.rank
        self._nodes[rank].round_ended(saved)
        self._sent[rank] = dict(self._flights.sent[rank])
        for number in range(self._made[rank] + 1, self._asked.due(saved.round, saved.time_s) + 1):
            self._made[rank] = number
            self._cut(rank, number)

    def over(self, rank: int) -> None:
        """A node's rounds are over: it is part of all later checkpoints as it is now."""
        self._over.add(rank)
        self._nodes[rank].over()
        for number in list(self._open):
            self._cut(rank, number)

    def _cut(self, rank: int, number: int) -> None:
        if number not in self._open:
            self._open[number] = _Open()
            for other in self._over - {rank}:
                self._cut(other, number)
        cut = self._open[number]
        if rank in cut.saved:
            return
        cut.saved[rank], cut.sent[rank] = self._nodes[rank].cut(number), self._sent[rank]
        if len(cut.saved) == len(self._nodes):
            cut.awaited = self._flights.before(cut.sent)
            if not cut.awaited:
                self._finish(number)

    def _landed(self, source: int, to: int, number: int) -> None:
        for cut_number, cut in list(self._open.items()):
            if cut.awaited and (source, to, number) in cut.awaited:
                cut.awaited.remove((source, to, number))
                if not cut.awaited:
                    self._finish(cut_number)

    def _finish(self, number: int, last: bool = False) -> None:
        """All that belongs to a checkpoint is here (or, at the last one, known): write it."""
        cut = self._open.pop(number)
        here: list[dict[int, int]] = [{} for _ in self._nodes]
        for source, sent in cut.sent.items():
            for to, count in sent.items():
                here[to][source] = count
        parts = [node.finish(number, here[rank]) for rank, node in enumerate(self._nodes)]
        if last:
            for message, to, due_ns in self._flights.under_way():
                if message.number < cut.sent[message.source].get(to, 0):
                    # When it is due may not be known yet: then it is there when its receiver goes on.
                    due_s = parts[to].time_s if due_ns is None else due_ns / NS
                    parts[to] = replace(parts[to], arriving=[*parts[to].arriving, Arrival(message, due_s)])
        self._settle()
        self._report()
        write = partial(self._write, number + self._number, parts, self._wall(), self._trainer())
        self._written = self._writer.submit(write)

    def _write(self, number: int, parts: Sequence[Checkpoint], wall_s: float, trainer: str | None) -> None:
        for part in parts:
            self._folder.write(number, part)
        rounds, times_s = {p.rank: p.round for p in parts}, {p.rank: p.time_s for p in parts}
        self._folder.complete(number, rounds, times_s, wall_s, trainer)

    def _report(self) -> None:
        """A checkpoint that could not be written (disk full, ...) is no reason to end a run."""
        if self._written is not None and self._written.done() and (error := self._written.exception()):
            self._written = None
            self._say(f"a checkpoint could not be written: {error}")

    def end(self) -> None:
        """The run ends in order: keep the newest ends of rounds, and what was on its way."""
        number = max(self._made, default=0) + 1
        for rank in range(len(self._nodes)):
            self._made[rank] = number
        self._open = {number: _Open()}
        cut = self._open[number]
        for rank, node in enumerate(self._nodes):
            cut.saved[rank], cut.sent[rank] = node.cut(number), self._sent[rank]
        self._finish(number, last=True)

    def close(self) -> None:
        """Wait until all is written."""
        self._writer.shutdown()
        self._report()


class _Open:
    """A checkpoint that is not whole yet."""

    def __init__(self) -> None:
        self.saved: dict[int, Checkpoint] = {}
        self.sent: dict[int, Sent] = {}
        self.awaited: set[tuple[int, int, int]] | None = None
