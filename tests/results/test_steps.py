"""The step function of a metric, against a plain definition that looks at all rows again for every instant."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gossamer import BadInput, Experiment, run
from gossamer.results.comparison import compare, quantities, quantity
from gossamer.results.finals import final, final_summary
from gossamer.results.folder import RunFolder
from gossamer.results.groups import Group, find_baseline
from gossamer.results.plots import curve_figure
from gossamer.results.run import Run
from gossamer.results.steps import MAX_DRAWN, NodeMean, Step
from gossamer.results.tidy import at_level, lower_is_better

# --- the plain definition


class Row(NamedTuple):
    node: int
    time_s: float
    age_s: float
    value: float | None
    round: int = 1


class Change(NamedTuple):
    """A node goes (``present`` is false) or comes back."""

    node: int
    time_s: float
    present: bool


def counts_from(row: Row, changes: Sequence[Change]) -> float:
    """From when a row counts: not from before its node's last return; never for the row of an absent node."""
    before = [change for change in changes if change.node == row.node and change.time_s <= row.time_s]
    if not before:
        return row.time_s - row.age_s
    return max(row.time_s - row.age_s, before[-1].time_s) if before[-1].present else math.inf


def plain(
    rows: Sequence[Row], changes: Sequence[Change], awaited: Iterable[int]
) -> dict[float, tuple[float, int]]:
    """The mean and the number of nodes at every instant at which a row counts or a node goes. The rows of a node are in
    the order of time."""
    from_s = {row: counts_from(row, changes) for row in rows}
    instants = {time_s for time_s in from_s.values() if time_s < math.inf}
    instants |= {change.time_s for change in changes if not change.present}
    steps: dict[float, tuple[float, int]] = {}
    begun = False
    for now_s in sorted(instants):
        away, newest, excused = set(), dict[int, float](), set()
        for node in {row.node for row in rows} | {change.node for change in changes}:
            last = [change for change in changes if change.node == node and change.time_s <= now_s]
            if last and not last[-1].present:
                away.add(node)
                continue
            since_s = last[-1].time_s if last else -math.inf
            own = [row for row in rows if row.node == node and since_s <= from_s[row] <= now_s]
            own.sort(key=lambda row: from_s[row])
            if known := [row.value for row in own if row.value is not None]:
                newest[node] = known[-1]
        excused = {row.node for row in rows if row.value is None and row.round > 0 and from_s[row] <= now_s}
        excused |= {change.node for change in changes if not change.present and change.time_s <= now_s}
        had = {row.node for row in rows if row.value is not None and from_s[row] <= now_s}
        begun = begun or (bool(newest) and set(awaited) <= excused | had)
        if begun:
            finite = all(math.isfinite(value) for value in newest.values())
            total = sum(map(Fraction, newest.values())) if finite else Fraction()
            mean = float(total / len(newest)) if newest and finite else math.nan
            steps[now_s] = mean, len(newest)
    return steps


def same(found: Iterable[Step], steps: dict[float, tuple[float, int]]) -> None:
    """Assert that the functions are equal at every instant at which one of them may change."""
    by_time = {step.time_s: (step.mean, step.nodes) for step in found}
    current: tuple[float, int] = math.nan, 0
    for time_s in sorted({*by_time, *steps}):
        current = by_time.get(time_s, current)
        mean, nodes = steps.get(time_s, current)
        assert current[1] == nodes, time_s
        assert current[0] == mean or (math.isnan(current[0]) and math.isnan(mean)), time_s


# --- the definition, for any rows and events


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Row], list[Change], list[int]]:
    """Rows of up to four nodes on a grid of quarters, in the order of time, with ages; absences; and awaited nodes."""
    rows: list[Row] = []
    changes: list[Change] = []
    quarters = st.integers(1, 8).map(lambda n: n / 4)
    values = st.one_of(st.none(), st.floats(-1, 1), st.sampled_from([math.nan, math.inf, 1e-300, 1e300]))
    for node in range(draw(st.integers(1, 4))):
        time_s = since_s = 0.0
        for _ in range(draw(st.integers(0, 6))):
            time_s += draw(quarters)
            if draw(st.integers(0, 4)) == 0:
                back_s = time_s + draw(quarters)
                changes += [Change(node, time_s, False), Change(node, back_s, True)]
                time_s = since_s = back_s
            else:
                age_s = min(draw(quarters) - 0.25, time_s - since_s)
                rows.append(Row(node, time_s, age_s, draw(values), draw(st.integers(0, 3))))
    awaited = draw(st.lists(st.sampled_from([0, 1, 2, 3]), unique=True))
    return sorted(rows, key=lambda row: row.time_s), sorted(changes, key=lambda c: c.time_s), awaited


