"""The record of a run: its rows and graphs, and when they are written. It is the same under every engine."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, NamedTuple, TypeVar

import polars as pl
import torch

from gossamer.layers import MeasuredNode
from gossamer.messages.tags import Model, Traffic
from gossamer.node import Measurement, NodeRuntime
from gossamer.node.shown import CompleteModel, shown_in
from gossamer.results.checkpoints import RunCheckpoint
from gossamer.results.consensus import average, consensus_distance
from gossamer.results.reading import MOMENTS
from gossamer.results.reading import NETWORK as NETWORK
from gossamer.results.segment import Segment
from gossamer.results.steps import NodeMean
from gossamer.results.tidy import at_level
from gossamer.runtime.outcome import describe_failure
from gossamer.runtime.setup import Setup

MAX_PENDING = 16  # evaluations that wait for the slowest node, with the others' snapshots
EARLY = "not all nodes completed stop.rounds before their protocols returned (node.rounds() counts rounds)"
UNCOUNTED = (
    "no node has called node.rounds() so far; without it no round is counted, recorded or saved, and stop.rounds"
    " ends nothing"
)

UNCOUNTED_S = 10.0
"""Real seconds after which the user hears that no node counts rounds."""

Moment = int | tuple[str, int] | str
"""An evaluation point, which groups rows: a node's round, ("tick", k) on the time grid, or "end"."""

T = TypeVar("T")


def stopwatch(before_s: float = 0.0) -> Callable[[], float]:
    """A function that returns the real seconds since this call, plus ``before_s``."""
    start = time.perf_counter() - before_s
    return lambda: time.perf_counter() - start


class Profile:
    """Real seconds spent in named parts of a run (``seconds``), each without the parts nested in it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0  # seconds of the parts nested in the current one

    def part(self, name: str) -> _Part:
        """A context whose time counts for a part."""
        return _Part(self, name)


class _Part:
    """The context of :meth:`Profile.part`. (A simulation enters one at each instant, and one made of a generator takes three
    times as long.)"""

    __slots__ = ("_name", "_outer", "_profile", "_start")

    def __init__(self, profile: Profile, name: str) -> None:
        self._profile, self._name = profile, name

    def __enter__(self) -> None:
        profile = self._profile
        self._outer, profile._inner = profile._inner, 0.0
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        profile, passed = self._profile, time.perf_counter() - self._start
        profile.seconds[self._name] += passed - profile._inner
        profile._inner = self._outer + passed


# --- when nodes are recorded


def is_due(setup: Setup, rounds: int) -> bool:
    """Whether a node is recorded after this many completed rounds: before the first round, at every
    ``evaluation.every_rounds``, and after the last round."""
    every, last = setup.experiment.evaluation.every_rounds, setup.experiment.stop.rounds
    return every is not None and (rounds % every == 0 or rounds == last)


def extrapolated(rounds: Collection[int], nodes: int) -> int:
    """The rounds completed by all nodes. Nodes that are gone count as the mean of the others, which have completed
    ``rounds``."""
    return sum(rounds) * nodes // len(rounds)


def end_is_due(setup: Setup, reason: str, rounds: Mapping[int, int]) -> bool:
    """Whether all present nodes are recorded once more when a run ends without failure. They are if the run ended by
    time, bytes, target or divergence, if protocols returned before all evaluated nodes had completed their rounds, or
    if nodes are evaluated by time only. Otherwise, also at an end by the user, only those nodes are whose model has
    changed since their last row. ``rounds`` are the completed rounds of each present node."""
    if reason != "rounds":
        return reason in ("time", "bytes", "target", "diverged")
    evaluation = setup.experiment.evaluation
    by_time = evaluation.every_rounds is None and evaluation.every_s is not None
    return by_time or setup.experiment.stop.rounds is None or ended_early(setup, rounds)


def ended_early(setup: Setup, rounds: Mapping[int, int]) -> bool:
    """Whether protocols returned before all evaluated nodes had completed ``stop.rounds``."""
    last = setup.experiment.stop.rounds or 0
    return any(rounds[rank] < last for rank in setup.outcome_ranks & rounds.keys())


# --- a node's row


class BusySeconds(NamedTuple):
    """A node's use of time since the start, in seconds. The use of a link is the time that its traffic takes
    at the link's rate at that time; None if the link is unlimited."""

    computing_s: float
    sending_s: float | None
    receiving_s: float | None


