"""When a simulation makes rows: at the ends of rounds, at common instants, and at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gossamer.node import NodeRuntime
from gossamer.runtime.barrier import Moment
from gossamer.runtime.recording import Spent, end_is_due, is_due
from gossamer.runtime.setup import Setup
from gossamer.runtime.simulate.clock import Order, to_ns
from gossamer.runtime.simulate.context import SimContext
from gossamer.runtime.simulate.recording import Recording


class Moments:
    """Has nodes recorded when it is time.

    Args:
        setup: says when that is.
        context: knows what nodes did by now.
        recording: the record.
        present: gives the nodes that are there.

    Attributes:
        next_tick: the number of the next common instant.
    """

    def __init__(
        self,
        setup: Setup,
        context: SimContext,
        recording: Recording,
        present: Callable[[], Sequence[NodeRuntime]],
    ) -> None:
        self._setup, self._recording, self._present = setup, recording, present
        self._clock, self._links, self._compute = context.clock, context.links, context.compute
        self._starts_ns: Sequence[int] = [0] * setup.experiment.nodes
        self.next_tick = 0

    def begin(self, starts_ns: Sequence[int] | None) -> None:
        """Record the start; or go on, where nodes go on at these instants: before, they are on record already."""
        evaluation = self._setup.experiment.evaluation
        if starts_ns is not None:
            self._starts_ns = starts_ns
        if evaluation.every_s is not None:
            first = math.ceil(self._clock.now() / evaluation.every_s)
            if starts_ns is None:
                self._tick(first, evaluation.every_s)
            else:
                self._tick_at(first, evaluation.every_s)
        if evaluation.every_rounds is not None and starts_ns is None:
            for node in self._present():
                self._record(node, moment=0)

    def round_ended(self, node: NodeRuntime) -> None:
        """Record a node that has completed a round, if that is due."""
        if is_due(self._setup, node.round):
            self._record(node, moment=node.round)

    def last(self, node: NodeRuntime) -> None:
        """Record a node as it ends, unless it was recorded in the same round."""
        if not is_due(self._setup, node.round):
            self._record(node, moment="end")

    def end(self, reason: str) -> None:
        """A run that ended before its rounds were done is recorded once more, as it ended; see
        :func:`~gossamer.runtime.recording.end_is_due`."""
        if end_is_due(self._setup, reason, {node.rank: node.round for node in self._present()}):
            self._record_all("end")
            self._recording.flush()

    def _tick(self, number: int, every_s: float) -> None:
        self._record_all(("tick", number))
        self.next_tick = number + 1
        self._tick_at(number + 1, every_s)

    def _tick_at(self, number: int, every_s: float) -> None:
        self._clock.at(
            to_ns(number * every_s), Order.LOOK, 0, lambda: self._tick(number, every_s), background=True
        )

    def _record_all(self, moment: Moment) -> None:
        for node in self._present():
            if self._starts_ns[node.rank] <= self._clock.now_ns:
                self._record(node, moment)

    def _record(self, node: NodeRuntime, moment: Moment) -> None:
        rank = node.rank
        spent = Spent(
            self._compute.busy_seconds(rank),
            self._links.sending_seconds(rank),
            self._links.receiving_seconds(rank),
        )
        self._recording.take(node, self._links.traffic(rank), spent, moment)