@given(histories())
def test_steps_equal_the_plain_definition(history: tuple[list[Row], list[Change], list[int]]) -> None:
    rows, changes, awaited = history
    mean = NodeMean(awaited)
    for change in changes:
        (mean.back if change.present else mean.gone)(change.node, change.time_s)
    for row in rows:
        mean.row(row.node, row.time_s, row.value, age_s=row.age_s, after_start=row.round > 0)
    same(mean.advance(), plain(rows, changes, awaited))


@given(histories(), st.floats(-1, 1))
def test_target_is_met_online_where_the_whole_record_is_at_the_level(
    history: tuple[list[Row], list[Change], list[int]], level: float
) -> None:
    """Rows and events in the order of time, as a simulation reports them: an instant is looked at when it is over, and is
    then known for good, if no row is of an earlier time than the last instant."""
    rows, changes, awaited = history
    rows = [row._replace(age_s=0.0) for row in rows]
    online = NodeMean(awaited)
    found: list[Step] = []
    for now_s in sorted({item.time_s for item in (*rows, *changes)}):
        for change in changes:
            if change.time_s == now_s:
                (online.back if change.present else online.gone)(change.node, now_s)
        for row in rows:
            if row.time_s == now_s:
                online.row(row.node, now_s, row.value, after_start=row.round > 0)
        found += online.advance(now_s)
    steps = plain(rows, changes, awaited)
    same(found, steps)
    first = next(
        (time_s for time_s, (mean, _) in steps.items() if at_level("test_accuracy", mean, level)), None
    )
    assert first == next((s.time_s for s in found if at_level("test_accuracy", s.mean, level)), None)


def test_sums_do_not_drift_or_depend_on_the_order_of_nodes() -> None:
    draw = random.Random(1)
    values = [[draw.choice([1e16, 1.0, -1e16, 1e-9]) * draw.random() for _ in range(7)] for _ in range(50)]
    orders = [list(range(7)), list(reversed(range(7)))]
    found = []
    for order in orders:
        mean = NodeMean(range(7))
        for time_s, row in enumerate(values):
            for node in order:
                mean.row(node, float(time_s), row[node])
        found.append([step.mean for step in mean.advance()])
    assert found[0] == found[1] == [float(sum(map(Fraction, row)) / 7) for row in values]


def test_models_that_were_completed_together_count_together() -> None:
    """Both at 1.9 s; 2.3 - 0.4 and 3.2 - 1.3 differ from it in the last bits."""
    assert len({1.9, 2.3 - 0.4, 3.2 - 1.3}) > 1
    mean = NodeMean([0, 1])
    for node, (time_s, age_s) in enumerate(((2.3, 0.4), (3.2, 1.3))):
        mean.row(node, 0.0, 0.0)
        mean.row(node, time_s, 0.5, age_s=age_s)
    assert [(step.time_s, step.mean) for step in mean.advance()] == [(0.0, 0.0), (1.9, 0.5)]


def test_late_reports_count_as_they_arrive() -> None:
    mean = NodeMean([0, 1])
    mean.row(0, 1.0, 0.5)
    mean.row(1, 2.0, 0.5)
    assert [(step.time_s, step.mean) for step in mean.advance()] == [(2.0, 0.5)]
    mean.row(0, 1.5, 0.7)
    assert [(step.time_s, step.mean) for step in mean.advance()] == [(2.0, pytest.approx(0.6))]


