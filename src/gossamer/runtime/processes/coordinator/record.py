"""The record of a run of real processes: rows of nodes and of all of them together, and what happens to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gossamer.learning.evaluate import Evaluator
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.results.recorder import read_metrics
from gossamer.runtime.barrier import Moment
from gossamer.runtime.events import EventLog, HeardClock
from gossamer.runtime.processes.system.memory import SharedModels
from gossamer.runtime.recording import GraphLog, NetworkRows, TargetWatch, ViewLog, reporters, resume_rows
from gossamer.runtime.setup import Setup


class Record:
    """The record of a run.

    Args:
        setup: what is run.
        folder: where rows are recorded.
        models: where snapshots of the nodes' models are.
        evaluator: evaluates models.
        taken: called with a rank when a snapshot of that node was read.
        show: shows a row to the user.
        say: tells the user something.

    Attributes:
        events: what happens.
        clock: the nodes'.
        target_reached: whether ``stop.target`` is; everything that has come in is recorded nevertheless.
    """

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        models: SharedModels,
        evaluator: Evaluator,
        taken: Callable[[int], object],
        show: Callable[[dict[str, Any]], object],
        say: Callable[[str], object],
    ) -> None:
        self._setup, self._folder, self._models = setup, folder, models
        self._taken, self._show, self._say = taken, show, say
        self._rows = NetworkRows(setup, evaluator.columns)
        self._target = TargetWatch(setup.experiment.stop.target, reporters(setup))
        self.target_reached = False
        self.clock = HeardClock(time.monotonic)
        self._metrics = folder.segment("metrics")
        self.events = EventLog(folder.segment("events"), self.clock.now, self._wall)
        graphs = folder.segment("graphs")
        self._graphs = GraphLog(setup.topology, graphs)
        self._views = ViewLog(setup.experiment.nodes, graphs)
        self._has_skipped = False
        self._start: float | None = None
        self._wall_before_s = 0.0

    def resume(self, cut: Cut) -> None:
        """Go on from a checkpoint, once :meth:`without` was called for the nodes that are not in it."""
        self.clock.hear(max(cut.times_s.values()), runs=False)
        self._wall_before_s = cut.wall_s
        for log in (self._graphs, self._views):
            log.resume(max(cut.rounds.values()))
        resume_rows(self._setup, cut, read_metrics(self._folder.path), self._rows, self._target)

    def begin(self, start: float) -> None:
        """The nodes go at this instant of the monotonic clock."""
        self._start = start
        self.clock.hear(self.clock.now())  # it runs from here on

    def _wall(self) -> float:
        now_s = 0.0 if self._start is None else time.monotonic() - self._start
        return now_s + self._wall_before_s

    def row(self, rank: int, moment: Moment, row: dict[str, Any], slot: int | None) -> None:
        """Take a node's row at an evaluation point, and its snapshot; None is no snapshot."""
        self._graphs.completed(row["round"])
        self._append(moment, row)
        if slot is not None:
            complete = self._rows.add(moment, row, self._models.read(slot, rank))
            self._taken(rank)
            if complete is not None:
                self._append(moment, complete)
        elif rank in self._setup.outcome_ranks:
            if not self._has_skipped:
                text = "not recorded where a node is more than two evaluations ahead of the record"
                self._say(f"consensus distance: {text}")
            self._has_skipped = True
            self._rows.skip(moment)

    def view(self, rank: int, moment: Moment, rounds: int, view: Sequence[int]) -> None:
        """Take the ranks that a node knew at an evaluation point."""
        self._views.add(moment, rank, rounds, view)

    def without(self, rank: int, *, keep: bool) -> None:
        """Nothing waits for a node any more; what it gave for incomplete evaluation points counts if ``keep``."""
        self._target.without(rank, keep=keep)
        self._views.without(rank, keep=keep)
        for moment, row in self._rows.without(rank, keep=keep).items():
            self._append(moment, row)

    def again(self, rank: int, first: int) -> None:
        """A node that takes part from a round on is recorded again."""
        for log in (self._target, self._rows, self._views):
            log.back(rank, first + 1, self.next_tick())

    def next_tick(self) -> int:
        """The next instant of the time grid."""
        every_s = self._setup.experiment.evaluation.every_s
        return 0 if every_s is None else int(self.clock.now() / every_s) + 1

    def _append(self, moment: Moment, row: dict[str, Any]) -> None:
        self._metrics.append(row)
        self._show(row)
        self.target_reached |= self._target.reached(moment, row)
