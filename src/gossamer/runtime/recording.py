"""What is recorded, and when: the same under every engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol, runtime_checkable

import polars as pl
import torch

from gossamer.config import Target
from gossamer.messages.tags import Model, Traffic
from gossamer.node import NodeRuntime
from gossamer.results.checkpoints import Cut
from gossamer.results.recorder import average, consensus_distance
from gossamer.results.segment import Segment
from gossamer.results.tidy import lower_is_better
from gossamer.runtime.barrier import Barrier, Moment
from gossamer.runtime.setup import Setup, edges
from gossamer.topology import TopologySchedule

NETWORK = -1
"""The node number of rows about the network as a whole."""


def moment_text(moment: Moment) -> str:
    """A moment as the column ``moment`` has it; the number of a round has a column of its own."""
    if isinstance(moment, int):
        return "round"
    return moment if isinstance(moment, str) else " ".join(map(str, moment))


@runtime_checkable
class Observer(Protocol):
    """Who watches a run (a progress display)."""

    def start(self, description: Mapping[str, Any]) -> None:
        """The run starts; see ``Setup.description``."""

    def progress(self, rounds: int, time_s: float) -> None:
        """All nodes together have completed so many rounds by this time of the engine's clock; said now and then, also while
        no round ends."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A row was recorded."""

    def say(self, text: str) -> None:
        """Something a user may want to know."""


def is_due(setup: Setup, rounds: int) -> bool:
    """Whether a node that has completed this many rounds is recorded: before the first, every so many, after
    the last."""
    every, last = setup.experiment.evaluation.every_rounds, setup.experiment.stop.rounds
    return every is not None and (rounds % every == 0 or rounds == last)


def end_is_due(setup: Setup, reason: str, rounds: Mapping[int, int]) -> bool:
    """Whether all nodes that are there are recorded once more as a run ends in order: where it ended by time or target, or
    since protocols returned, before all evaluated nodes had completed their rounds.

    Args:
        setup: what is run.
        reason: why it ends, see :class:`~gossamer.runtime.outcome.Outcome`.
        rounds: that the nodes that are there have completed, by rank.
    """
    last = setup.experiment.stop.rounds
    if reason not in ("rounds", "time", "target"):
        return False
    return last is None or bool(_behind(setup, rounds, last))


def returned_early(setup: Setup, rounds: Mapping[int, int]) -> str | None:
    """What there is to say, in one line, where protocols returned before all evaluated nodes had completed their rounds;
    None where they have. Arguments are as for :func:`end_is_due`."""
    last = setup.experiment.stop.rounds
    if last is None or not (behind := _behind(setup, rounds, last)):
        return None
    count, least, most = len(behind), min(behind.values()), max(behind.values())
    if count == 1:
        who = f"node {next(iter(behind))}"
    else:
        who = "all nodes" if count == len(setup.outcome_ranks & rounds.keys()) else f"{count} nodes"
    after = f"{least}" if least == most else f"{least} to {most}"
    return f"{who} returned after {after} of {last} rounds (stop.rounds; node.rounds() counts them)"


def _behind(setup: Setup, rounds: Mapping[int, int], last: int) -> dict[int, int]:
    """The rounds of the evaluated nodes that have completed fewer than so many."""
    return {rank: done for rank, done in rounds.items() if rank in setup.outcome_ranks and done < last}


class Spent(NamedTuple):
    """What a node has done since the start, in seconds.

    Args:
        computing_s: for how long one of its computations ran.
        sending_s: for how long what left it would have kept its uplink busy (bytes by its rate when they left); None
            where that is unlimited.
        receiving_s: the same of its downlink, and what came in.
    """

    computing_s: float
    sending_s: float | None
    receiving_s: float | None


START = Spent(0.0, 0.0, 0.0)


class Usage:
    """How a node spends its time between two of its rows."""

    def __init__(self) -> None:
        self._time_s = 0.0
        self._spent = START

    def saved(self, since: Spent = START) -> list[float]:
        """What :meth:`restore` takes; what goes on from there counts from an instant until which this was done."""
        return [
            self._time_s,
            *((done or 0.0) - (by_then or 0.0) for done, by_then in zip(self._spent, since, strict=True)),
        ]

    def restore(self, saved: Sequence[float]) -> None:
        """Go on from what was saved."""
        time_s, *spent = saved
        self._time_s, self._spent = time_s, Spent(*spent)

    def shares(self, time_s: float, spent: Spent) -> dict[str, float | None]:
        """The columns ``idle_share``, ``uplink_share`` and ``downlink_share`` of a row; None where no time has passed since
        the last one.

        Args:
            time_s: by the engine's clock, when the row is made.
            spent: what the node has done by then.
        """
        passed, before = time_s - self._time_s, self._spent
        self._time_s, self._spent = time_s, spent
        sending, receiving = (
            None if by_now is None or by_then is None else _share(by_now - by_then, passed)
            for by_now, by_then in zip(spent[1:], before[1:], strict=True)
        )
        return {
            "idle_share": _share(passed - (spent.computing_s - before.computing_s), passed),
            "uplink_share": sending,
            "downlink_share": receiving,
        }