@pytest.mark.parametrize(
    "metric",
    [
        "test_accuracy",
        "test_loss",
        "test_error",
        "test_rmse",
        "test_mae",
        "test_perplexity",
        "consensus_distance",
    ],
)
def test_level_is_reached_in_the_direction_of_improvement(metric: str) -> None:
    """For every kind of metric: a value on either side of the level, and the level itself."""
    met = {value: at_level(metric, value, 0.5) for value in (0.4, 0.5, 0.6)}
    lower = lower_is_better(metric)
    assert met == {0.4: lower, 0.5: True, 0.6: not lower}
    assert lower == (metric != "test_accuracy")
    assert not at_level(metric, math.nan, 0.5)


# --- records


def recorded(
    out: Path,
    rows: Sequence[dict[str, Any]],
    events: Sequence[tuple[float, int, str]] = (),
    *,
    status: Any = "done",
    **experiment: Any,
) -> Run:
    """A record with these rows, not sorted, and events (time, node, name)."""
    config = {"name": "t", "nodes": 1 + max(row["node"] for row in rows), **experiment}
    folder = RunFolder.create(out, "t", experiment=yaml.safe_dump(config), environment={})
    with folder.segment("metrics") as metrics, folder.segment("events") as log:
        for row in rows:
            metrics.append({"moment": "round", "wall_s": row["time_s"], **row})
        for time_s, node, event in events:
            log.append({"time_s": time_s, "node": node, "event": event, "detail": ""})
    if status is not None:
        folder.write_status(status)
    return Run(folder.path)


def means(run: Run, metric: str = "test_accuracy") -> list[tuple[float, float, int]]:
    steps = run.steps(metric)
    assert steps is not None
    return [
        (time_s, round(mean, 9), n)
        for time_s, mean, n in steps.table.select("time_s", "mean", "count").rows()
    ]


def paced(*paces: float, rounds: int, every: int = 1) -> list[dict[str, Any]]:
    """Nodes whose rounds take this long, with a value of round / 10 and 10 bytes a second, in the order of nodes."""
    return [
        {
            "node": node,
            "round": r,
            "time_s": pace * r,
            "test_accuracy": r / 10,
            "bytes_sent": round(10 * pace * r),
        }
        for node, pace in enumerate(paces)
        for r in range(0, rounds + 1, every)
    ]


def test_a_point_of_a_round_is_not_at_the_mean_of_its_times(tmp_path: Path) -> None:
    """Node 0 takes 4 s a round, node 1 one: at 4 s, they have finished rounds 1 and 4."""
    run = recorded(tmp_path, paced(4.0, 1.0, rounds=4))
    assert means(run) == [
        *((float(k), round(k / 20, 9), 2) for k in range(4)),
        (4.0, 0.25, 2),
        (8.0, 0.3, 2),
        (12.0, 0.35, 2),
        (16.0, 0.4, 2),
    ]
    time, sent = (quantity(f"{axis} to test_accuracy=0.25") for axis in ("time_s", "bytes"))
    # Node 0 has sent 40 bytes by its row at 4 s, and node 1 as many.
    assert (time.of(run), sent.of(run)) == (4.0, 80.0)
    assert quantity("test_accuracy at time_s=10").of(run) == pytest.approx(0.3)
    assert quantity("test_accuracy at time_s=17").of(run) is None


def test_rows_count_from_when_their_model_was_complete(tmp_path: Path) -> None:
    """On a grid of 1 s, node 0 shows the models that it completed at 0.7 and 1.4 s; losses belong to the instant."""
    shown = {
        0: [(0, 0.0, 0.0), (1, 1.0, 0.3), (2, 2.0, 0.6)],
        1: [(0, 0.0, 0.0), (0, 1.0, 1.0), (1, 2.0, 0.1)],
    }
    rows = [
        {
            "node": node,
            "round": r,
            "time_s": t,
            "model_age_s": age,
            "moment": f"tick {k}",
            "test_accuracy": r / 10,
        }
        | {"train_loss": float(k + 1)}
        for node, of_node in shown.items()
        for k, (r, t, age) in enumerate(of_node)
    ]
    run = recorded(tmp_path, rows, evaluation={"every_s": 1.0, "of": "round"})
    # Node 1 is seen in its first round at 1 s, with the model from the start.
    assert means(run) == [(0.0, 0.0, 2), (0.7, 0.05, 2), (1.4, 0.1, 2), (1.9, 0.15, 2)]
    assert [time_s for time_s, _, _ in means(run, "train_loss")] == [0.0, 1.0, 2.0]
    assert quantity("time_s to test_accuracy=0.1").of(run) == 1.4
    end = final(run, "test_accuracy")
    assert end is not None
    assert (end.mean, end.round_least, end.round_most) == (pytest.approx(0.15), 1, 2)


