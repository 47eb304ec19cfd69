"""What a simulation records, and when: rows are made at their instant, and models evaluated together at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from gossamer.learning.evaluate import Found
from gossamer.messages.tags import Model
from gossamer.node import NodeRuntime
from gossamer.results.checkpoints import Cut
from gossamer.results.segment import Segment
from gossamer.runtime.outcome import describe_failure
from gossamer.runtime.recording import (
    Moment,
    RunRecord,
    Spent,
    Usage,
    end_is_due,
    is_due,
    node_row,
    stopwatch,
)
from gossamer.runtime.simulate.clock import Order, to_ns
from gossamer.runtime.simulate.host import SimContext


class SimRecorder:
    """The record of a simulation: a row of each node at the ends of rounds, at common instants ("ticks"), and at the end.
    ``present`` gives the nodes that take part; ``reached`` is called when the target is met.

    Attributes:
        usage: how each node spent its time until its last row.
        wall: real seconds since the start of the run."""

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
        nodes = self._setup.experiment.nodes
        self.usage = [Usage() for _ in range(nodes)]
        self._starts_ns: Sequence[int] = [-1] * nodes  # of a run that is resumed, when each node goes on
        self._pending: list[tuple[Moment, dict[str, Any], Model]] = []
        self._next_tick = 0
        self.wall = stopwatch()

    # --- when

    def begin(self) -> None:
        evaluation = self._setup.experiment.evaluation
        if evaluation.every_s is not None:
            self._tick(0, evaluation.every_s)
        if evaluation.every_rounds is not None:
            for node in self._present():
                self._record(node, 0)

    def resume(self, cut: Cut, metrics: pl.DataFrame, starts_ns: Sequence[int]) -> None:
        """Go on with the record of a run that is resumed; nodes go on at these instants, and are on record until then."""
        self.wall = stopwatch(cut.wall_s)
        self._starts_ns = starts_ns
        self._rows.resume(cut, metrics)
        if (every_s := self._setup.experiment.evaluation.every_s) is not None:
            self._schedule_tick(math.ceil(self._context.clock.now() / every_s), every_s)

    def round_ended(self, node: NodeRuntime) -> None:
        if is_due(self._setup, node.round):
            self._record(node, node.round)

    def node_ended(self, node: NodeRuntime) -> None:
        """Record a node as it leaves, unless it was recorded in the same round."""
        if not is_due(self._setup, node.round):
            self._record(node, "end")

    def end(self, reason: str) -> None:
        """Record all nodes once more if the run ended before its rounds were done (``end_is_due``)."""
        self.flush()
        if end_is_due(self._setup, reason, {node.rank: node.round for node in self._present()}):
            self._record_all("end")
            self.flush()

    def leave(self, rank: int, *, keep: bool = False) -> None:
        """A node is away. What it has reported for incomplete evaluations counts only if ``keep`` is set."""
        self.flush()
        self._rows.without(rank, keep=keep)
        if self._rows.reached:
            self._reached()

    def come(self, rank: int, round: int) -> None:
        self.flush()
        self._rows.back(rank, round, self._next_tick)

    def _tick(self, number: int, every_s: float) -> None:
        self._record_all(("tick", number))
        self._next_tick = number + 1
        self._schedule_tick(number + 1, every_s)

    def _schedule_tick(self, number: int, every_s: float) -> None:
        due_ns = to_ns(number * every_s)
        self._context.clock.at(due_ns, Order.OBSERVE, 0, lambda: self._tick(number, every_s), background=True)

    def _record_all(self, moment: Moment) -> None:
        now_ns = self._context.clock.now_ns
        for node in self._present():
            start_ns = self._starts_ns[node.rank]
            # Of a round that ended as a checkpoint was made, the row is on record, also as that of this instant.
            if start_ns < now_ns or (start_ns == now_ns and not is_due(self._setup, node.round)):
                self._record(node, moment)

    # --- what

    def _record(self, node: NodeRuntime, moment: Moment) -> None:
        rank, context = node.rank, self._context
        if rank not in self._setup.outcome_ranks and node.round == 0 and self._setup.parts[rank].size == 0:
            return  # it has no part in the algorithm
        self._rows.graph(node.round)
        if (view := node.node.view) is not None:
            self._rows.view(rank, moment, node.round, view)
        model = model_of(node)
        if not self._pending:
            context.clock.when_quiet(self._setup.experiment.nodes + 1, self.flush)
        now, traffic = context.clock.now(), context.links.traffic(rank)
        spent = Spent(context.compute.busy_seconds(rank), *context.links.busy_seconds(rank, traffic))
        row = node_row(node, moment, traffic, now, self.wall(), self.usage[rank].shares(now, spent))
        self._pending.append((moment, row, model))

    def flush(self) -> None:
        """Evaluate the models that were recorded, and write the rows."""
        pending, self._pending = self._pending, []
        due = [(row, model) for _, row, model in pending if row["node"] in self._setup.evaluated]
        if due:
            evaluated = self._context.executor.evaluate([model for _, model in due])
            for (row, _), found in zip(due, evaluated, strict=True):
                if isinstance(found, Exception):
                    raise describe_failure(found, row["node"], row["round"]) from found
                row |= found
        with self._context.profile.part("record"):
            for moment, row, model in pending:
                self._rows.row(moment, row, model)
        if self._rows.reached:
            self._reached()

    def _evaluate_average(self, model: Model) -> Found:
        [found] = self._context.executor.evaluate([model])
        if isinstance(found, Exception):
            raise found
        return found


def model_of(node: NodeRuntime) -> Model:
    """A node's model; RunFailed if it was modified in place."""
    try:
        return node.model
    except RuntimeError as error:
        raise describe_failure(error, node.rank, node.round) from error
