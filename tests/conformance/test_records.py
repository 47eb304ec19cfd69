"""Recorded values mean the same under both engines, and are attributed to the right nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import gossamer
from gossamer import Experiment, Run
from gossamer.results.comparison import quantity
from gossamer.results.finals import final_summary
from synthetic_run import summary

PROCESSES = {"name": "processes"}


def play(out: Path, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "nodes": 4,
        "task": {"name": "least-squares", "features": 4, "samples": 40, "test_samples": 20},
        "topology": "complete",
        "algorithm": "local",
        "batch_size": "full",
        "evaluation": {"every_rounds": 1},
        "engine": {"name": "simulate", "trainer": "sequential"},
        "stop": {"rounds": 5},
    }
    return gossamer.run(Experiment.of({**settings, **changes}), out)


def test_server_curve_uses_the_times_of_the_server(tmp_path: Path) -> None:
    """Clients that it does not select count their rounds much earlier."""
    run = play(
        tmp_path,
        nodes=21,
        task={"name": "digits", "model": {"name": "mlp", "hidden": []}},
        algorithm={"name": "fedavg", "client_fraction": 0.1},
        batch_size=8,
        compute={"name": "constant", "seconds_per_step": 0.5},
        network={"name": "uniform", "latency_s": 0.25},
    )
    server = run.metrics.filter(node=0).sort("round")
    assert server["time_s"].to_list() == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    others = run.metrics.filter(pl.col("node") > 0, pl.col("round") == 5)
    assert others["time_s"].mean() < 5.0  # otherwise the test shows nothing
    points = summary(run, "test_accuracy")
    assert points["round"].to_list() == server["round"].to_list()
    for end in ("time_s_least", "time_s_most"):
        assert points[end].to_list() == server["time_s"].to_list()
    steps = run.steps("test_accuracy")
    assert steps is not None
    assert steps.table.select("time_s", "mean").rows() == server.select("time_s", "test_accuracy").rows()
    assert points["mean"].to_list() == server["test_accuracy"].to_list()
    assert points["count"].to_list() == [1] * 6


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_slow_evaluation_never_skips_the_average_model(tmp_path: Path, engine: str) -> None:
    run = play(
        tmp_path,
        task={"name": "user_tasks:thoughtful", "seconds": 0.05},
        evaluation={"every_rounds": 1, "nodes": "average"},
        engine={"name": engine},
        stop={"rounds": 15},
    )
    network = run.metrics.filter(node=-1).sort("round")
    assert network["round"].to_list() == list(range(16))
    for metric in ("test_loss", "test_patience", "consensus_distance"):
        assert network[metric].null_count() == 0, metric
    nodes = run.metrics.filter(pl.col("node") >= 0)
    assert nodes["test_loss"].null_count() == len(nodes) == 4 * 16


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_numbers_of_numpy_and_torch_are_recorded_as_numbers(tmp_path: Path, engine: str) -> None:
    run = play(tmp_path, algorithm="user_algorithms:Scalars", engine={"name": engine}, stop={"rounds": 1})
    rows = run.metrics.filter(pl.col("node") >= 0, pl.col("round") == 1).sort("node")
    assert rows.select("k", "t", "f", "yes", "plain").rows() == [
        (3, 2.0, 0.5, True, rank) for rank in range(4)
    ]
    assert rows["k"].dtype.is_integer()
    assert rows["t"].dtype.is_float()


@pytest.mark.parametrize("engine", ["simulate", "processes"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_train_loss_target_is_the_mean_over_trained_nodes(
    tmp_path: Path, engine: str, fraction: float
) -> None:
    settings: dict[str, Any] = {
        "nodes": 5,
        "algorithm": {"name": "fedavg", "client_fraction": fraction},
        "partition": {"name": "sizes", "fractions": [0.4, 0.3, 0.2, 0.1]},
    }
    free = play(tmp_path, **settings, stop={"rounds": 30})
    losses = free.metrics.filter(pl.col("node") > 0, pl.col("round") == 8)["train_loss"].drop_nulls()
    assert losses.max() > losses.min()  # the nodes' losses differ
    level = float(losses.mean()) * (1 + 1e-5)  # trainers differ in their bits
    goal = quantity(f"time_s to train_loss={level}")
    expected_s = goal.of(free)
    assert expected_s is not None
    run = play(
        tmp_path,
        **settings,
        engine={"name": engine},
        stop={
            "rounds": 30 if engine == "simulate" else 100_000,
            "target": {"metric": "train_loss", "value": level},
        },
    )
    assert run.status == "done"
    # The mean is over the newest losses of the clients, and is known when a client reports, before the server ends the round.
    # (Real nodes continue until they are told.)
    reached_s = goal.of(run)
    assert reached_s is not None
    if engine == "simulate":
        assert run.metrics["time_s"].max() == reached_s == expected_s


def test_last_row_has_all_the_traffic_of_a_node(tmp_path: Path) -> None:
    """A real node's last messages may still be queued when its last round is over."""
    settings = {
        "nodes": 6,
        "task": {"name": "least-squares", "features": 50_000, "samples": 12, "test_samples": 4},
        "algorithm": {"name": "fedavg", "client_fraction": 0.6},
    }
    simulated, real = play(tmp_path, **settings), play(tmp_path, **settings, engine=PROCESSES)
    columns = ["node", "bytes_sent", "messages_sent"]
    last = [
        run.metrics.filter(pl.col("node") >= 0, pl.col("round") == 5).sort("node").select(columns)
        for run in (simulated, real)
    ]
    assert last[0].rows() == last[1].rows()
    assert last[0]["node"].to_list() == list(range(6))
    assert last[0]["messages_sent"].sum() == 2 * 5 * 3