def test_presence(tmp_path: Path) -> None:
    """Node 1 crashes at 2.5 s and is back at 4.5 s; node 2 joins at 1.5 s; node 3 is frozen and keeps its value."""
    times = {0: range(7), 1: (0, 1, 2, 6), 2: (2, 3, 4, 5, 6), 3: (0, 1)}
    rows = [
        {"node": node, "round": t, "time_s": float(t), "test_accuracy": (10 * node + t) / 100}
        for node, of_node in times.items()
        for t in of_node
    ]
    # A row of NaN that some version wrote for the node while it was away.
    rows.append({"node": 1, "round": 3, "time_s": 3.0, "test_accuracy": math.nan})
    # Its checkpoint of 2 s does not count from before its return.
    rows.append({"node": 1, "round": 2, "time_s": 5.0, "model_age_s": 3.0, "test_accuracy": 0.12})
    random.Random(2).shuffle(rows)
    events = [
        (0.0, 2, "absent"),
        (1.5, 2, "joined"),
        (1.5, 3, "frozen"),
        (2.5, 1, "lost"),
        (4.5, 1, "returned"),
    ]
    run = recorded(tmp_path, rows, events)
    expected = {
        0.0: [0.00, 0.10, 0.30],
        1.0: [0.01, 0.11, 0.31],
        2.0: [0.02, 0.12, 0.22, 0.31],
        2.5: [0.02, 0.22, 0.31],
        3.0: [0.03, 0.23, 0.31],
        4.0: [0.04, 0.24, 0.31],
        4.5: [0.04, 0.12, 0.24, 0.31],
        5.0: [0.05, 0.12, 0.25, 0.31],
        6.0: [0.06, 0.16, 0.26, 0.31],
    }
    assert means(run) == [(t, pytest.approx(sum(of) / len(of)), len(of)) for t, of in expected.items()]


def test_a_node_that_leaves_stops_counting_and_the_level_may_be_reached_then(tmp_path: Path) -> None:
    rows = [*paced(1.0, rounds=4), {"node": 1, "round": 0, "time_s": 0.0, "test_accuracy": 0.0}]
    left = recorded(tmp_path, rows, [(2.5, 1, "left")])
    assert quantity("time_s to test_accuracy=0.2").of(left) == 2.5
    assert quantity("time_s to test_accuracy=0.2").of(recorded(tmp_path, rows)) == 4.0
    end = final_summary(left).metrics["test_accuracy"]
    assert (end.count, end.nodes) == (1, 2)
    assert "over 1 of 2 nodes" in left.summary["test accuracy"]


def test_a_diverged_node_makes_the_mean_nan(tmp_path: Path) -> None:
    rows = paced(1.0, 1.0, rounds=3)
    rows[2]["test_accuracy"] = math.nan  # node 0 at 2 s
    rows[3]["test_accuracy"] = math.inf
    run = recorded(tmp_path, rows)
    assert [math.isnan(mean) for _, mean, _ in means(run)] == [False, False, True, True]
    assert quantity("time_s to test_accuracy=0.2").of(run) is None


def test_server_alone_counts_and_newcomers_do_not_block(tmp_path: Path) -> None:
    """Only node 0 is evaluated; the value that the algorithm records is missing in node 1 after its first round."""
    rows = paced(1.0, 2.0, rounds=2)
    for row in rows:
        if row["node"] == 1:
            del row["test_accuracy"]
        if row["node"] == 0 and row["round"] > 0:
            row["drift"] = float(row["round"])
    run = recorded(tmp_path, rows)
    assert means(run) == [(0.0, 0.0, 1), (1.0, 0.1, 1), (2.0, 0.2, 1)]
    assert means(run, "drift") == [(1.0, 1.0, 1), (2.0, 2.0, 1)]