_NOTHING = BusySeconds(0.0, 0.0, 0.0)


class Usage:
    """How a node spends its time between two of its rows. ``time_s`` and ``busy`` are the starting point."""

    def __init__(self, time_s: float = 0.0, busy: BusySeconds = _NOTHING) -> None:
        self._time_s, self._busy = time_s, busy

    def shares(self, time_s: float, busy: BusySeconds) -> dict[str, float | None]:
        """The columns ``idle_share``, ``uplink_share`` and ``downlink_share`` of a row at ``time_s`` on the
        engine's clock; None if no time has passed since the last row."""
        passed_s, before = time_s - self._time_s, self._busy
        self._time_s, self._busy = time_s, busy

        def share(now_s: float | None, before_s: float | None) -> float | None:
            if now_s is None or before_s is None or passed_s <= 0:
                return None
            return min(max((now_s - before_s) / passed_s, 0.0), 1.0)

        return {
            "idle_share": share(passed_s - (busy.computing_s - before.computing_s), 0.0),
            "uplink_share": share(busy.sending_s, before.sending_s),
            "downlink_share": share(busy.receiving_s, before.receiving_s),
        }


def moment_text(moment: Moment, round: int) -> str:
    """An evaluation point's value in the column ``moment``. The round of the row's model has its own column; it
    differs from that of the evaluation point if a node has last mixed in an earlier round (``evaluation.of:
    mixed``)."""
    if isinstance(moment, int):
        return "round" if moment == round else f"round {moment}"
    return moment if isinstance(moment, str) else " ".join(map(str, moment))


def never_mixed(has_mixed: Iterable[bool]) -> str | None:
    """A sentence on the nodes that have mixed nothing, although mixed models were to be shown."""
    each = list(has_mixed)
    if all(each):
        return None
    nodes = f"{each.count(False)} of {len(each)} nodes have mixed nothing"
    return f"evaluation.of: mixed, but {nodes}; they are shown with the models of their rounds"


def node_row(
    node: NodeRuntime,
    moment: Moment,
    shown: CompleteModel,
    traffic: Traffic,
    time_s: float,
    wall_s: float,
    shares: Mapping[str, float | None],
) -> dict[str, Any]:
    """One node's row, which shows a model at ``time_s``. Takes, and clears, the losses, message ages and recorded
    values since the last row."""
    node.look_for_divergence()
    _measure(node, shown)
    losses, columns = node.own.losses, node.columns
    node.own.losses, node.columns = [], {}
    staleness, largest = node.mailbox.take_ages()
    return {
        "node": node.rank,
        "round": shown.round,
        "step": shown.step,
        "time_s": time_s,
        "wall_s": wall_s,
        "model_age_s": max(time_s - shown.time_s, 0.0),
        "network_bytes": shown.network_bytes,
        "moment": moment_text(moment, shown.round),
        "train_loss": math.fsum(losses) / len(losses) if losses else None,
        **asdict(traffic),
        "staleness_s": staleness,
        "staleness_max_s": largest,
        **shares,
        **columns,
    }


def _measure(node: NodeRuntime, shown: CompleteModel) -> None:
    """Put what the experiment's measures return into the node's next row. RunFailed if one of them raises an error."""
    for k, measure in enumerate(node.setup.experiment.measures):
        taken = node.layer(MeasuredNode).taken
        try:
            values = measure.measure(Measurement(node, shown, taken, f"measures.{k}"))
            node.node.record(**values)
        except Exception as error:
            raise describe_failure(error, node.rank, shown.round) from error


# --- rows of all nodes together


