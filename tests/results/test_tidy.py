from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.results.finals import final, final_summary
from gossamer.results.folder import RunFolder
from gossamer.results.formatting import value_text
from gossamer.results.run import Run
from gossamer.results.tidy import ASYNCHRONY, at_level, lower_is_better, main_metric, metric_names, points
from synthetic_run import summary


def recorded(out: Path, *rows: dict[str, Any], experiment: str = "{name: t, nodes: 2}") -> Run:
    folder = RunFolder.create(out, "t", experiment=experiment, environment={})
    with folder.segment("metrics") as metrics:
        for row in rows:
            metrics.append(row)
    return Run(folder.path)


@given(values=st.lists(st.floats(-100, 100), min_size=1, max_size=8))
def test_statistics_are_over_nodes_only(
    values: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [{"node": i, "round": 4, "test_accuracy": value} for i, value in enumerate(values)]
    network = {"node": -1, "round": 4, "test_accuracy": 1e6}
    run = recorded(tmp_path_factory.mktemp("run"), *rows, network)
    table = summary(run, "test_accuracy")
    [(x, mean, std, low, high, count)] = table.select("round", "mean", "std", "min", "max", "count").rows()
    assert (x, low, high, count) == (4, min(values), max(values), len(values))
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    assert std == pytest.approx(np.std(values), abs=1e-6)
    assert summary(run, "test_accuracy", network=True)["mean"].to_list() == [1e6]


def test_point_of_a_round_has_a_range_of_times(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        {"node": 0, "round": 0, "time_s": 0.0, "test_loss": 3.0},
        {"node": 1, "round": 0, "time_s": 0.0, "test_loss": 1.0},
        {"node": 0, "round": 5, "time_s": 1.0, "test_loss": 1.0},
        {"node": 1, "round": 5, "time_s": 2.0, "test_loss": 3.0},
        {"node": 2, "round": 5, "time_s": 9.0, "test_loss": None},  # not a node with the metric
    )
    table = summary(run, "test_loss")
    ranges = table.select("round_least", "round_most", "time_s_least", "time_s_most").rows()
    assert ranges == [(0, 0, 0.0, 0.0), (5, 5, 1.0, 2.0)]
    assert table["mean"].to_list() == [2.0, 2.0]
    assert not {"time_s", "bytes"} & {*table.columns}
    assert points(run)["time_s_most"].to_list() == [0.0, 9.0]


def test_bytes_of_lost_node_still_count(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        *(
            {"node": node, "round": r, "time_s": r + node / 2, "bytes_sent": each * r, "test_loss": 1.0}
            for node, each, last in ((0, 10, 3), (1, 7, 1))
            for r in range(last + 1)
        ),
    )
    steps = run.steps("test_loss")
    assert steps is not None
    # Node 1 is at 0.5 and 1.5 s.
    sent = {0.5: 0, 1.0: 10, 1.5: 17, 2.0: 27, 3.0: 37}
    assert dict(steps.table.select("time_s", "bytes").iter_rows()) == sent
    assert final_summary(run).bytes_sent == 37


def test_rows_of_one_tick_form_one_point(tmp_path: Path) -> None:
    instants = [
        (0, 0, 0.0),
        (1, 0, 0.0),
        (0, 3, 5.01),
        (1, 7, 5.0),
        (0, 6, 10.0),
        (1, 12, 10.02),
    ]
    run = recorded(
        tmp_path,
        *(
            {"node": n, "round": r, "time_s": t, "moment": f"tick {t // 5:.0f}", "test_loss": float(r)}
            for n, r, t in instants
        ),
        experiment="{name: t, nodes: 2, evaluation: {every_s: 5.0}}",
    )
    table = summary(run, "test_loss")
    assert table["count"].to_list() == [2, 2, 2]
    assert table.select("time_s_least", "time_s_most").rows() == [(0.0, 0.0), (5.0, 5.01), (10.0, 10.02)]
    assert table.select("round_least", "round_most").rows() == [(0, 0), (3, 7), (6, 12)]
    assert table["mean"].to_list() == [0.0, 5.0, 9.0]


def test_every_metric_is_over_all_nodes_of_a_tick(tmp_path: Path) -> None:
    """Node 0 ends its last round exactly at the first tick."""
    written = [
        {"node": 0, "round": 6, "time_s": 5.0, "moment": "round", "train_loss": 2.0, "staleness_s": 0.5},
        {"node": 0, "round": 6, "time_s": 5.0, "moment": "tick 1"},
        {"node": 1, "round": 2, "time_s": 5.0, "moment": "tick 1", "train_loss": 4.0, "staleness_s": 1.5},
        {"node": -1, "round": 2, "time_s": 5.0, "moment": "tick 1", "consensus_distance": 0.0},
        {"node": 0, "round": 6, "time_s": 10.0, "moment": "tick 2"},
        {"node": 1, "round": 4, "time_s": 10.0, "moment": "tick 2", "train_loss": 1.0, "staleness_s": 1.0},
        {"node": -1, "round": 4, "time_s": 10.0, "moment": "tick 2", "consensus_distance": 1.0},
    ]
    run = recorded(tmp_path, *written, experiment="{name: t, nodes: 2, evaluation: {every_s: 5.0}}")
    for name, means in {"train_loss": [3, 1.5], "staleness_s": [1, 1], "consensus_distance": [0, 1]}.items():
        assert summary(run, name).select("round", "mean").rows() == [(4, means[0]), (5, means[1])], name
    assert final_summary(run).metrics["train_loss"].best is not None
    assert final_summary(run).metrics["consensus_distance"].best is None  # lowest where nothing was learned


def test_unrecorded_axes_are_null(tmp_path: Path) -> None:
    run = recorded(tmp_path, {"node": 0, "round": 0, "test_loss": 1.0})
    assert points(run).row(0) == (0, 0.0, 0, 0, None, None)
    assert run.steps("test_loss") is None
    assert final_of(run, "test_loss") == 1.0
    assert final_summary(run).bytes_sent is None


def test_metric_names_are_ordered_and_have_values(tmp_path: Path) -> None:
    row = {
        "train_loss": 1.0,
        "test_loss": 1.0,
        "test_f1": 0.1,
        "test_accuracy": 0.2,
        "drift": 3,
        "note": "x",
        "gone": None,
    }
    run = recorded(
        tmp_path, {"node": 0, "round": 0, **row}, {"node": -1, "round": 0, "consensus_distance": 1.0}
    )
    names = ["test_accuracy", "test_f1", "test_loss", "train_loss", "consensus_distance", "drift"]
    assert metric_names(run) == names
    assert main_metric(run) == "test_accuracy"
    assert summary(run, "consensus_distance")["mean"].to_list() == [1.0]


def test_final_summary_has_last_and_best_values(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        {"node": 0, "round": 1, "test_accuracy": 0.9, "test_loss": 0.2, "time_s": 1.0, "messages_lost": 1},
        {"node": 1, "round": 1, "test_accuracy": 0.9, "test_loss": 0.2, "time_s": 1.0, "messages_lost": 1},
        {"node": 0, "round": 2, "test_accuracy": 0.5, "test_loss": 0.7, "time_s": 2.0, "messages_lost": 4},
        {
            "node": 1,
            "round": 2,
            "test_accuracy": 0.7,
            "test_loss": math.nan,
            "time_s": 2.0,
            "messages_lost": 2,
        },
    )
    final = final_summary(run)
    assert (final.rounds, final.time_s, final.messages["lost"], final.nodes) == (2, 2.0, 6, 2)
    accuracy, loss = final.metrics["test_accuracy"], final.metrics["test_loss"]
    assert (accuracy.mean, accuracy.count) == (pytest.approx(0.6), 2)
    assert accuracy.std == pytest.approx(0.1)
    assert accuracy.best is not None
    assert (accuracy.best.mean, accuracy.best.round_most, accuracy.best.of) == (0.9, 1, 2)
    assert math.isnan(loss.mean)  # the mean does not hide a diverged node
    assert loss.best is not None
    assert loss.best.mean == 0.2


def test_final_value_is_from_last_complete_evaluation(tmp_path: Path) -> None:
    def rows(*last: int) -> list[dict[str, Any]]:
        """Rows of nodes up to these rounds."""
        return [
            {
                "node": node,
                "round": r,
                "test_accuracy": r / 10,
                "train_loss": float(r) if node or r < 4 else None,
            }
            for node, end in enumerate(last)
            for r in range(end + 1)
        ]

    killed = final_summary(recorded(tmp_path, *rows(6, 4, 3))).metrics
    assert (killed["test_accuracy"].round_most, killed["test_accuracy"].count) == (3, 3)
    assert killed["test_accuracy"].mean == pytest.approx(0.3)
    # A node without a loss at a point still has a row there.
    assert killed["train_loss"].round_most == 3
    for event in ("lost", "left"):
        away = recorded(tmp_path, *rows(6, 6, 3))
        with RunFolder.open(away.path).segment("events") as events:
            events.append({"time_s": 1.0, "node": 2, "event": event, "detail": "node 2 is away"})
        metrics = final_summary(Run(away.path)).metrics
        assert (metrics["test_accuracy"].round_most, metrics["test_accuracy"].count) == (6, 2)
        assert metrics["test_accuracy"].nodes == away.nodes
        assert (metrics["train_loss"].round_most, metrics["train_loss"].count) == (6, 1)


def test_absent_node_does_not_make_evaluation_incomplete(tmp_path: Path) -> None:
    """Node 1 misses round 10 and records round 20; node 2 returns after round 20, too late for another row."""
    recorded_rounds = {0: (0, 10, 20), 1: (0, 20), 2: (0, 10)}
    run = recorded(
        tmp_path,
        *(
            {"node": node, "round": r, "time_s": float(r), "test_accuracy": r / 100}
            for node, rounds in recorded_rounds.items()
            for r in rounds
        ),
        experiment="{name: t, nodes: 3}",
    )
    with RunFolder.open(run.path).segment("events") as events:
        for time_s, node, event in (
            (8.0, 1, "lost"),
            (11.0, 1, "returned"),
            (19.0, 2, "lost"),
            (21.0, 2, "returned"),
        ):
            events.append(
                {"time_s": time_s, "node": node, "event": event, "detail": f"node {node} is {event}"}
            )
    run = Run(run.path)
    assert run.curves["complete"].to_list() == [True] * 3
    last = final(run, "test_accuracy")
    assert last is not None
    assert (last.round_least, last.round_most, last.count, last.nodes) == (20, 20, 2, 3)
    assert last.mean == pytest.approx(0.2)


def test_best_value_is_from_complete_evaluations(tmp_path: Path) -> None:
    """Rounds that only the fastest node of a stopped run reached do not count."""
    rows = [
        {"node": node, "round": r, "test_accuracy": 0.1 * r + 0.05 * node}
        for node, last in enumerate((3, 3, 5))
        for r in range(last + 1)
    ]
    best = final_summary(recorded(tmp_path, *rows)).metrics["test_accuracy"].best
    assert best is not None
    assert (best.mean, best.round_least, best.round_most) == (pytest.approx(0.35), 3, 3)
    assert best.of == 4


def uneven() -> list[dict[str, Any]]:
    """Node 0 ends round k at k s, node 1 at 4 k s; both have a last row at 6.5 s, when node 0 is one step into its next
    round."""
    rows = [
        {"node": node, "round": k, "step": 2 * k, "time_s": float(pace * k), "moment": "round"}
        for node, pace, last in ((0, 1, 6), (1, 4, 1))
        for k in range(last + 1)
    ]
    rows += [
        {"node": 0, "round": 6, "step": 13, "time_s": 6.5, "moment": "end"},
        {"node": 1, "round": 1, "step": 2, "time_s": 6.5, "moment": "end"},
    ]
    for row in rows:
        row |= {"test_accuracy": row["time_s"] / 10, "bytes_sent": round(10 * row["time_s"])}
    return rows


def test_end_of_asynchronous_nodes_is_a_separate_point(tmp_path: Path) -> None:
    run = recorded(tmp_path, *uneven())
    table = summary(run, "test_accuracy")
    assert table["mean"].to_list() == pytest.approx([0.0, 0.25, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65])
    assert table["round"].to_list() == [0, 1, 2, 3, 4, 5, 6, 3.5]  # the mean of the final rounds is 3.5
    assert table["count"].to_list() == [2, 2, 1, 1, 1, 1, 1, 2]
    accuracy = final_summary(run).metrics["test_accuracy"]
    assert (accuracy.mean, accuracy.count) == (pytest.approx(0.65), 2)
    assert (accuracy.round_least, accuracy.round_most) == (1, 6)
    times = points(run).select("time_s_least", "time_s_most").rows()
    assert times == [(0.0, 0.0), (1.0, 4.0), *((k, k) for k in (2.0, 3.0, 4.0, 5.0, 6.0)), (6.5, 6.5)]


def test_round_rows_are_not_points_of_a_time_grid(tmp_path: Path) -> None:
    rows = [
        {"node": node, "round": k, "time_s": pace * k, "moment": "round", "test_loss": 9.0}
        for node, pace in ((0, 0.75), (1, 3.5))
        for k in range(1, int(11 / pace) + 1)
    ]
    # The rows of node 1 are late, as with real nodes, and more than half a tick behind those of node 0.
    rows += [
        {
            "node": node,
            "round": k,
            "time_s": 5.0 * k + late,
            "moment": f"tick {k}",
            "test_loss": float(k + node),
        }
        for node, late in ((0, 0.0), (1, 2.75))
        for k in range(3)
    ]
    end = [
        {"node": node, "round": 4, "time_s": 13.0, "moment": "end", "test_loss": 5.0 + node}
        for node in (0, 1)
    ]
    run = recorded(tmp_path, *rows, *end, experiment="{name: t, nodes: 2, evaluation: {every_s: 5.0}}")
    table = summary(run, "test_loss")
    times = table.select("time_s_least", "time_s_most").rows()
    assert times == [(0.0, 2.75), (5.0, 7.75), (10.0, 12.75), (13.0, 13.0)]
    assert table["mean"].to_list() == [0.5, 1.5, 2.5, 5.5]
    assert table["count"].to_list() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("moment", "every_s"), [("round, end", None), ("tick 2, end", 0.5), ("round, tick 2, end", 0.5)]
)
def test_end_at_an_evaluation_adds_no_point(tmp_path: Path, moment: str, every_s: float | None) -> None:
    evaluations = [("round, tick 0", 0.0), ("round, tick 1", 0.5), (moment, 1.0)]
    rows = [
        {"node": node, "round": k, "time_s": time_s, "moment": text, "test_loss": 1.0}
        for node in (-1, 0, 1)
        for k, (text, time_s) in enumerate(evaluations)
    ]
    setting = "" if every_s is None else f", evaluation: {{every_s: {every_s}}}"
    run = recorded(tmp_path / "all", *rows, experiment=f"{{name: t, nodes: 2{setting}}}")
    assert points(run)["time_s_most"].to_list() == [0.0, 0.5, 1.0]
    # If a round of node 0 ends the run, node 1 is still in a round.
    rows[-1] |= {"moment": "end"}
    run = recorded(tmp_path / "one", *rows, experiment=f"{{name: t, nodes: 2{setting}}}")
    assert summary(run, "test_loss")["count"].to_list() == [2, 2, 1, 2]
    assert final_summary(run).metrics["test_loss"].count == 2


