"""The mean of a metric over the nodes, as a step function of time and of the network's bytes.

Times to a level, values at a budget, ``stop.target`` and figures over time all come from this one function:

- A row counts from ``time_s - model_age_s`` on, when its model was complete. A value that belongs to the instant of the row
  (``train_loss``, ages and shares, values of ``node.record``) counts from ``time_s`` on.
- The function is the mean over the nodes of their newest values. It begins when all evaluated nodes that are present
  have a value. A node without the metric in a row after round 0 is not waited for. A newcomer counts from its first row.
- A node that is frozen, or whose rounds are over, keeps its last value. A node that crashes or leaves stops counting at
  that instant. No row counts from before its node's last return, and no row of an absent node counts.
- Whatever happens at one instant enters together. A mean that includes NaN or infinity is NaN, which is at no level.

The first step at a level is the time to it; the last step within a budget gives the value at the budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from jaxtyping import Float

from gossamer.errors import BadInput
from gossamer.results.reading import NETWORK
from gossamer.results.run_data import RunData
from gossamer.results.tidy import at_level, belongs_to_model, evaluation_sets

MAX_DRAWN = 500
"""Figures over time and bytes draw at most this many instants of the step function."""
_GONE, _BACK = ("lost", "left", "leave", "absent"), ("joined", "returned")
_MOMENT = pl.col("moment").fill_null("round")
_EXPONENT = 1074  # every finite float is a whole multiple of 2 ** -1074


class Step(NamedTuple):
    """The mean over the nodes from an instant on. ``nodes`` is their number, and ``changes`` has the new value of each node
    since the step before; None for a node that no longer counts."""

    time_s: float
    mean: float
    nodes: int
    changes: dict[int, float | None]


class NodeMean:
    """The mean over the nodes of their newest values, from rows and events in any order up to the instant of
    :meth:`advance`. Sums are exact, so they neither drift nor depend on the order of the nodes.

    ``awaited`` are the nodes for which the function waits at its start."""

    def __init__(self, awaited: Iterable[int]) -> None:
        self._awaited = set(awaited)
        self._pending: list[tuple[float, bool, int, int, Any]] = []  # time, whether a row, number, node, what
        self._pushed = 0
        self._presence: dict[int, list[tuple[float, bool]]] = {}
        self._values: dict[int, int | None] = {}  # in units of 2 ** -1074; None if not finite
        self._away: set[int] = set()
        self._total, self._not_finite = 0, 0  # the sum of the finite values, and the number of others
        self._changes: dict[int, float | None] = {}
        self._begun = False
        self._time_s = -math.inf  # everything until then has been taken into account

    def row(
        self, rank: int, time_s: float, value: float | None, *, age_s: float = 0.0, after_start: bool = True
    ) -> None:
        """A node's row at ``time_s``, whose value counts from ``age_s`` seconds before; None if the row lacks the metric.
        ``after_start``: the row is of a round after round 0."""
        from_s = counted_from(time_s, age_s)
        presence = self._presence.get(rank, [])
        if k := bisect_right(presence, time_s, key=itemgetter(0)):
            since_s, present = presence[k - 1]
            if not present:
                return
            from_s = max(from_s, since_s)
        if value is not None or after_start:
            self._push(from_s, True, rank, None if value is None else float(value))

    def gone(self, rank: int, time_s: float) -> None:
        """A node crashes or leaves, or has not joined yet."""
        self._presence.setdefault(rank, []).append((time_s, False))
        self._push(time_s, False, rank, False)

    def back(self, rank: int, time_s: float) -> None:
        """A node returns or joins."""
        if self._presence.get(rank, [(0.0, True)])[-1][1]:
            return  # it was never gone, but frozen
        self._presence[rank].append((time_s, True))
        self._push(time_s, False, rank, True)

    def advance(self, until_s: float = math.inf) -> Iterator[Step]:
        """The steps up to an instant, which must have passed. A row or event that is reported later, about an
        earlier instant, counts from this one on."""
        self._pending.sort(key=itemgetter(0, 1, 2))
        due = bisect_right(self._pending, until_s, key=itemgetter(0))
        events, self._pending = self._pending[:due], self._pending[due:]
        for time_s, same in groupby(events, key=itemgetter(0)):
            changed = [self._apply(is_row, rank, what) for _, is_row, _, rank, what in same]
            self._begun = self._begun or bool(self._values and not self._awaited)
            if self._begun and any(changed):
                changes, self._changes = self._changes, {}
                yield Step(time_s, self._mean(), len(self._values), changes)
        last_s = events[-1][0] if events else -math.inf
        self._time_s = max(self._time_s, until_s if math.isfinite(until_s) else last_s)

    def _push(self, time_s: float, is_row: bool, rank: int, what: Any) -> None:
        self._pushed += 1
        self._pending.append((max(time_s, self._time_s), is_row, self._pushed, rank, what))

    def _apply(self, is_row: bool, rank: int, what: Any) -> bool:
        """Take one row or event into account. Returns whether there is a new step, unless nodes are still awaited."""
        waited = rank in self._awaited
        if not is_row:
            self._away.discard(rank) if what else self._away.add(rank)
            self._awaited -= self._away
            return (not what and self._forget(rank)) or (waited and rank in self._away)
        if rank in self._away:
            return False
        self._awaited.discard(rank)
        if what is None:
            return waited
        self._forget(rank)
        self._changes[rank] = what
        self._values[rank] = units = _units(what)
        if units is None:
            self._not_finite += 1
        else:
            self._total += units
        return True

    def _forget(self, rank: int) -> bool:
        if rank not in self._values:
            return False
        if (units := self._values.pop(rank)) is None:
            self._not_finite -= 1
        else:
            self._total -= units
        self._changes[rank] = None
        return True

    def _mean(self) -> float:
        if self._not_finite or not self._values:
            return math.nan
        return self._total / (len(self._values) << _EXPONENT)


def _units(value: float) -> int | None:
    """A finite float as a multiple of 2 ** -1074."""
    if not math.isfinite(value):
        return None
    numerator, denominator = value.as_integer_ratio()  # the denominator is a power of two
    return numerator << (_EXPONENT + 1 - denominator.bit_length())


def counted_from(time_s: float, age_s: float) -> float:
    """The instant ``age_s`` before another, to the nanosecond of the clock: models that were completed together count
    together, whenever they were seen."""
    return round(time_s - age_s, 9) if age_s else time_s


class Resolution(NamedTuple):
    """How exactly an answer at ``time_s`` is known: ``age_s`` seconds before it, the record last knows the model of some
    counting node, namely ``node`` (None if all are known)."""

    age_s: float
    node: int | None
    time_s: float

    @property
    def coarse(self) -> bool:
        """Whether a comparison with other answers would mislead: the age is more than a tenth of the time."""
        return self.age_s > self.time_s / 10

    def __str__(self) -> str:
        if self.node is None:
            return f"{self.time_s:.3g} s; all nodes are known"
        who = "the network" if self.node == NETWORK else f"node {self.node}"
        return f"{self.time_s:.3g} s; {who} was last seen {self.age_s:.3g} s before"


class Steps:
    """The step function of a metric of a run; see :meth:`gossamer.Run.steps`.

    Attributes:
        table: a row per step: ``time_s``, ``wall_s``, ``bytes`` (sent by all nodes until then; null if not recorded),
            ``mean`` and ``count`` (nodes), sorted by time.
    """

    def __init__(self, run: RunData, metric: str) -> None:
        self._run, self._metric, self._rows = run, metric, rows_of(run, metric)
        mean = NodeMean(_awaited(run, metric, self._rows))
        self._returns: dict[int, list[float]] = {}
        if not self._rows["node"].eq(NETWORK).any():
            for rank, event, time_s in _presence(run):
                if event in _GONE:
                    mean.gone(rank, time_s)
                else:
                    mean.back(rank, time_s)
                    self._returns.setdefault(rank, []).append(time_s)
        columns = self._rows.select("node", "time_s", "value", "age_s", pl.col("round") > 0)
        for rank, time_s, value, age_s, after_start in columns.iter_rows():
            mean.row(rank, time_s, value, age_s=age_s, after_start=after_start)
        steps, ends = list[tuple[float, float, int]](), list[int]()
        ranks, values = list[int](), list[float | None]()
        for step in mean.advance():
            steps.append((step.time_s, step.mean, step.nodes))
            ranks += step.changes.keys()
            values += step.changes.values()
            ends.append(len(ranks))
        # The changes of step k are from ends[k - 1] to ends[k]; a node that stops counting has None.
        self._ends = ends
        self._nodes, self._changed = np.unique(np.array(ranks, dtype=np.int64), return_inverse=True)
        self._values = np.array([math.nan if value is None else value for value in values])
        self._counts = np.array([value is not None for value in values], dtype=bool)
        times = np.array([time_s for time_s, _, _ in steps])
        self.table = pl.DataFrame(
            {
                "time_s": times,
                "wall_s": _known_by(times, run.metrics["time_s"], run.metrics["wall_s"]),
                "bytes": bytes_by(run, times),
                "mean": [mean for _, mean, _ in steps],
                "count": [nodes for _, _, nodes in steps],
            },
            schema={"time_s": pl.Float64, "wall_s": pl.Float64, "bytes": pl.Float64, "mean": pl.Float64}
            | {"count": pl.Int64},
        ).with_columns(pl.col("wall_s", "bytes").fill_nan(None))

    def values(self, indices: Sequence[int]) -> list[dict[int, float]]:
        """The values of the counting nodes, by rank, at some steps in ascending order."""
        values = np.full(len(self._nodes), math.nan)
        counts = np.zeros(len(self._nodes), dtype=bool)
        found, start = [], 0
        for index in indices:
            news = slice(start, start := self._ends[index])
            # Of several changes of a node, the last one holds.
            values[self._changed[news]] = self._values[news]
            counts[self._changed[news]] = self._counts[news]
            found.append(dict(zip(self._nodes[counts].tolist(), values[counts].tolist(), strict=True)))
        return found

    def drawn(self, shares: Sequence[float] = (), limit: int = MAX_DRAWN) -> pl.DataFrame:
        """At most ``limit`` steps, evenly chosen among all, with the first and the last, and with statistics over
        the nodes: the columns of :attr:`table`, ``std`` (with the divisor n), ``min``, ``max``, and a column for each share,
        with this quantile."""
        some = self.table.with_row_index("step").filter(pl.col("count") > 0)["step"].to_list()
        chosen = [some[round(k)] for k in np.linspace(0, len(some) - 1, min(len(some), limit))]
        arrays = [np.array(list(values.values())) for values in self.values(chosen)]
        with np.errstate(invalid="ignore"):
            statistics: dict[str, list[float]] = {
                name: [float(function(array)) for array in arrays]
                for name, function in (("std", np.std), ("min", np.min), ("max", np.max))
            }
            for share in shares:
                statistics[str(share)] = [float(np.quantile(array, share)) for array in arrays]
        columns = [pl.Series(name, values, dtype=pl.Float64) for name, values in statistics.items()]
        return self.table[chosen].with_columns(columns)

    def last(self) -> dict[str, Any] | None:
        """The statistics of the last step over the counting nodes (``mean``, ``std``, ``count``), and the range of rounds of
        their newest rows, ``round_least`` to ``round_most``; None without steps."""
        counted = np.flatnonzero(self.table["count"].to_numpy())
        if not len(counted):
            return None
        index = int(counted[-1])
        [values] = self.values([index])
        counts = pl.col("node").is_in(list(values)) & pl.col("value").is_not_null()
        newest = (
            self._rows.filter(counts).group_by("node", maintain_order=True).last()
        )  # rows are in the order of time
        with np.errstate(invalid="ignore"):
            std = float(np.std(list(values.values())))
        return {
            "mean": self.table["mean"][index],
            "std": std,
            "count": len(values),
            "round_least": newest["round"].min(),
            "round_most": newest["round"].max(),
        }

    def first(self, level: float) -> int | None:
        """The first step at a level."""
        means, classes = self.table["mean"].to_list(), self._run.class_columns
        return next((k for k, mean in enumerate(means) if at_level(self._metric, mean, level, classes)), None)

    def before(self, time_s: float) -> Resolution:
        """The resolution of an answer at a step: an earlier step could be missing on record since the age."""
        return self._resolution(time_s, bisect_left)

    def until(self, time_s: float) -> Resolution:
        """The resolution of the value at an instant: a later step could be missing on record since the age."""
        return self._resolution(time_s, bisect_right)

    def within_bytes(self, budget: float) -> Resolution:
        """The resolution of the value at a budget of bytes. The budget was used up at some instant before the first step
        beyond it, or before the last row."""
        beyond = self.table.filter(pl.col("bytes") > budget)["time_s"]
        return self.before(beyond[0]) if len(beyond) else self.until(float(self._rows["time_s"][-1]))

    def _resolution(self, time_s: float, rows_until: Any) -> Resolution:
        oldest = Resolution(0.0, None, time_s)
        step = int(np.searchsorted(self.table["time_s"].to_numpy(), time_s, side="right")) - 1
        for rank in self.values([step])[0] if step >= 0 else ():
            starts, known = self._known[rank]
            k = rows_until(starts, time_s)
            known_s = max(known[k - 1] if k else 0.0, self._last_return(rank, time_s))
            if time_s - known_s > oldest.age_s:
                oldest = Resolution(time_s - known_s, rank, time_s)
        return oldest

    def _last_return(self, rank: int, time_s: float) -> float:
        """When a node has returned or joined for the last time until an instant; 0 if it was never away."""
        returns = self._returns.get(rank, [])
        back = bisect_right(returns, time_s)
        return returns[back - 1] if back else 0.0

    @cached_property
    def _known(self) -> dict[int, tuple[list[float], list[float]]]:
        """By node: from when each row counts, and how long its model is known to be the newest one: until the row's
        own instant, or until the next row if that is of the next round. (Outside of rounds and, with ``of: mixed``, within
        them, a model may change many times.) Nothing changes after the last row of a run that has ended by itself."""
        start = {"from_s": 0.0, "time_s": 0.0, "round": 0, "at_round": True}
        known: dict[int, tuple[list[float], list[float]]] = {}
        ended = self._run.status in ("done", "diverged")
        rows = self._rows.filter(pl.col("value").is_not_null())
        shown = self._run.shown
        at_round = pl.lit(shown == "round") | (_MOMENT.str.contains("round") & pl.lit(shown == "instant"))
        rows = rows.select("node", "from_s", "time_s", "round", at_round=at_round)
        for (node,), of_node in rows.group_by("node", maintain_order=True):
            own = of_node.drop("node").to_dicts()
            for row in own:
                row["from_s"] = max(row["from_s"], self._last_return(node, row["time_s"]))
            own = [start, *sorted(own, key=itemgetter("from_s", "time_s"))]
            until = [
                later["from_s"] if later["at_round"] and later["round"] == row["round"] + 1 else row["time_s"]
                for row, later in pairwise(own)
            ]
            known[int(node)] = (
                [row["from_s"] for row in own],
                [*until, math.inf if ended else own[-1]["time_s"]],
            )
        return known


def steps_of(run: RunData, metric: str) -> Steps | None:
    """The step function of a metric, computed once for a run; see :meth:`gossamer.Run.steps`."""
    key = "steps", metric
    if key not in run.derived:
        known = metric in run.metrics.columns and timed(run, metric)
        run.derived[key] = Steps(run, metric) if known else None
    steps: Steps | None = run.derived[key]
    return steps


def rows_of(run: RunData, metric: str) -> pl.DataFrame:
    """The rows that count for a metric, in the order of time: those of all nodes, or of the network if no node has the
    metric. Columns: ``node``, ``round``, ``time_s``, ``moment``, ``value``, ``age_s`` (from when a value counts, before
    ``time_s``) and ``from_s`` (the same as a time)."""
    has, is_node = pl.col(metric).is_not_null(), pl.col("node") >= 0
    of_nodes = not run.metrics.filter(has & is_node).is_empty()
    aged = (belongs_to_model(run, metric) or not of_nodes) and "model_age_s" in run.metrics.columns
    age = pl.col("model_age_s").fill_null(0.0) if aged else pl.lit(0.0)
    counted = is_node
    if not of_nodes:  # on a time grid, the network's rows of rounds are no instants
        counted = ~is_node & (pl.lit(run.every_s is None) | _MOMENT.str.contains("tick|end"))
    return (
        run.metrics.filter(counted, pl.col("time_s").is_not_null())
        .select("node", "round", "time_s", "moment", value=pl.col(metric).cast(pl.Float64), age_s=age)
        .with_columns(from_s=_from(pl.col("age_s")))
        .sort("time_s", maintain_order=True)
    )


def _from(age_s: pl.Expr) -> pl.Expr:
    """:func:`counted_from` of rows."""
    time_s = pl.col("time_s")
    return pl.when(age_s == 0).then(time_s).otherwise((time_s - age_s).round(9))


def timed(run: RunData, metric: str) -> bool:
    """Whether a metric has a place on the time axis. The network's rows by rounds have none where nodes reached a round
    at different times: they describe models that never existed together."""
    rows = rows_of(run, metric).filter(pl.col("value").is_not_null())
    if rows.is_empty() or rows["node"][0] != NETWORK:
        return not rows.is_empty()
    rounds = rows.filter(~_MOMENT.str.contains("tick|end"))["round"]
    outcome = run.setup.get("outcome_ranks", range(run.nodes))
    at_round = pl.col("node").is_in(list(outcome)) & pl.col("round").is_in(rounds.to_list())
    arrivals = run.metrics.filter(at_round, _MOMENT.str.contains("round")).group_by("round")
    return bool((arrivals.agg(pl.col("time_s").n_unique())["time_s"] == 1).all())


def check_timed(run: RunData, metric: str, option: str = "time axis") -> None:
    """Refuse a metric without a place on the time axis; see :func:`timed`."""
    if not timed(run, metric):
        raise BadInput(
            f"{option}: {metric} of the run {run.id} is of equal rounds, which its nodes reached at different times;"
            " accepted: runs with evaluation.every_s"
        )


def bytes_by(run: RunData, times_s: Float[np.ndarray, " times"]) -> Float[np.ndarray, " times"]:
    """The bytes that all nodes had sent by some instants, as far as the record knows: the largest ``network_bytes`` of a row
    or an event until then, or the sum of the nodes' last ``bytes_sent``, if that is more. Records without ``network_bytes``
    give at least this many. NaN where nothing is recorded."""
    metrics = run.metrics.filter(pl.col("node") >= 0).sort("time_s", maintain_order=True)
    most = pl.col("bytes_sent").cum_max().over("node")
    news = metrics.filter(pl.col("bytes_sent").is_not_null()).with_columns(
        news=most - most.shift().over("node").fill_null(0)
    )
    known = [_known_by(times_s, news["time_s"], news["news"].cum_sum())]
    for table in (run.metrics, run.events):
        if "network_bytes" in table.columns:
            age = pl.col("model_age_s").fill_null(0.0) if "model_age_s" in table.columns else pl.lit(0.0)
            total = table.select(time_s=_from(age), total="network_bytes").drop_nulls()
            known.append(_known_by(times_s, total["time_s"], total["total"]))
    largest: Float[np.ndarray, " times"] = np.fmax.reduce(known)
    return largest


def _known_by(
    times_s: Float[np.ndarray, " times"], known_s: pl.Series, values: pl.Series
) -> Float[np.ndarray, " times"]:
    """The largest value known by each of some instants; NaN before the first."""
    known = pl.DataFrame({"time_s": known_s, "value": values}).drop_nulls().sort("time_s")
    largest = known["value"].cum_max().cast(pl.Float64).to_numpy()
    at = np.searchsorted(known["time_s"].to_numpy(), times_s, side="right")
    return np.concatenate([[math.nan], largest])[at]


def _awaited(run: RunData, metric: str, rows: pl.DataFrame) -> list[int]:
    """The nodes for which the function waits at its start: those that have the metric or, for a metric that the algorithm
    records, those that are evaluated."""
    has = rows.filter(pl.col("value").is_not_null())["node"].unique().to_list()
    if metric == "train_loss" or belongs_to_model(run, metric) or NETWORK in has:
        return has
    evaluated: list[int] = run.setup.get("evaluated") or _with_any(run)
    return evaluated or has


def _with_any(run: RunData) -> list[int]:
    """The nodes with a metric of an evaluation set."""
    prefixes = tuple(f"{name}_" for name in evaluation_sets(run.metrics.columns))
    columns = [name for name in run.metrics.columns if name.startswith(prefixes)]
    has = pl.any_horizontal(pl.col(columns).is_not_null()) & (pl.col("node") >= 0)
    return run.metrics.filter(has)["node"].unique().to_list() if columns else []


def _presence(run: RunData) -> Iterator[tuple[int, str, float]]:
    """When nodes went and came back, in the order of time."""
    events = run.events.filter(pl.col("event").is_in([*_GONE, *_BACK])).drop_nulls(["node", "time_s"])
    yield from events.select("node", "event", "time_s").iter_rows()