@pytest.mark.parametrize("algorithm", ["d-psgd", {"name": "epidemic-local", "degree": 3}])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_more_vectors_are_alive_than_a_round_needs(
    tmp_path: Path, algorithm: Any, momentum: float
) -> None:
    """Three a node: before and after a step, or the inputs of a mix and its result, and the one with which the last round
    ended; momentum needs two more. (A few rows are allocated in advance.)"""
    run = play(
        tmp_path,
        nodes=64,
        task={"name": "least-squares", "features": 4, "samples": 640, "test_samples": 20},
        topology={"name": "random-regular", "degree": 3},
        algorithm=algorithm,
        optimizer={"name": "sgd", "lr": 0.01, "momentum": momentum},
        evaluation={"every_rounds": None},
    )
    assert run.figures["peak_vectors"] <= (3.2 if momentum == 0 else 5.2) * 64


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_time_use_of_nodes_is_recorded(tmp_path: Path, engine: str) -> None:
    run = play(
        tmp_path,
        nodes=3,
        algorithm="d-psgd",
        network={"name": "uniform", "bandwidth_mbps": 1.0},
        evaluation={"every_rounds": 1, "timeline": {"to_s": 1e6, "nodes": [0, 2]}},
        engine={"name": engine},
    )
    rows = run.metrics.filter(pl.col("node") >= 0, pl.col("round") > 0)
    # A neighbour may be a round ahead of a real node.
    ahead = rows["messages_received"] - 2 * rows["round"]
    assert ahead.is_between(0, 0 if engine == "simulate" else 2).all()
    assert rows["idle_share"].is_between(0.0, 1.0).all()
    assert rows["idle_share"].min() < 1.0
    assert rows.select("staleness_s", "staleness_max_s").null_count().row(0) == (0, 0)
    assert (rows["staleness_s"] <= rows["staleness_max_s"]).all()
    for share in ("uplink_share", "downlink_share"):
        if engine == "simulate":
            assert rows[share].is_between(0.0, 1.0).all()
            assert rows[share].max() > 0.0
        else:
            assert rows[share].null_count() == len(rows)
    timeline = run.timeline
    assert set(timeline["node"]) == {0, 2}
    # A round is one step and a message to each neighbour. (A real node may end before its last messages are recorded.)
    for node in (0, 2):
        kinds = timeline.filter(pl.col("node") == node)
        trained, sent = (kinds.filter(pl.col("kind") == kind) for kind in ("train", "send"))
        assert len(trained) == 5
        assert (trained["start_s"] < trained["end_s"]).all()
        assert 8 <= len(sent) <= 10
        assert set(sent["to"]) == {0, 1, 2} - {node}
        assert (sent["start_s"] <= sent["end_s"]).all()
        assert sent["bytes"].n_unique() == 1