# --- resolution


def resolution(run: Run, name: str) -> tuple[float, int | None]:
    found = quantity(name).resolution(run)
    assert found is not None
    return found.age_s, found.node


def test_resolution_is_the_age_of_the_oldest_row(tmp_path: Path) -> None:
    """Rounds of 1 and 0.1 s, with rows after every tenth: at 3 s, node 0 was last seen at the start."""
    every_tenth = recorded(tmp_path, paced(1.0, 0.1, rounds=40, every=10))
    each = recorded(tmp_path, paced(1.0, 0.1, rounds=40))
    # 0.1 s a round of node 1: (30 + 0) / 2 / 10 = 1.5 at 3 s, and then (40 + 10) / 2 / 10 = 2.5 at 10 s.
    goal, later = "time_s to test_accuracy=1.5", "time_s to test_accuracy=2.5"
    assert (quantity(goal).of(every_tenth), resolution(every_tenth, goal)) == (3.0, (3.0, 0))
    assert (quantity(later).of(every_tenth), resolution(every_tenth, later)) == (10.0, (10.0, 0))
    # Each round on record: node 0 has ended two rounds when node 1 ends its 28th.
    assert quantity(goal).of(each) == pytest.approx(2.8)
    assert resolution(each, goal) == (0.0, None)
    assert resolution(each, "test_accuracy at time_s=3.5") == (0.0, None)
    assert resolution(every_tenth, "test_accuracy at time_s=35") == (5.0, 0)
    assert str(quantity(later).resolution(every_tenth)) == "10 s; node 0 was last seen 10 s before"


def test_resolution_on_a_grid_is_its_step(tmp_path: Path) -> None:
    """A node of a grid is known from its model's completion until the tick; nodes of slow rounds are not old."""
    rows = [
        {
            "node": node,
            "round": int(k / 4 / pace),
            "time_s": k / 4,
            "model_age_s": k / 4 - int(k / 4 / pace) * pace,
        }
        | {"moment": f"tick {k}", "test_accuracy": int(k / 4 / pace) / 100}
        for node, pace in ((0, 2.0), (1, 0.0625))
        for k in range(33)
    ]
    run = recorded(tmp_path, rows, evaluation={"every_s": 0.25, "of": "round"})
    goal = "time_s to test_accuracy=0.49"
    # At 6 s, (3 + 96) / 2; just before, (2 + 92) / 2.
    assert (quantity(goal).of(run), resolution(run, goal)) == (6.0, (0.25, 1))
    # Measured at instants, the models of both are known at the ticks only.
    instants = [{**row, "model_age_s": 0.0} for row in rows]
    old = recorded(tmp_path, instants, evaluation={"every_s": 0.25})
    assert resolution(old, goal) == (0.25, 0)


@pytest.mark.parametrize(("of", "round"), [("round", 0), ("mixed", 1)], ids=["without rounds", "mixed"])
def test_models_that_change_without_a_new_round_are_known_at_their_rows_only(
    of: str, round: int, tmp_path: Path
) -> None:
    """A protocol without rounds is shown as it is, and several mixings may end between two rows of ``mixed``."""
    rows = [
        {"node": 0, "round": round * k, "time_s": 5.0 * k, "moment": f"tick {k}", "test_accuracy": k / 10}
        for k in range(4)
    ]
    run = recorded(tmp_path, rows, evaluation={"every_s": 5.0, "of": of})
    goal = "time_s to test_accuracy=0.2"
    assert (quantity(goal).of(run), resolution(run, goal)) == (10.0, (5.0, 0))