def test_asynchrony_metrics_come_last_without_counters(tmp_path: Path) -> None:
    ages = {"staleness_s": 1.0, "staleness_max_s": 2.0}
    shares = {"idle_share": 0.25, "uplink_share": 0.5, "downlink_share": 0.75, **ages}
    counters = {"messages_received": 1, "messages_cancelled": 2, "messages_superseded": 3, "bytes_sent": 4}
    run = recorded(tmp_path, {"node": 0, "round": 0, "zeta": 1.0, "train_loss": 1.0, **shares, **counters})
    assert metric_names(run) == ["train_loss", "zeta", *ASYNCHRONY]
    assert set(ASYNCHRONY) == set(shares)


def test_asynchrony_metrics_cover_the_whole_run(tmp_path: Path) -> None:
    """Shares are weighted by seconds and ages by messages, including rows that are no points of the grid."""
    rows = [
        (0, 0.0, None, None, None, 0),
        (0, 4.0, 0.5, 2.0, 3.0, 1),
        (0, 6.0, 0.8, None, None, 1),
        (0, 10.0, 0.1, 6.0, 9.0, 4),
        (1, 0.0, None, None, None, 0),
        (1, 5.0, 0.2, 1.0, 1.0, 7),
    ]
    columns = ("node", "time_s", "idle_share", "staleness_s", "staleness_max_s", "messages_taken")
    written = [
        {**dict(zip(columns, row, strict=True)), "round": k, "moment": "round" if k == 1 else f"tick {k}"}
        for k, row in enumerate(rows)
    ]
    run = recorded(tmp_path, *written, experiment="{name: t, nodes: 2, evaluation: {every_s: 2.0}}")
    metrics = final_summary(run).metrics
    idle = [(4 * 0.5 + 2 * 0.8 + 4 * 0.1) / 10, 0.2]
    stale = [(1 * 2.0 + 3 * 6.0) / 4, 1.0]
    for name, values in {"idle_share": idle, "staleness_s": stale, "staleness_max_s": [9.0, 1.0]}.items():
        final = metrics[name]
        assert (final.mean, final.std) == (pytest.approx(np.mean(values)), pytest.approx(np.std(values)))
        assert (final.count, final.best) == (2, None)


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("test_loss", True),
        ("train_loss", True),
        ("test_rmse", True),
        ("test_rmse_unclipped", True),
        ("test_mse", True),
        ("test_mae", True),
        ("test_error", True),
        ("test_error_rate", True),
        ("test_perplexity", True),
        ("consensus_distance", True),
        ("staleness_s", True),
        ("idle_share", True),
        ("uplink_share", False),
        ("downlink_share", False),
        ("test_accuracy", False),
        ("test_maestro", False),
        ("test_f1", False),
    ],
)
def test_lower_is_better_for_errors_losses_and_distances(name: str, lower: bool) -> None:
    assert lower_is_better(name) == lower