@pytest.mark.parametrize("uplink_mbps", [1.0, None])
@pytest.mark.parametrize("shared", [False, True])
def test_uplink_share_is_bytes_over_rate_behind_a_bottleneck(
    tmp_path: Path, uplink_mbps: float | None, shared: bool
) -> None:
    """It is bytes over the uplink's own rate, not the time for which the uplink is in use, here four times as long."""
    (tmp_path / "mbps.csv").write_text(",0.25,0.25\n0.25,,0.25\n0.25,0.25,\n")
    run = play(
        tmp_path,
        nodes=3,
        task={"name": "least-squares", "features": 200, "samples": 30, "test_samples": 20},
        algorithm="d-psgd",
        network={
            "name": "matrix",
            "bandwidth_mbps": str(tmp_path / "mbps.csv"),
            "shared": shared,
            "uplink_mbps": uplink_mbps,
        },
        engine={"name": "simulate"},
    )
    rows = run.metrics.filter(pl.col("node") >= 0, pl.col("round") < 5).sort("time_s")
    assert rows["downlink_share"].null_count() == len(rows)
    if uplink_mbps is None:
        assert rows["uplink_share"].null_count() == len(rows)
        assert "uplink_share" not in final_summary(run).metrics
        return
    seconds = pl.col("time_s").diff().over("node")
    used = rows.group_by("node").agg((pl.col("uplink_share") * seconds).sum()).sort("node")["uplink_share"]
    sent = rows.group_by("node").agg(pl.col("bytes_sent").max()).sort("node")["bytes_sent"] / 125_000
    message = rows["bytes_sent"].max() / rows["messages_sent"].max() / 125_000
    assert sent.min() > 5 * message
    assert (used > sent - 1e-6).all()
    assert (used < sent + 1e-6).all()


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_final_figure_covers_all_nodes_despite_their_pace(tmp_path: Path, engine: str) -> None:
    run = play(
        tmp_path,
        nodes=3,
        algorithm="gossip-learning",
        compute={
            "name": "stragglers",
            "count": 1,
            "factor": 20,
            "base": {"name": "constant", "seconds_per_step": 0.02},
        },
        engine={"name": engine},
        stop={"time_s": 0.93},
    )
    nodes = run.metrics.filter(pl.col("node") >= 0)
    assert set(nodes["moment"]) <= {"round", "end", "round, end"}
    ends = nodes.filter(pl.col("moment").str.ends_with("end"))
    assert sorted(ends["node"]) == [0, 1, 2]
    assert ends["round"].min() < nodes["round"].max()  # otherwise the test shows nothing
    final = final_summary(run).metrics["test_loss"]
    assert (final.mean, final.count) == (pytest.approx(ends["test_loss"].mean()), 3)
    assert summary(run, "test_loss")["count"].max() == 3


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_rounds_do_not_change_points_on_a_time_grid(tmp_path: Path, engine: str) -> None:
    run = play(
        tmp_path,
        nodes=3,
        algorithm="gossip-learning",
        compute={"name": "constant", "seconds_per_step": 0.03},
        evaluation={"every_rounds": 1, "every_s": 0.2},
        engine={"name": engine},
        stop={"time_s": 0.7},
    )
    table = summary(run, "test_loss")
    if run.virtual:
        assert table["time_s_least"].to_list() == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.7])
        assert table["time_s_most"].to_list() == table["time_s_least"].to_list()
        assert table["count"].to_list() == [3] * 5
    # The end may cost a real node its last instants, or add one, but every node has an end.
    assert len(table) <= 2 + max(table["time_s_most"]) / 0.2
    assert (table["count"][0], table["count"][-1]) == (3, 3)