def test_node_that_is_back_is_of_the_round_of_its_checkpoint(tmp_path: Path) -> None:
    """Rounds of a second. Node 1 crashes at 4.5 s, is back at 6.5 s with its model of round 2, and is last seen with it."""
    rows = [
        {"node": node, "round": k, "time_s": float(k), "moment": f"tick {k}", "test_accuracy": k / 10}
        for node in (0, 1)
        for k in range(8)
        if node == 0 or k < 5
    ]
    rows.append(rows[10] | {"time_s": 7.0, "moment": "tick 7", "model_age_s": 5.0})
    events = [(4.5, 1, "lost"), (6.5, 1, "returned")]
    run = recorded(tmp_path, rows, events, evaluation={"every_s": 1.0, "of": "round"})
    value = final(run, "test_accuracy")
    assert value is not None
    assert (value.mean, value.round_least, value.round_most) == (pytest.approx((0.7 + 0.2) / 2), 2, 7)
    # The row of 7 s says nothing about the time before the return.
    assert resolution(run, "test_accuracy at time_s=4.4") == (pytest.approx(0.4), 1)
    assert means(run)[-2:] == [(6.5, pytest.approx((0.6 + 0.2) / 2), 2), (7.0, pytest.approx(0.45), 2)]


def test_coarse_answers_are_marked_and_not_compared(tmp_path: Path) -> None:
    coarse = recorded(tmp_path, paced(1.0, 0.1, rounds=40, every=10), seed=1)
    fine = recorded(tmp_path, paced(1.0, 0.1, rounds=40), seed=1)
    groups = [Group("coarse", (coarse,)), Group("fine", (fine,))]
    names = ("time_s to test_accuracy=1.5", "bytes to test_accuracy=1.5", "test_accuracy at time_s=3.5")
    compared = compare(groups, [quantity(name) for name in names], find_baseline("fine", groups))
    assert compared.rows["resolution"].to_list() == [3.0, 0.0, 3.0, 0.0, 3.5, 0.0]
    assert compared.rows["difference"].to_list() == compared.rows["ratio"].to_list() == [None] * 6
    [(_, head, lines), (_, _, budget)] = compared.tables()
    assert head == [
        "group",
        "runs",
        "seeds",
        "pairs",
        *("time", "difference", "ratio"),
        *("sent", "difference", "ratio"),
    ]
    assert lines[0] == ["coarse", "1/1", "1", "1", "3 s*", "–", "–", "30 B*", "–", "–"]
    assert lines[1][4] == "2.8 s"
    assert budget[0][4].endswith("*")
    assert "* coarse: 3 s; node 0 was last seen 3 s before (seed 1)." in compared.notes
    other_way = compare(groups, [quantity(names[0])], find_baseline("coarse", groups))
    assert other_way.rows["ratio"].to_list() == [None, None]


def test_a_value_at_a_budget_of_bytes_is_known_at_the_instant_that_uses_it_up(tmp_path: Path) -> None:
    """Two nodes send 10 bytes a second each: 380 bytes are used up after 19 s, in round 19, of which a record of every tenth
    round knows nothing."""
    coarse = recorded(tmp_path, paced(1.0, 1.0, rounds=40, every=10), seed=1)
    fine = recorded(tmp_path, paced(1.0, 1.0, rounds=40), seed=1)
    name = "test_accuracy at bytes=380"
    assert [quantity(name).of(run) for run in (coarse, fine)] == [1.0, 1.9]
    assert resolution(coarse, name) == (10.0, 0)  # from the row at 10 s until that at 20 s
    assert resolution(fine, name) == (0.0, None)
    assert resolution(coarse, "test_accuracy at bytes=800") == (0.0, None)  # that is the end
    compared = compare([Group("coarse", (coarse,)), Group("fine", (fine,))], [quantity(name)])
    assert [line[-1] for line in compared.tables()[0][2]] == ["100 %*", "190 %"]


# --- bytes


def test_bytes_of_the_network_are_those_of_the_instant(tmp_path: Path) -> None:
    """Node 0 ends its rounds at 4 and 8 s, node 1 at 1 and 2 s, and each sends 10 bytes a second until its end."""
    rows = paced(4.0, 1.0, rounds=2)
    older = recorded(tmp_path, rows)
    for row in rows:
        row["network_bytes"] = round(10 * row["time_s"] + 10 * min(row["time_s"], 2))
    newer = recorded(tmp_path, rows)
    goal = quantity("bytes to test_accuracy=0.05")
    assert quantity("time_s to test_accuracy=0.05").of(newer) == 1.0
    assert (goal.of(newer), goal.of(older)) == (20.0, 10.0)  # node 0 has sent 10 bytes, but no row says so
    assert quantity("test_accuracy at bytes=39").of(newer) == pytest.approx(0.05)
    assert quantity("test_accuracy at bytes=40").of(newer) == pytest.approx(0.1)
    notes = compare([Group("a", (older,))], [goal]).notes  # it has no totals either
    assert "Bytes are those on record: at least so many were sent." in notes