def _share(part_s: float, whole_s: float) -> float | None:
    return min(max(part_s / whole_s, 0.0), 1.0) if whole_s > 0 else None


def node_row(
    node: NodeRuntime,
    moment: Moment,
    traffic: Traffic,
    time_s: float,
    wall_s: float,
    shares: Mapping[str, float | None],
) -> dict[str, Any]:
    """One node's row; takes the losses, the ages of messages and the recorded values that have gathered since the
    last one."""
    losses, columns = node.own.losses, node.columns
    node.own.losses, node.columns = [], {}
    staleness, largest = node.reception.ages.take()
    return {
        "node": node.rank,
        "round": node.round,
        "step": node.node.step,
        "time_s": time_s,
        "wall_s": wall_s,
        "moment": moment_text(moment),
        "train_loss": math.fsum(losses) / len(losses) if losses else None,
        **asdict(traffic),
        "staleness_s": staleness,
        "staleness_max_s": largest,
        **shares,
        **columns,
    }


MOST_PENDING = 16
"""Evaluations that wait for the slowest node, each with the snapshots of all that are ahead of it."""


class NetworkRows:
    """Rows about all evaluated nodes together: consensus distance, and the average model's metrics if asked for.

    A row is complete when every evaluated node has given its snapshot for the same moment (its own round r, or a
    common instant). Where some nodes are far ahead of others, the oldest moments have no row, since snapshots are not kept
    for more than :data:`MOST_PENDING` of them.

    Args:
        setup: says who is evaluated and what is asked for.
        evaluate: evaluates the average model; gives the columns of all evaluation sets.
    """

    def __init__(self, setup: Setup, evaluate: Callable[[Model], dict[str, float]]) -> None:
        self._average = setup.experiment.evaluation.nodes == "average"
        self._evaluate, self._evaluated = evaluate, setup.outcome_ranks
        self._snapshots: Barrier[tuple[Mapping[str, Any], Model]] = Barrier(setup.outcome_ranks, MOST_PENDING)

    def add(self, moment: Moment, row: Mapping[str, Any], model: Model) -> dict[str, Any] | None:
        """Take a node's row and snapshot; gives the network's row when it is the last one."""
        if row["node"] not in self._evaluated:
            return None
        snapshots = self._snapshots.take(moment, row["node"], (row, model))
        return None if snapshots is None else self._row(moment, snapshots)

    def skip(self, moment: Moment) -> None:
        """A node could not give its snapshot for a moment: it will have no row."""
        self._snapshots.skip(moment)

    def without(self, rank: int, *, keep: bool = False) -> dict[Moment, dict[str, Any]]:
        """A node is gone; gives the rows, by moment, that waited for it alone. The snapshots that it gave count if they are
        to be kept."""
        complete = self._snapshots.without(rank, keep=keep)
        return {moment: self._row(moment, snapshots) for moment, snapshots in complete}

    def back(self, rank: int, round: int, tick: int) -> None:
        """A node is there (again), and is recorded from this round and this tick on."""
        if rank in self._evaluated:
            self._snapshots.back(rank, round, tick)

    def _row(
        self, moment: Moment, snapshots: Mapping[int, tuple[Mapping[str, Any], Model]]
    ) -> dict[str, Any]:
        rows, models = zip(*snapshots.values(), strict=True)
        parameters = [model.parameters for model in models]
        mean = average(parameters)
        network: dict[str, Any] = {
            "node": NETWORK,
            "round": min(row["round"] for row in rows),
            "time_s": max(row["time_s"] for row in rows),
            "wall_s": max(row["wall_s"] for row in rows),
            "moment": moment_text(moment),
            "consensus_distance": consensus_distance(parameters, mean),
        }
        if self._average:
            buffers = torch.stack([model.buffers for model in models]).mean(0)
            middle = Model(mean.to(parameters[0].dtype), buffers)
            network |= self._evaluate(middle)
        return network


class GraphLog:
    """Records the graph of the round that was completed last, where it is another than the one recorded
    before."""

    def __init__(self, topology: TopologySchedule, segment: Segment) -> None:
        self._topology, self._segment = topology, segment
        self._graph, self._rounds = topology.graph(0), 0

    def resume(self, rounds: int) -> None:
        """So many rounds are on record already."""
        self._rounds = rounds
        self._graph = self._topology.graph(max(rounds - 1, 0))

    def completed(self, rounds: int) -> None:
        """Some node has completed this many rounds and is recorded."""
        if rounds <= self._rounds:
            return
        self._rounds = rounds
        graph = self._topology.graph(rounds - 1)
        if graph is not self._graph:
            self._graph = graph
            self._segment.append({"round": rounds, "edges": edges(graph)})