@pytest.mark.parametrize(
    ("name", "classes", "lower", "text"),
    [
        ("test_accuracy_error", (), True, "0.5"),
        ("test_accuracy_loss", (), True, "0.5"),
        ("test_accuracy_loss", ("test_accuracy_loss",), False, "50.0 %"),
        ("test_accuracy_cat", ("test_accuracy_loss",), False, "0.5"),
        ("test_accuracy", (), False, "50.0 %"),
    ],
)
def test_only_columns_of_classes_are_taken_for_accuracies_whatever_their_name(
    name: str, classes: tuple[str, ...], lower: bool, text: str
) -> None:
    assert lower_is_better(name, classes) == lower
    assert value_text(name, 0.5, classes) == text
    assert at_level(name, 0.4, 0.5, classes) == lower


def test_final_values_are_deterministic(tmp_path: Path) -> None:
    shares = [0.1 * 3**-rank for rank in range(40)]
    rows = ({"node": r, "round": 1, "time_s": 1.0, "idle_share": share} for r, share in enumerate(shares))
    run = recorded(tmp_path, *rows, experiment="{name: t, nodes: 40}")
    assert len({final_of(run, "idle_share") for _ in range(50)}) == 1


def final_of(run: Run, name: str) -> float:
    value = final(run, name)
    assert value is not None
    return value.mean