# --- the network's own rows


def network_rows(
    *, every_s: float | None = None, paces: tuple[float, float] = (4.0, 1.0)
) -> list[dict[str, Any]]:
    rows = paced(*paces, rounds=2)
    distances = [
        {"node": -1, "round": r, "time_s": max(paces) * r, "consensus_distance": float(r)} for r in range(3)
    ]
    return rows + distances


def test_distances_of_equal_rounds_have_no_place_on_a_time_axis(tmp_path: Path) -> None:
    run = recorded(tmp_path, network_rows())
    assert run.steps("consensus_distance") is None
    end = final(run, "consensus_distance")
    assert end is not None
    assert (end.mean, end.round_most) == (2.0, 2)
    for option in (
        {"levels": ["consensus_distance=1"]},
        {"metrics": ["consensus_distance"], "budgets": ["time_s=2"]},
    ):
        with pytest.raises(BadInput, match=r"--(time-to|budget) consensus_distance: .*evaluation.every_s"):
            quantities([run], **option)
    pytest.importorskip("matplotlib")
    curve_figure([run], "consensus_distance", "round")
    with pytest.raises(BadInput, match=r"consensus_distance over bytes: .*evaluation.every_s"):
        curve_figure([run], "consensus_distance", "bytes")
    # Nodes that reach every round together are at one instant.
    together = recorded(tmp_path, network_rows(paces=(1.0, 1.0)))
    assert means(together, "consensus_distance") == [(0.0, 0.0, 1), (1.0, 1.0, 1), (2.0, 2.0, 1)]


def test_distance_of_the_last_round_says_so_if_a_model_has_changed_since(tmp_path: Path) -> None:
    rows = [
        {"node": node, "round": k, "time_s": float(k), "test_accuracy": 0.5}
        for k in range(3)
        for node in (0, 1)
    ]
    rows += [{"node": -1, "round": k, "time_s": float(k), "consensus_distance": 0.25} for k in range(3)]
    for later, text in (([], ""), ([rows[4] | {"time_s": 9.0, "moment": "end"}], "round 2")):
        value = final(recorded(tmp_path, rows + later), "consensus_distance")
        assert value is not None
        assert (value.mean, value.before(2)) == (0.25, text)


def test_distances_on_a_grid_are_of_its_instants_only(tmp_path: Path) -> None:
    rows = [{**row, "moment": "round"} for row in network_rows()]
    rows += [
        {"node": -1, "round": 0, "time_s": float(k), "moment": f"tick {k}", "consensus_distance": 10.0 + k}
        for k in range(3)
    ]
    run = recorded(tmp_path, rows, evaluation={"every_s": 1.0, "every_rounds": 1, "of": "round"})
    assert means(run, "consensus_distance") == [(float(k), 10.0 + k, 1) for k in range(3)]


# --- drawing and speed


def test_figures_draw_at_most_500_instants_with_their_spread(tmp_path: Path) -> None:
    run = recorded(tmp_path, paced(0.5, 0.25, 0.125, rounds=400))
    steps = run.steps("test_accuracy")
    assert steps is not None
    assert steps.table.height > MAX_DRAWN
    drawn = steps.drawn([0.5])
    assert drawn.height == MAX_DRAWN
    assert drawn.row(0) == steps.drawn([0.5], limit=1).row(0)
    for row in (drawn.row(k, named=True) for k in (0, 123, -1)):
        values = [min(int(row["time_s"] / pace), 400) / 10 for pace in (0.5, 0.25, 0.125)]
        assert (row["min"], row["0.5"], row["max"]) == tuple(pytest.approx(value) for value in sorted(values))
        assert row["mean"] == pytest.approx(sum(values) / 3)
    assert drawn["time_s"][-1] == 200.0


# --- the example: gossip learning on digits, one of eight nodes ten times as slow

