"""What a simulation records: rows are made at their instant, models evaluated together when the instant is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from gossamer.learning.evaluate import Found
from gossamer.learning.rows import Rows
from gossamer.messages.tags import Model, Traffic
from gossamer.node import NodeRuntime
from gossamer.results.checkpoints import Cut
from gossamer.results.segment import Segment
from gossamer.runtime.barrier import Moment
from gossamer.runtime.outcome import describe_failure
from gossamer.runtime.profile import Profile
from gossamer.runtime.recording import (
    GraphLog,
    NetworkRows,
    Observer,
    Spent,
    TargetWatch,
    Usage,
    ViewLog,
    node_row,
    reporters,
    resume_rows,
    stopwatch,
)
from gossamer.runtime.setup import Setup
from gossamer.runtime.simulate.clock import Clock


class Recording:
    """The record of a simulation.

    Args:
        setup: says who is evaluated and what is asked for.
        metrics: where rows go.
        graphs: where graphs that change go.
        observer: who watches.
        evaluate: evaluates models, in order; or gives what the user's model, loss or metric raised for one.
        profile: told how long recording takes.
        clock: says when an instant is over.
        reached: called when the target is met.
    """

    def __init__(
        self,
        setup: Setup,
        metrics: Segment,
        graphs: Segment,
        observer: Observer,
        evaluate: Callable[[Sequence[Model]], list[Found | Exception]],
        profile: Profile,
        clock: Clock,
        reached: Callable[[], None],
    ) -> None:
        self._setup, self._metrics, self._observer = setup, metrics, observer
        self._evaluate, self._profile = evaluate, profile
        self._clock, self._reached = clock, reached
        self._graph_log = GraphLog(setup.topology, graphs)
        self._view_log = ViewLog(setup.experiment.nodes, graphs)
        self._network_rows = NetworkRows(setup, self._judge_average)
        self._target = TargetWatch(setup.experiment.stop.target, reporters(setup))
        self._usage = [Usage() for _ in range(setup.experiment.nodes)]
        self._pending: list[tuple[Moment, dict[str, Any], Model]] = []
        self.wall = stopwatch()

    def usage(self, rank: int) -> Usage:
        """How a node spent its time until its last row."""
        return self._usage[rank]

    def resume(self, cut: Cut, metrics: pl.DataFrame) -> None:
        """Go on with a record that reaches until a checkpoint."""
        self.wall = stopwatch(cut.wall_s)
        for log in (self._graph_log, self._view_log):
            log.resume(max(cut.rounds.values()))
        resume_rows(self._setup, cut, metrics, self._network_rows, self._target)

    def take(self, node: NodeRuntime, traffic: Traffic, spent: Spent, moment: Moment) -> None:
        """Record a node as it is now, with what it did by now; rows of one moment belong together."""
        if (
            node.rank not in self._setup.outcome_ranks
            and node.round == 0
            and self._setup.parts[node.rank].size == 0
        ):
            return  # a node that has no part in the algorithm
        self._graph_log.completed(node.round)
        if (view := node.node.view) is not None:
            self._view_log.add(moment, node.rank, node.round, view)
        model = model_of(node)
        if not self._pending:
            self._clock.when_quiet(self._setup.experiment.nodes + 1, self.flush)
        now = self._clock.now()
        shares = self._usage[node.rank].shares(now, spent)
        row = node_row(node, moment, traffic, now, self.wall(), shares)
        self._pending.append((moment, row, model))

    def without(self, rank: int, *, keep: bool = False) -> None:
        """A node is gone; what it gave for moments that are not complete counts if it is to be kept."""
        self.flush()
        self._target.without(rank, keep=keep)
        self._view_log.without(rank, keep=keep)
        for moment, network in self._network_rows.without(rank, keep=keep).items():
            self._append(network, moment)

    def back(self, rank: int, round: int, tick: int) -> None:
        """A node is there (again), and is recorded from this round and this tick on."""
        self.flush()
        self._target.back(rank, round, tick)
        self._view_log.back(rank, round, tick)
        self._network_rows.back(rank, round, tick)

    def flush(self) -> None:
        """Judge what was taken, and write it down."""
        pending, self._pending = self._pending, []
        due = [(row, model) for _, row, model in pending if row["node"] in self._setup.evaluated]
        if due:
            for (row, _), found in zip(due, self._evaluate([model for _, model in due]), strict=True):
                if isinstance(found, Exception):
                    raise describe_failure(found, row["node"], row["round"]) from found
                row |= {f"test_{name}": value for name, value in found.items()}
        with self._profile.part("record"):
            for moment, row, model in pending:
                self._append(row, moment)
                network = self._network_rows.add(moment, row, model)
                if network is not None:
                    self._append(network, moment)

    def _judge_average(self, model: Model) -> Found:
        [found] = self._evaluate([model])
        if isinstance(found, Exception):
            raise found
        return found

    def _append(self, row: dict[str, Any], moment: Moment) -> None:
        self._metrics.append(row)
        self._observer.row(row)
        if self._target.reached(moment, row):
            self._reached()


def model_of(node: NodeRuntime) -> Model:
    """A node's model.

    Raises:
        RunFailed: if it was modified in place.
    """
    try:
        return node.model
    except RuntimeError as error:
        raise describe_failure(error, node.rank, node.round) from error


def stacked(models: list[Model], rows: Rows) -> tuple[Tensor, Tensor | None]:
    """All nodes' parameters [nodes, P], and buffers [nodes, B] where there are any."""
    parameters = rows.gather([model.parameters for model in models])
    buffers = torch.stack([model.buffers for model in models])
    return parameters, buffers if buffers.shape[1] else None