class Barrier(Generic[T]):
    """Gathers a value from every node in ``ranks`` for each evaluation point, while nodes leave and return. A
    node reports its evaluation points in ascending order. If more than ``max_open`` points are
    open, the oldest is abandoned."""

    def __init__(self, ranks: Iterable[int], max_open: int | None = None) -> None:
        self._ranks, self._max_open = frozenset(ranks), max_open
        self._present = set(self._ranks)
        self._first: dict[int, tuple[int, int]] = {}  # round and tick from which a returned node reports
        self._missing: dict[Moment, set[int]] = {}
        self._values: dict[Moment, dict[int, T]] = {}
        self._closed: set[Moment] = set()  # complete or abandoned

    def take(self, moment: Moment, rank: int, value: T) -> dict[int, T] | None:
        """Take a node's value. With the last value, returns all values of the evaluation point by rank."""
        if rank not in self._present or moment in self._closed or not self._reports(rank, moment):
            return None
        if moment not in self._missing:
            self._missing[moment] = {other for other in self._present if self._reports(other, moment)}
            self._values[moment] = {}
            if self._max_open is not None and len(self._missing) > self._max_open:
                self.skip(next(iter(self._missing)))
        self._values[moment][rank] = value
        self._missing[moment].discard(rank)
        return self._completed(moment)

    def of(self, rank: int) -> dict[Moment, T]:
        """A node's values for incomplete evaluation points."""
        return {moment: values[rank] for moment, values in self._values.items() if rank in values}

    def skip(self, moment: Moment) -> None:
        """Abandon an evaluation point, because a node's value is unavailable."""
        self._missing.pop(moment, None)
        self._values.pop(moment, None)
        self._closed.add(moment)

    def without(self, rank: int, *, keep: bool) -> list[tuple[Moment, dict[int, T]]]:
        """Stop waiting for a node that is gone. Returns the evaluation points that waited only for it. With
        ``keep``, its values still count at points where others are missing."""
        self._present.discard(rank)
        self._first.pop(rank, None)
        complete: list[tuple[Moment, dict[int, T]]] = []
        for moment in list(self._missing):
            self._missing[moment].discard(rank)
            if not keep:
                self._values[moment].pop(rank, None)
            if values := self._completed(moment):
                complete.append((moment, values))
        return complete

    def back(self, rank: int, round: int, tick: int) -> None:
        """A node takes part (again), and reports from this round and this tick on."""
        if rank not in self._ranks:
            return
        self._present.add(rank)
        self._first[rank] = round, tick
        for moment, missing in self._missing.items():
            if self._reports(rank, moment):
                missing.add(rank)

    def _reports(self, rank: int, moment: Moment) -> bool:
        """Whether a node, which may have returned, reports at an evaluation point."""
        if rank not in self._first or isinstance(moment, str):
            return True
        round, tick = self._first[rank]
        return moment >= round if isinstance(moment, int) else moment[1] >= tick

    def _completed(self, moment: Moment) -> dict[int, T] | None:
        if self._missing.get(moment, True):
            return None
        del self._missing[moment]
        if not isinstance(moment, str):  # a node that returns has its own end
            self._closed.add(moment)
        return dict(sorted(self._values.pop(moment).items()))


class Snapshot(NamedTuple):
    """A node's row at an evaluation point, its model and, if neighbours are sampled, the ranks in its view."""

    row: Mapping[str, Any]
    model: Model
    view: Sequence[int] | None = None


