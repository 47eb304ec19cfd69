"""The record of a simulation: rows are made at their instant, and its models are evaluated together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from gossamer.learning.evaluation_metrics import MetricValues
from gossamer.messages.tags import Model, Traffic
from gossamer.node import NodeRuntime
from gossamer.node.shown import CompleteModel
from gossamer.results.segment import Segment
from gossamer.runtime.outcome import describe_failure
from gossamer.runtime.recording import (
    BusySeconds,
    Moment,
    RunRecord,
    Usage,
    end_is_due,
    is_due,
    node_row,
    stopwatch,
)
from gossamer.runtime.simulate.core import Order, to_ns
from gossamer.runtime.simulate.host import SimContext
from gossamer.runtime.simulate.replay import Replay


class SimRecorder:
    """The record of a simulation: a row of each node at the ends of rounds, at common instants ("ticks"), and
    at the end. ``present`` gives the nodes that take part; ``reached`` is called when the target is met;
    ``wall`` gives the real seconds since the start of the run."""

    def __init__(
        self,
        context: SimContext,
        metrics: Segment,
        graphs: Segment,
        present: Callable[[], Sequence[NodeRuntime]],
        reached: Callable[[], None],
    ) -> None:
        self._context, self._setup = context, context.setup
        self._present, self._reached = present, reached
        self._rows = RunRecord(self._setup, metrics, graphs, self._evaluate_average, context.observer.row)
        self._usage = [Usage() for _ in range(self._setup.experiment.nodes)]
        self._pending: list[tuple[Moment, dict[str, Any], CompleteModel, Sequence[int] | None]] = []
        # By rank: the number of the model in its last row, and the last evaluated one with its values.
        self._last_shown: dict[int, int] = {}
        self._evaluated: dict[int, tuple[int, MetricValues]] = {}
        self._next_tick = 0
        self._replay: Replay | None = None
        self.wall = stopwatch()

    def begin(self) -> None:
        evaluation = self._setup.experiment.evaluation
        if evaluation.every_s is not None:
            self._tick(0, evaluation.every_s)
        if evaluation.every_rounds is not None:
            self._record_all(0)

    def resume(self, replay: Replay, metrics: pl.DataFrame, graphs: int) -> None:
        """Resume a run in which these rows, and graphs up to round ``graphs``, are on record."""
        self.wall, self._replay = stopwatch(replay.checkpoint.wall_s), replay
        self._rows.replay(metrics, graphs, replay.need)

    def round_ended(self, node: NodeRuntime) -> None:
        if is_due(self._setup, node.round):
            self._record(node, node.round)

    def node_ended(self, node: NodeRuntime) -> None:
        """Record a node as it leaves, unless it was recorded in the same round."""
        if not is_due(self._setup, node.round):
            self._record(node, "end")

    def end(self, reason: str) -> None:
        """Record the nodes for which a row is due at the end (``end_is_due``), unless the run was still replaying. A
        diverged run ends with the models of the instant."""
        self.flush()
        if self._replay is not None and not self._replay.complete:
            return
        present = self._present()
        everyone = end_is_due(self._setup, reason, {node.rank: node.round for node in present})
        for node in present:
            shown = shown_model(node, instant=reason == "diverged")
            if everyone or shown.number != self._last_shown.get(node.rank, shown.number):
                self._record(node, "end", shown)
        self.flush()

    def leave(self, rank: int, *, keep: bool = False, frozen: bool = False) -> None:
        """Stop waiting for a node. Its reports for incomplete evaluations count only if ``keep`` is set."""
        self.flush()
        core = self._context.core
        self._rows.without(rank, gone_s=None if frozen else core.now(), keep=keep)
        core.when_quiet(self._setup.experiment.nodes + 1, self.settle)

    def join(self, rank: int, round: int) -> None:
        self.flush()
        self._rows.back(rank, round, self._next_tick, self._context.core.now())

    def resume_usage(self, rank: int) -> None:
        """A node that was away or frozen is back: the shares in its next row begin now."""
        now_s, busy, _ = self._used(rank)
        self._usage[rank] = Usage(now_s, busy)

    def _used(self, rank: int) -> tuple[float, BusySeconds, Traffic]:
        """The time, and a node's use of time and its traffic until then."""
        context, traffic = self._context, self._context.links.traffic(rank)
        busy = BusySeconds(context.compute.busy_seconds(rank), *context.links.busy_seconds(rank, traffic))
        return context.core.now(), busy, traffic

    def unrecorded(self, rank: int) -> dict[int, Model]:
        """See :meth:`RunRecord.unrecorded`."""
        return self._rows.unrecorded(rank)

    def _tick(self, number: int, every_s: float) -> None:
        self._record_all(("tick", number))
        self._next_tick = number + 1
        due_ns = to_ns((number + 1) * every_s)
        self._context.core.at(
            due_ns, Order.OBSERVE, 0, lambda: self._tick(number + 1, every_s), background=True
        )

    def _record_all(self, moment: Moment) -> None:
        for node in self._present():
            self._record(node, moment)

    def _record(self, node: NodeRuntime, moment: Moment, shown: CompleteModel | None = None) -> None:
        rank, context = node.rank, self._context
        if not self._setup.takes_part(rank, node.round):
            return
        self._rows.graph(node.round)
        shown = shown or shown_model(node)
        self._last_shown[rank] = shown.number
        context.mixing.settle_for(shown.model.parameters)
        if not self._pending:
            context.core.when_quiet(self._setup.experiment.nodes + 1, self.settle)
        now, busy, traffic = self._used(rank)
        row = node_row(node, moment, shown, traffic, now, self.wall(), self._usage[rank].shares(now, busy))
        self._pending.append((moment, row, shown, node.node.view))

    def settle(self) -> None:
        """Write the rows of an instant that is over, and look for the target: all of them count together."""
        self.flush()
        if self._rows.target_met(self._context.core.now()):
            self._reached()

    def flush(self) -> None:
        """Evaluate the models that were recorded, and write the rows."""
        pending, self._pending = self._pending, []
        rows = []  # those that need the values of their model
        due: dict[int, tuple[int, CompleteModel]] = {}  # by the model's number
        for _, row, shown, _ in pending:
            rank = row["node"]
            if self._rows.is_on_record(row):
                continue
            if self._replay is not None:
                self._replay.need(rank)
            if rank in self._setup.evaluated:
                rows.append((row, shown.number))
                if self._evaluated.get(rank, (-1,))[0] != shown.number:
                    due[shown.number] = rank, shown
        known = {
            number: values
            for row, _ in rows
            for number, values in [self._evaluated.get(row["node"], (-1, {}))]
        }
        if due:
            ranks, models = zip(*due.values(), strict=True)
            evaluated = self._context.executor.evaluate([shown.model for shown in models], ranks)
            for rank, shown, values in zip(ranks, models, evaluated, strict=True):
                if isinstance(values, Exception):
                    raise describe_failure(values, rank, shown.round) from values
                known[shown.number] = values
                self._evaluated[rank] = shown.number, values
        for row, number in rows:
            row |= known[number]
        with self._context.profile.part("record"):
            for moment, row, shown, view in pending:
                self._rows.row(moment, row, shown.model, view)

    def _evaluate_average(self, model: Model) -> MetricValues:
        [values] = self._context.executor.evaluate([model])
        if isinstance(values, Exception):
            raise values
        return values


def shown_model(node: NodeRuntime, *, instant: bool = False) -> CompleteModel:
    """The model that a record shows of a node, or the model as it is. Raises RunFailed if it was modified in place."""
    try:
        return node.shown.instant() if instant else node.shown.now()
    except RuntimeError as error:
        raise describe_failure(error, node.rank, node.round) from error
