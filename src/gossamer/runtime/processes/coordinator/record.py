"""The record of a run of real processes: rows of nodes and of all of them together, and what happens to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gossamer.learning.evaluate import Evaluator
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.results.recorder import read_metrics
from gossamer.runtime.barrier import Moment
from gossamer.runtime.events import EventLog, HeardClock
from gossamer.runtime.processes.system.memory import SharedModels
from gossamer.runtime.recording import RunRecord
from gossamer.runtime.setup import Setup


class Record:
    """The record of a run, on the nodes' clock, with their snapshots in shared memory.

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
        self._taken, self._say = taken, say
        self._rows = RunRecord(
            setup, folder.segment("metrics"), folder.segment("graphs"), evaluator.columns, show
        )
        self.view, self.without = self._rows.view, self._rows.without
        self.clock = HeardClock(time.monotonic)
        self.events = EventLog(folder.segment("events"), self.clock.now, self._wall)
        self._has_skipped = False
        self._start: float | None = None
        self._wall_before_s = 0.0

    @property
    def target_reached(self) -> bool:
        """Whether ``stop.target`` is; everything that has come in is recorded nevertheless."""
        return self._rows.reached

    def resume(self, cut: Cut) -> None:
        """Go on from a checkpoint, once :meth:`without` was called for the nodes that are not in it."""
        self.clock.hear(max(cut.times_s.values()), runs=False)
        self._wall_before_s = cut.wall_s
        self._rows.resume(cut, read_metrics(self._folder.path))

    def begin(self, start: float) -> None:
        """The nodes go at this instant of the monotonic clock."""
        self._start = start
        self.clock.hear(self.clock.now())  # it runs from here on

    def _wall(self) -> float:
        now_s = 0.0 if self._start is None else time.monotonic() - self._start
        return now_s + self._wall_before_s

    def row(self, rank: int, moment: Moment, row: dict[str, Any], slot: int | None) -> None:
        """Take a node's row at an evaluation point, and its snapshot; None is no snapshot."""
        if slot is None and rank in self._setup.outcome_ranks and not self._has_skipped:
            self._has_skipped = True
            text = "not recorded where a node is more than two evaluations ahead of the record"
            self._say(f"consensus distance: {text}")
        self._rows.graph(row["round"])
        self._rows.row(moment, row, None if slot is None else self._models.read(slot, rank))
        if slot is not None:
            self._taken(rank)

    def again(self, rank: int, first: int) -> None:
        """A node that takes part from a round on is recorded again."""
        self._rows.back(rank, first + 1, self.next_tick())

    def next_tick(self) -> int:
        """The next instant of the time grid."""
        every_s = self._setup.experiment.evaluation.every_s
        return 0 if every_s is None else int(self.clock.now() / every_s) + 1