class RunRecord:
    """The record of a run: the one place where its rows and graphs are written, under every engine.

    The network's row of an evaluation point (consensus distance, and the average model's metrics if asked
    for) is written when every evaluated node has delivered its snapshot. Snapshots of at most
    :data:`MAX_PENDING` points are kept, so the oldest points have no such row if some nodes are far ahead of
    others.

    The metric of ``stop.target`` is the step function of :mod:`gossamer.results.steps`, as it becomes known; see
    :meth:`target_met`."""

    def __init__(
        self,
        setup: Setup,
        metrics: Segment,
        graphs: Segment,
        evaluate: Callable[[Model], dict[str, Any]],
        show: Callable[[dict[str, Any]], object],
    ) -> None:
        self._setup, self._metrics, self._graphs = setup, metrics, graphs
        self._evaluate, self._show = evaluate, show
        target = setup.experiment.stop.target
        self._metric = None if target is None else target.metric
        self._level = math.nan if target is None else target.value
        trained = {rank for rank, part in enumerate(setup.parts) if part.size}
        reporters = trained if self._metric == "train_loss" else setup.evaluated
        self._of_network = self._metric == "consensus_distance" or not reporters
        self._mean = NodeMean({NETWORK} if self._of_network else reporters)
        self._met = False
        self._snapshots: Barrier[Snapshot] = Barrier(setup.outcome_ranks, MAX_PENDING)
        self._graph, self._rounds = setup.graph(0), 0  # the last graph on record, and its round
        self._view_rounds = 0  # the round of the last graph of views
        # In a replayed run: what is on record, as (node, time, moment), and the target's metric by node and time.
        self._on_record: set[tuple[int, float, str]] = set()
        self._values: dict[tuple[int, float], Any] = {}
        self._graphs_on_record = -1
        self._need: Callable[[int], None] = lambda rank: None

    def resume(self, checkpoint: RunCheckpoint, metrics: pl.DataFrame) -> None:
        """Resume from a checkpoint, with the rows recorded up to it. Nodes that were saved ahead of others
        contribute to the evaluations that the others will complete."""
        for row in metrics.sort("time_s", maintain_order=True).to_dicts():
            self._watch(row)
        self._rounds = self._view_rounds = max(checkpoint.rounds.values())
        self._graph = self._setup.graph(max(self._rounds - 1, 0))
        evaluated = {rank: r for rank, r in checkpoint.rounds.items() if rank in self._setup.outcome_ranks}
        earliest = min(evaluated.values(), default=0)  # all evaluated nodes may be lost
        for rank, last in evaluated.items():
            if last == earliest:
                continue
            for moment in (r for r in range(earliest + 1, last) if is_due(self._setup, r)):
                self._snapshots.skip(moment)  # the node's model of that round was not kept
            if is_due(self._setup, last):
                of_round = (pl.col("moment") == f"round {last}") | (pl.col("round") == last)
                for row in metrics.filter((pl.col("node") == rank) & of_round).to_dicts():
                    self._snapshots.take(last, rank, Snapshot(row, shown_in(checkpoint.read(rank))))

    def replay(self, metrics: pl.DataFrame, graphs: int, need: Callable[[int], None]) -> None:
        """Replay a run: rows that are on record, and graphs up to round ``graphs``, are not written again.
        ``need`` is called with the rank of each node whose model an unrecorded row needs."""
        self._need, self._graphs_on_record = need, graphs
        moments = pl.col("moment").fill_null("round").str.split(MOMENTS)
        self._on_record = set(metrics.select("node", "time_s", moments).explode("moment").iter_rows())
        if self._metric in metrics.columns:
            values = metrics.select("node", "time_s", self._metric).iter_rows()
            self._values = {(rank, time_s): value for rank, time_s, value in values}

    def is_on_record(self, row: Mapping[str, Any]) -> bool:
        """Whether the record has this row of a node (or the network)."""
        return (row["node"], row["time_s"], row["moment"]) in self._on_record

    def unrecorded(self, rank: int) -> dict[int, Model]:
        """A node's models, by round, at evaluation points that other nodes have not reached yet."""
        snapshots = self._snapshots.of(rank).items()
        return {moment: snapshot.model for moment, snapshot in snapshots if isinstance(moment, int)}

    def graph(self, rounds: int) -> None:
        """A node is recorded after this many rounds: write the graph of the last round if it has changed."""
        if rounds <= self._rounds:
            return
        self._rounds = rounds
        graph = self._setup.graph(rounds - 1)
        if graph is not self._graph:
            self._graph = graph
            self._append_graph(rounds, graph.edges())

    def row(
        self, moment: Moment, row: dict[str, Any], model: Model | None, view: Sequence[int] | None
    ) -> None:
        """Write a node's row. If the network's row waited only for this node, write that row and, if neighbours
        are sampled, the graph of all views. If ``model`` is None, the network has no row at this evaluation
        point."""
        self._append(moment, row)
        if model is not None:
            snapshot = Snapshot(row, model, view)
            if (snapshots := self._snapshots.take(moment, row["node"], snapshot)) is not None:
                self._append_network(moment, snapshots)
        elif row["node"] in self._setup.outcome_ranks:
            self._snapshots.skip(moment)

    def target_met(self, until_s: float = math.inf) -> bool:
        """Whether ``stop.target`` has been met by some instant, which must have passed."""
        if self._metric is not None and not self._met:
            steps, classes = self._mean.advance(until_s), self._setup.class_columns
            self._met = any(at_level(self._metric, step.mean, self._level, classes) for step in steps)
        return self._met

    def without(self, rank: int, *, gone_s: float | None, keep: bool = False) -> None:
        """Stop waiting for a node. Its values for incomplete evaluations count only with ``keep``. ``gone_s`` is
        when it crashed or left; None for a frozen node, whose last value still counts for the target."""
        if gone_s is not None and not self._of_network:
            self._mean.gone(rank, gone_s)
        for moment, snapshots in self._snapshots.without(rank, keep=keep):
            self._append_network(moment, snapshots)

    def back(self, rank: int, round: int, tick: int, time_s: float) -> None:
        """A node takes part (again) at ``time_s``, and is recorded from this round and this tick on."""
        self._mean.back(rank, time_s)
        self._snapshots.back(rank, round, tick)

    def _append(self, moment: Moment, row: dict[str, Any]) -> None:
        rank, time_s = row["node"], row["time_s"]
        if not self.is_on_record(row):
            self._metrics.append(row)
            self._show(row)
        elif self._metric is not None:
            row = {**row, self._metric: self._values.get((rank, time_s))}
        self._watch(row)

    def _watch(self, row: Mapping[str, Any]) -> None:
        """Take a row into account for the target."""
        rank = row["node"]
        if self._metric is None or (rank == NETWORK) != self._of_network:
            return
        age_s = 0.0 if self._metric == "train_loss" else row.get("model_age_s") or 0.0
        value = row.get(self._metric)
        self._mean.row(rank, row["time_s"], value, age_s=age_s, after_start=row["round"] > 0)

    def _append_network(self, moment: Moment, snapshots: Mapping[int, Snapshot]) -> None:
        rows, models, views = zip(*snapshots.values(), strict=True)
        time_s, least = max(row["time_s"] for row in rows), min(row["round"] for row in rows)
        known_bytes = [row["network_bytes"] for row in rows if row["network_bytes"] is not None]
        row: dict[str, Any] = {
            "node": NETWORK,
            "round": least,
            "time_s": time_s,
            "wall_s": max(row["wall_s"] for row in rows),
            # These models have been the nodes' since the newest of them was complete.
            "model_age_s": min(time_s - row["time_s"] + row["model_age_s"] for row in rows),
            "network_bytes": max(known_bytes, default=None),
            "moment": moment_text(moment, least),
        }
        if not self.is_on_record(row):
            for rank in snapshots:
                self._need(rank)
            parameters = [model.parameters for model in models]
            mean = average(parameters)
            if len(parameters) > 1:  # a single model, such as a server's, has no distance from others
                row["consensus_distance"] = consensus_distance(parameters, mean)
            if self._setup.experiment.evaluation.nodes == "average":
                buffers = torch.stack([model.buffers for model in models]).mean(0)
                row |= self._evaluate(Model(mean.to(parameters[0].dtype), buffers))
        self._append(moment, row)
        if None not in views and row["round"] > self._view_rounds:
            self._view_rounds = row["round"]
            views_by_rank = zip(snapshots, views, strict=True)
            edges = ((rank, other) for rank, view in views_by_rank for other in view)
            self._append_graph(row["round"], edges)

    def _append_graph(self, rounds: int, edges: Iterable[tuple[int, int]]) -> None:
        if rounds > self._graphs_on_record:
            self._graphs.append({"round": rounds, "edges": [list(edge) for edge in edges]})