class ViewLog:
    """Records the graph of all views where neighbours are sampled: at each moment at which every node was recorded that is
    there, an edge from a node to each that it knew. The moment's round is that of the node that was least far.

    Args:
        nodes: number of nodes.
        segment: where it is recorded.
    """

    def __init__(self, nodes: int, segment: Segment) -> None:
        self._views: Barrier[tuple[int, Sequence[int]]] = Barrier(range(nodes), MOST_PENDING)
        self._segment = segment
        self._rounds = 0

    def resume(self, rounds: int) -> None:
        """So many rounds are on record already."""
        self._rounds = rounds

    def add(self, moment: Moment, rank: int, rounds: int, view: Sequence[int]) -> None:
        """A node is recorded, with so many rounds completed and these ranks in its view."""
        if (views := self._views.take(moment, rank, (rounds, view))) is not None:
            self._record(views)

    def without(self, rank: int, *, keep: bool = False) -> None:
        """A node is gone; the views that it gave count if they are to be kept."""
        for _, views in self._views.without(rank, keep=keep):
            self._record(views)

    def back(self, rank: int, round: int, tick: int) -> None:
        """A node is there (again), and is recorded from this round and this tick on."""
        self._views.back(rank, round, tick)

    def _record(self, views: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        rounds = min(rounds for rounds, _ in views.values())
        if rounds > self._rounds:
            self._rounds = rounds
            graph = [[rank, other] for rank, (_, view) in views.items() for other in view]
            self._segment.append({"round": rounds, "edges": graph})


class TargetWatch:
    """Watches for ``stop.target``: the mean over evaluated nodes (or the network's row) at one evaluation.

    Args:
        target: metric and level; a metric of which less is better must fall to it, any other rise.
        reporters: the nodes that are recorded with the metric at an evaluation; a None of theirs does not count.
    """

    def __init__(self, target: Target | None, reporters: Iterable[int]) -> None:
        self._target, self._reporters = target, frozenset(reporters)
        self._values: Barrier[float | None] = Barrier(self._reporters)

    def without(self, rank: int, *, keep: bool = False) -> None:
        """A node is gone; what it has reported counts if it is to be kept."""
        for _ in self._values.without(rank, keep=keep):
            """What is complete without it has been missed by then."""

    def back(self, rank: int, round: int, tick: int) -> None:
        """A node is there (again), and reports from this round and this tick on."""
        if rank in self._reporters:
            self._values.back(rank, round, tick)

    def reached(self, moment: Moment, row: Mapping[str, Any]) -> bool:
        """Take a row; whether it completes an evaluation at which the target is met."""
        if self._target is None:
            return False
        value = row.get(self._target.metric)
        if row["node"] == NETWORK:
            values = [value]
        elif row["node"] in self._reporters:
            taken = self._values.take(moment, row["node"], value)
            if taken is None:
                return False
            values = list(taken.values())
        else:
            return False
        known = [float(each) for each in values if each is not None]
        if not known:
            return False
        mean = math.fsum(known) / len(known)
        falling = lower_is_better(self._target.metric)
        return mean <= self._target.value if falling else mean >= self._target.value


def reporters(setup: Setup) -> list[int]:
    """The nodes that report the target's metric at an evaluation: who trains, or who is evaluated."""
    target = setup.experiment.stop.target
    if target is not None and target.metric == "train_loss":
        return [rank for rank, part in enumerate(setup.parts) if part.size]
    return sorted(setup.evaluated)


def resume_rows(
    setup: Setup, cut: Cut, metrics: pl.DataFrame, rows: NetworkRows, target: TargetWatch
) -> None:
    """Let nodes that are saved ahead of others have their part in what the others will complete.

    Args:
        setup: what is run.
        cut: where it goes on.
        metrics: the rows that are on record until there.
        rows: the rows of the network.
        target: the watch over the target.
    """
    evaluated = {rank: r for rank, r in cut.rounds.items() if rank in setup.outcome_ranks}
    least = min(evaluated.values(), default=0)  # (all evaluated nodes may be lost)
    ahead = {rank: r for rank, r in evaluated.items() if r > least}
    for rank, last in ahead.items():
        for moment in (r for r in range(least + 1, last) if is_due(setup, r)):
            rows.skip(moment)  # the model that it had then is not kept
        if not is_due(setup, last):
            continue
        for row in metrics.filter((pl.col("node") == rank) & (pl.col("round") == last)).to_dicts():
            target.reached(last, row)
            rows.add(last, row, cut.read(rank).model)


def stopwatch(before_s: float = 0.0) -> Callable[[], float]:
    """Real seconds since this call, and before it."""
    start = time.perf_counter() - before_s
    return lambda: time.perf_counter() - start
