"""Which model of a node a row shows (``evaluation.of``): right values are computed from what the scripts themselves saw."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import gossamer
from gossamer import Experiment, Model, Node, Run
from gossamer.runtime.setup import prepare
from scenario import experiment, play

GRID = {"every_s": 0.4}
"""A step takes a second, so most instants of this grid are inside a step."""


def loss(run: Run, vector: Any) -> float:
    """The test loss of a parameter vector, by NumPy: half the mean squared error."""
    setup = prepare(Experiment.load(run.path / "experiment.yaml"))
    inputs, targets = (part.double().numpy() for part in setup.task.tests["test"])
    return float(np.mean((inputs @ vector.double().numpy() - targets[:, 0]) ** 2) / 2)


def rows(run: Run, node: int) -> list[dict[str, Any]]:
    return run.metrics.filter(pl.col("node") == node).sort("time_s").to_dicts()


async def two_steps_a_round(node: Node) -> list[tuple[float, Any]]:
    """Node 1 begins late and needs two steps more. Returns the model at each end of a round, with its time."""
    seen = [(0.0, node.parameters)]
    if node.rank:
        await node.sleep(0.5)
        node.parameters = node.parameters + 1.0
        seen[0] = (0.5, node.parameters)
    async for _ in node.rounds():
        if node.round:
            seen.append((node.now(), node.parameters))
        await node.train(2 + 2 * node.rank)
        node.parameters = node.parameters * 1.5
    seen.append((node.now(), node.parameters))
    return seen


def test_grid_shows_the_models_of_complete_rounds(tmp_path: Path) -> None:
    played = play(tmp_path, two_steps_a_round, evaluation=GRID, stop={"rounds": 3})
    for rank, seen in played.values.items():
        recorded = rows(played.run, rank)
        assert len(recorded) > 15
        for row in recorded:
            complete = [k for k, (time_s, _) in enumerate(seen) if time_s <= row["time_s"] + 1e-9]
            if not complete:  # node 1 has not begun a round: it is shown as it is
                assert (row["round"], row["step"], row["model_age_s"]) == (0, 0, row["time_s"])
                continue
            time_s, vector = seen[complete[-1]]
            assert row["round"] == complete[-1]
            assert row["step"] == complete[-1] * (2 + 2 * rank)
            assert row["model_age_s"] == pytest.approx(row["time_s"] - time_s, abs=1e-9)
            assert row["test_loss"] == pytest.approx(loss(played.run, vector), rel=1e-5)


def test_instant_shows_the_model_in_the_middle_of_a_round(tmp_path: Path) -> None:
    async def script(node: Node) -> list[Any]:
        seen = [node.parameters]
        async for _ in node.rounds():
            await node.train()
            seen.append(node.parameters)
            await node.train()
        return seen

    run, stop = {}, {"rounds": 1}
    for of in ("round", "instant"):
        played = play(tmp_path, script, evaluation={"every_s": 0.7, "of": of}, stop=stop)
        run[of] = rows(played.run, 0)
        before, between = (loss(played.run, vector) for vector in played.values[0])
    at = {row["time_s"]: row for row in run["instant"]}
    assert (at[1.4]["test_loss"], at[1.4]["step"]) == (pytest.approx(between, rel=1e-5), 2)
    at = {row["time_s"]: row for row in run["round"]}
    assert (at[1.4]["test_loss"], at[1.4]["step"]) == (pytest.approx(before, rel=1e-5), 0)


async def mixes_and_steps(node: Node) -> list[Any]:
    """Each round trains, mixes with the other node, and trains again. Returns the results of mixing."""
    mixed = []
    async for r in node.rounds():
        await node.train()
        node.broadcast(node.peers(), node.model, tag=r)
        inbox = await node.gather(node.peers(), tag=r)
        own = node.model
        result = await node.combine(own, inbox, dict.fromkeys(inbox, 0.25), aggregate=True)
        mixed.append(result.parameters)
        node.model = result
        await node.train()
    return mixed


def test_mixed_shows_the_last_mixing(tmp_path: Path) -> None:
    played = play(tmp_path, mixes_and_steps, evaluation={"every_s": 0.3, "of": "mixed"}, stop={"rounds": 3})
    mixings = [1.0, 3.0, 5.0]  # seconds
    for rank, results in played.values.items():
        recorded = rows(played.run, rank)
        for row in recorded:
            done = [k for k, time_s in enumerate(mixings) if time_s <= row["time_s"]]
            if not done:  # before its first mixing: as at the begin of the round
                assert (row["round"], row["step"]) == (0, 0)
                continue
            assert (row["round"], row["step"]) == (done[-1] + 1, 2 * done[-1] + 1)
            assert row["model_age_s"] == pytest.approx(row["time_s"] - mixings[done[-1]], abs=1e-9)
            assert row["test_loss"] == pytest.approx(loss(played.run, results[done[-1]]), rel=1e-5)
        assert played.run.parameters is not None
        assert torch.equal(
            played.run.parameters[rank], results[-1]
        )  # the saved model is that of the last row


@pytest.mark.parametrize("way", ["mix", "combine", "assignment"])
def test_every_way_of_mixing_is_shown(tmp_path: Path, way: str) -> None:
    async def script(node: Node) -> Any:
        result = node.parameters
        async for r in node.rounds():
            node.broadcast(node.peers(), Model(node.parameters + node.rank), tag=r)
            inbox = await node.gather(node.peers(), tag=r)
            weights = dict.fromkeys(inbox, 0.5)
            if way == "mix":
                await node.mix(inbox, weights)
            elif way == "combine":
                node.model = await node.combine(node.model, inbox, weights, aggregate=True)
            else:
                node.parameters = (node.parameters + next(iter(inbox.values())).parameters) / 2
                node.mixed = node.model
            result = node.parameters
            node.parameters = node.parameters + 10.0
        return result

    played = play(tmp_path, script, evaluation={"every_rounds": 1, "of": "mixed"}, stop={"rounds": 2})
    for rank, result in played.values.items():
        last = rows(played.run, rank)[-1]
        assert last["round"] == 2
        assert last["test_loss"] == pytest.approx(loss(played.run, result), rel=1e-5)


def test_a_row_by_rounds_names_the_round_of_the_last_mixing(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            if r == 1:
                await node.mix({}, {})

    run = play(tmp_path, script, evaluation={"every_rounds": 1, "of": "mixed"}, stop={"rounds": 4}).run
    shown = [(row["round"], row["moment"]) for row in rows(run, 0)]
    assert shown == [(0, "round"), (1, "round"), (2, "round"), (2, "round 3"), (2, "round 4")]


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_a_run_without_mixing_says_so(tmp_path: Path, engine: str) -> None:
    settings: dict[str, Any] = {
        "nodes": 3,
        "task": {"name": "least-squares", "features": 3, "samples": 30, "test_samples": 20},
        "algorithm": "local",
        "evaluation": {"every_rounds": 2, "of": "mixed"},
        "stop": {"rounds": 4},
        "engine": {"name": engine},
    }
    run = gossamer.run(Experiment.of(settings), tmp_path)
    said = run.events.filter(event="never-mixed")["detail"].to_list()
    assert said == [
        "evaluation.of: mixed, but 3 of 3 nodes have mixed nothing; they are shown with the models of their rounds"
    ]
    assert run.metrics.filter(pl.col("node") == 0)["round"].to_list() == [0, 2, 4]


def test_a_protocol_without_rounds_is_shown_as_it_is(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        await node.train()
        first = node.parameters
        await node.train()
        return first, node.parameters

    played = play(tmp_path, script, evaluation={"every_s": 0.8}, stop={"rounds": 1})
    first, second = played.values[0]
    at = {row["time_s"]: row for row in rows(played.run, 0)}
    assert at[1.6]["test_loss"] == pytest.approx(loss(played.run, first), rel=1e-5)
    assert at[1.6]["model_age_s"] == 0.0  # seen there for the first time
    assert rows(played.run, 0)[-1]["test_loss"] == pytest.approx(loss(played.run, second), rel=1e-5)


def test_a_node_that_changes_after_its_rounds_has_an_end_row(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        async for _ in node.rounds():
            await node.train(1 + 3 * node.rank)
        if node.rank == 0:
            await node.sleep(0.5)
            node.parameters = node.parameters + 1.0
        return node.parameters

    played = play(tmp_path, script, evaluation={"every_rounds": 1}, stop={"rounds": 2})
    changed, unchanged = rows(played.run, 0), rows(played.run, 1)
    assert [row["moment"] for row in changed] == ["round", "round", "round", "end"]
    assert [row["moment"] for row in unchanged] == ["round", "round", "round"]
    assert changed[-1]["test_loss"] == pytest.approx(loss(played.run, played.values[0]), rel=1e-5)
    assert played.run.parameters is not None
    assert torch.equal(played.run.parameters[0], played.values[0])


@pytest.mark.parametrize("stop", [{"time_s": 2.5}, {"bytes": 100.0}])
def test_a_run_that_ends_inside_a_round_saves_the_models_of_its_last_rows(
    tmp_path: Path, stop: dict[str, float]
) -> None:
    async def script(node: Node) -> None:
        async for r in node.rounds():
            await node.train(1 + node.rank)
            node.send(1 - node.rank, node.model, tag=r)
            node.drain()

    run = play(tmp_path, script, evaluation={"every_rounds": 50}, stop=stop).run
    assert run.parameters is not None
    for rank in range(2):
        last = rows(run, rank)[-1]
        assert last["moment"] == "end"
        assert last["test_loss"] == pytest.approx(loss(run, run.parameters[rank]), rel=1e-5)
        assert last["step"] == last["round"] * (1 + rank)


def test_a_run_that_diverges_inside_a_round_ends_without_finite_figures(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        async for _ in node.rounds():
            await node.train()
            node.parameters = node.parameters * math.inf
            await node.sleep(10.0)

    run = play(tmp_path, script, evaluation={"every_s": 5.0}, stop={"time_s": 5.5}).run
    assert run.status == "diverged"
    assert run.parameters is not None
    assert not run.parameters.isfinite().any()
    ends = run.metrics.filter(pl.col("moment").str.contains("end"), pl.col("node") >= 0)
    assert len(ends) == 2
    assert not ends["test_loss"].is_finite().any()


FAULTY: dict[str, Any] = {
    "nodes": 3,
    "task": {"name": "least-squares", "features": 5, "samples": 90},
    "topology": "complete",
    "algorithm": "gossip-learning",
    "optimizer": {"name": "sgd", "lr": 0.05},
    "batch_size": 8,
    "compute": {"name": "constant", "seconds_per_step": 0.3},
    "network": {"name": "uniform", "latency_s": 0.01},
    "checkpoint": {"every_rounds": 1},
    "evaluation": {"every_s": 0.5},
    "stop": {"time_s": 6.0},
    "engine": {"name": "simulate", "trainer": "sequential"},
}


def faulty(out: Path, **fault: Any) -> pl.DataFrame:
    run = gossamer.run(Experiment.of({**FAULTY, "faults": [fault]}), out)
    return run.metrics.filter(pl.col("node") == 2, pl.col("moment") != "round").sort("time_s")


def test_a_frozen_node_is_shown_with_growing_age(tmp_path: Path) -> None:
    table = faulty(tmp_path, name="freeze", nodes=[2], at_s=2.0, for_s=2.5)
    frozen = table.filter(pl.col("time_s").is_between(2.5, 4.0))
    assert frozen["round"].to_list() == [6] * 4  # rounds of 0.3 s
    assert frozen["model_age_s"].to_list() == pytest.approx([0.7, 1.2, 1.7, 2.2])
    assert frozen["test_loss"].n_unique() == 1


def test_a_node_back_from_a_checkpoint_is_shown_with_its_model_and_age(tmp_path: Path) -> None:
    table = faulty(
        tmp_path, name="crash", nodes=[2], at_s=2.05, restart_after_s=1.4, restart_from="checkpoint"
    )
    assert table.filter(pl.col("time_s").is_between(2.1, 3.3)).is_empty()
    saved = table.filter(pl.col("time_s") == 2.0)
    [back] = table.filter(pl.col("time_s") == 3.5).to_dicts()
    assert (back["round"], back["model_age_s"]) == (6, pytest.approx(1.7))  # complete at 1.8 s
    assert back["test_loss"] == saved["test_loss"].item()


ASYNCHRONOUS = {
    "nodes": 6,
    "task": {"name": "digits"},
    "partition": {"name": "dirichlet", "alpha": 0.1},
    "topology": {"name": "ring"},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "compute": {
        "name": "stragglers",
        "count": 2,
        "which": "first",
        "factor": 3,
        "base": {"name": "constant", "seconds_per_step": 0.07},
    },
    "network": {"name": "uniform", "latency_s": 0.02, "bandwidth_mbps": 5},
    "engine": {"name": "simulate", "trainer": "sequential"},
}


@pytest.mark.parametrize("algorithm", ["d-psgd", "swift", "gossip-learning", "ad-psgd", "divshare"])
@pytest.mark.parametrize("of", ["round", "mixed"])
@pytest.mark.parametrize(
    "stop", [{"time_s": 2.0}, pytest.param({"time_s": 2.0, "bytes": 600e3}, marks=pytest.mark.slow)]
)
def test_instants_show_the_values_of_complete_rounds(
    tmp_path: Path, algorithm: str, of: str, stop: dict[str, float]
) -> None:
    """Evaluation takes no virtual time, so a run that is evaluated after each round knows every right value."""
    described = {**ASYNCHRONOUS, "algorithm": algorithm, "stop": stop}
    by_rounds = gossamer.run(
        Experiment.of({**described, "evaluation": {"every_rounds": 1, "of": of}}), tmp_path
    )
    on_grid = gossamer.run(Experiment.of({**described, "evaluation": {"every_s": 0.15, "of": of}}), tmp_path)
    # Several models of a node may have the same round and step: a passive node averages whenever it is asked.
    key = ["node", "round", "step", "complete_s"]
    complete_s = (pl.col("time_s") - pl.col("model_age_s")).round(9)
    right, shown = (
        run.metrics.filter(pl.col("node") >= 0, pl.col("round") > 0).with_columns(complete_s=complete_s)
        for run in (by_rounds, on_grid)
    )
    right = right.unique(key)
    if of == "mixed":  # within a round, a later mixing may have replaced the one that is shown
        shown = shown.join(right.select(key), on=key, how="semi")
    both = shown.join(right, on=key, how="left", suffix="_right")
    assert len(both) > 8
    assert both["test_accuracy"].to_list() == both["test_accuracy_right"].to_list()
    assert both["test_loss"].to_list() == both["test_loss_right"].to_list()
    assert both["network_bytes"].to_list() == both["network_bytes_right"].to_list()


def test_equal_models_have_equal_values_at_an_end_by_bytes(tmp_path: Path) -> None:
    """D-PSGD is synchronous: stragglers change when its rounds end, not what they compute."""
    even = {"name": "constant", "seconds_per_step": 0.07}
    shown = {}
    for name, compute in {"even": even, "stragglers": ASYNCHRONOUS["compute"]}.items():
        described = {
            **ASYNCHRONOUS,
            "algorithm": "d-psgd",
            "compute": compute,
            "stop": {"bytes_per_node": 300e3},
        }
        run = gossamer.run(Experiment.of({**described, "evaluation": {"every_rounds": 1}}), tmp_path)
        shown[name] = run.metrics.filter(pl.col("node") >= 0).unique(["node", "round"]).sort("node", "round")
    both = shown["even"].join(shown["stragglers"], on=["node", "round"], suffix="_slow")
    assert len(both) > 40
    assert both["test_accuracy"].to_list() == both["test_accuracy_slow"].to_list()
    assert both["test_loss"].to_list() == both["test_loss_slow"].to_list()


async def counted(node: Node) -> None:
    async for _ in node.rounds():
        await node.sleep(1.0)
        node.parameters = node.parameters + 1.0


def test_a_model_that_was_shown_before_is_not_evaluated_again(tmp_path: Path) -> None:
    from gossamer.learning.evaluate import Evaluator

    models = []
    evaluate = Evaluator.columns

    def count(self: Any, model: Any, *rest: Any) -> Any:
        models.append(model)
        return evaluate(self, model, *rest)

    described = experiment(counted, evaluation={"every_s": 0.125}, stop={"rounds": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "columns", count)
        run = gossamer.run(described, tmp_path)
    assert len(rows(run, 0)) > 15
    assert run.metrics["test_loss"].null_count() == run.metrics.filter(node=-1).height
    assert len(models) in (0, 2 * 3)  # zero: the nodes are evaluated together, by another function