GOSSIP: dict[str, Any] = {
    "nodes": 8,
    "task": {"name": "digits"},
    "topology": {"name": "ring"},
    "algorithm": {"name": "gossip-learning", "local_steps": 1},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "compute": {
        "name": "stragglers",
        "count": 1,
        "which": "first",
        "factor": 10,
        "base": {"name": "constant", "seconds_per_step": 0.1},
    },
    "network": {"name": "uniform", "latency_s": 0.001},
    "evaluation": {"every_rounds": 1},
    "stop": {"rounds": 50},
    "engine": {"name": "simulate", "trainer": "sequential"},
}


@pytest.fixture(scope="module")
def gossip(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same run, evaluated after every round, after every tenth, and four times a second."""
    ways = {"each": {"every_rounds": 1}, "tenth": {"every_rounds": 10}, "grid": {"every_s": 0.25}}
    out = tmp_path_factory.mktemp("gossip")
    return {
        name: run(Experiment.of({**GOSSIP, "name": name, "evaluation": way}), out)
        for name, way in ways.items()
    }


def by_hand(run: Run, level: float) -> tuple[float, float]:
    """The first time at which the mean of the newest accuracies is at a level, and the bytes that all nodes had sent by
    then, as their rows tell."""
    rows = (
        run.metrics.filter(pl.col("node") >= 0).select("time_s", "node", "test_accuracy", "bytes_sent").rows()
    )
    for now_s in sorted({time_s for time_s, *_ in rows}):
        newest = {node: (value, sent) for time_s, node, value, sent in sorted(rows) if time_s <= now_s}
        if sum(value for value, _ in newest.values()) / 8 >= level:
            return now_s, sum(sent for _, sent in newest.values())
    raise AssertionError("the level is never reached")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_straggler_does_not_double_the_time_to_a_level(gossip: dict[str, Run]) -> None:
    each, tenth, grid = (gossip[name] for name in ("each", "tenth", "grid"))
    right = {0.2: by_hand(each, 0.2), 0.4: by_hand(each, 0.4)}
    assert [time_s for time_s, _ in right.values()] == pytest.approx([2.1, 4.0], abs=0.01)
    for level, (time_s, sent) in right.items():
        to = quantity(f"time_s to test_accuracy={level}")
        assert to.of(each) == time_s
        assert quantity(f"bytes to test_accuracy={level}").of(each) >= sent  # type: ignore[operator]
        for other in (tenth, grid):  # evaluated less often: later, by no more than the resolution
            assert 0 <= to.of(other) - time_s <= resolution(other, to.name)[0]  # type: ignore[operator]
    assert [quantity(f"time_s to test_accuracy={level}").of(tenth) for level in right] == pytest.approx(
        [3, 10], abs=0.01
    )
    assert resolution(tenth, "time_s to test_accuracy=0.4") == (pytest.approx(10.0, abs=0.01), 0)
    assert resolution(each, "time_s to test_accuracy=0.4") == (0.0, None)
    for way in gossip.values():
        assert quantity("test_accuracy at time_s=10").of(way) == pytest.approx(0.4073, abs=5e-4)


@pytest.mark.timeout(600)
def test_bytes_by_an_instant_are_those_of_all_nodes(gossip: dict[str, Run]) -> None:
    steps = gossip["each"].steps("test_accuracy")
    assert steps is not None
    by = steps.table.filter(pl.col("time_s") <= 4.25)["bytes"][-1]
    assert by == pytest.approx(5.75e6, rel=0.01)


@pytest.mark.timeout(600)
def test_target_ends_the_run_at_the_time_to_the_level(gossip: dict[str, Run], tmp_path: Path) -> None:
    target = {"metric": "test_accuracy", "value": 0.2}
    for name, evaluation in (("each", {"every_rounds": 1}), ("tenth", {"every_rounds": 10})):
        stop = {"rounds": 50, "target": target}
        ended = run(Experiment.of({**GOSSIP, "evaluation": evaluation, "stop": stop}), tmp_path)
        time_s = quantity("time_s to test_accuracy=0.2").of(gossip[name])
        assert final_summary(ended).time_s == time_s
        assert quantity("time_s to test_accuracy=0.2").of(ended) == time_s
