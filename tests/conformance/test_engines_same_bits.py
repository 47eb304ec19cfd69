"""Law 4 on larger models: `simulate` (sequential, one thread) and `processes` end with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import user_tasks
from safetensors.torch import load_file

import gossamer
from gossamer import BadInput, Experiment, Run
from recorded import check_network_rows, rounds_of

MLP: dict[str, Any] = {
    "nodes": 8,
    "seed": 5,
    "task": {"name": "digits", "model": {"name": "mlp", "hidden": [24]}},
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "topology": {"name": "random-regular", "degree": 3, "every_rounds": 1},
    "algorithm": {"name": "d-psgd", "local_steps": 3},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "batch_size": 16,
    "evaluation": {"every_rounds": 4, "samples": 100},
    "stop": {"rounds": 8},
}
BATCH_NORM: dict[str, Any] = {
    "nodes": 4,
    "task": {"name": "user_tasks:batch_norm"},
    "topology": "ring",
    "algorithm": {"name": "d-psgd", "local_steps": 2},
    "batch_size": 8,
    "initial": "independent",
    "evaluation": {"every_rounds": 3},
    "stop": {"rounds": 6},
}
FROZEN: dict[str, Any] = {**BATCH_NORM, "task": {"name": "user_tasks:frozen"}}
ROBUST: dict[str, Any] = {**MLP, "aggregator": {"name": "trimmed-mean", "count": 1}}
KRUM: dict[str, Any] = {**BATCH_NORM, "aggregator": {"name": "krum", "byzantine": 0, "selected": 2}}
SCHEDULED: dict[str, Any] = {
    **MLP,
    "nodes": 4,
    "topology": "ring",
    "algorithm": {"name": "user_algorithms:Rates", "local_steps": 2},
    "optimizer": {
        "name": "adam",
        "lr": 0.01,
        "amsgrad": True,
        "clip_norm": 0.5,
        "schedule": {"name": "step", "every": 2, "factor": 0.5, "warmup_rounds": 1},
    },
    "evaluation": {"every_rounds": 1, "samples": 100},
    "stop": {"rounds": 6},
}


def play(settings: dict[str, Any], out: Path, **changes: Any) -> Run:
    engine = {"name": "simulate", "trainer": "sequential"}
    return gossamer.run(Experiment.of({"engine": engine, **settings, **changes}), out)


Played = Callable[[dict[str, Any]], tuple[Run, Run]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A function from settings to the run under each engine, made once."""
    runs: dict[str, tuple[Run, Run]] = {}

    def get(settings: dict[str, Any]) -> tuple[Run, Run]:
        out = tmp_path_factory.mktemp("runs")
        if str(settings) not in runs:
            runs[str(settings)] = (
                play(settings, out),
                play(settings, out, engine={"name": "processes", "trainer": "sequential"}),
            )
        return runs[str(settings)]

    return get


@pytest.mark.parametrize(
    "settings",
    [MLP, BATCH_NORM, FROZEN, SCHEDULED, ROBUST, KRUM],
    ids=["mlp", "batch-norm", "frozen", "scheduled", "robust", "krum"],
)
def test_model_files_are_equal_under_both_engines(settings: dict[str, Any], played: Played) -> None:
    simulated, real = played(settings)
    left, right = (load_file(run.path / "models.safetensors") for run in (simulated, real))
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
    # Equal models have equal evaluations, at every recorded round and not only at the end.
    columns = ["round", "node", "step", "train_loss", "test_loss", "consensus_distance"]
    expected = simulated.metrics.select(columns)
    check_network_rows(real, rounds_of(simulated, -1))
    present = pl.col("round").is_in(rounds_of(real, -1)) | (pl.col("node") >= 0)
    assert expected.filter(present).equals(real.metrics.select(columns))


def test_fused_trainer_has_the_same_bits_under_both_engines(tmp_path: Path) -> None:
    """With one worker or two; equal to the sequential trainer up to rounding."""
    settings = {**MLP, "evaluation": {"every_rounds": 8, "samples": 500}, "stop": {"rounds": 16}}
    engines: tuple[dict[str, Any], ...] = (
        {"name": "simulate", "trainer": "fused", "workers": 1},
        {"name": "simulate", "trainer": "fused", "workers": 2},
        {"name": "processes", "trainer": "fused"},
    )
    runs = [play(settings, tmp_path, engine=engine) for engine in engines]
    first, reference = runs[0], play(settings, tmp_path)
    for run in runs:
        assert Experiment.load(run.path / "experiment.yaml").engine.trainer == "fused"
        assert torch.equal(run.parameters, first.parameters)
        losses = run.metrics.filter(pl.col("node") >= 0).sort("round", "node")["train_loss"]
        expected = first.metrics.filter(pl.col("node") >= 0).sort("round", "node")["train_loss"]
        assert losses.equals(expected)
    torch.testing.assert_close(first.parameters, reference.parameters, rtol=1e-3, atol=1e-4)
    accuracies = [run.metrics.filter(pl.col("node") >= 0)["test_accuracy"][-8:] for run in (first, reference)]
    assert accuracies[0].mean() == pytest.approx(accuracies[1].mean(), abs=0.01)  # type: ignore[arg-type]
    assert float(accuracies[0].mean()) > 0.6  # type: ignore[arg-type]


def test_fused_trainer_refuses_a_model_with_buffers(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"engine\.trainer: 'fused' does not support buffers"):
        play(BATCH_NORM, tmp_path, engine={"name": "processes", "trainer": "fused"})


@pytest.mark.parametrize("settings", [MLP, BATCH_NORM, FROZEN], ids=["mlp", "batch-norm", "frozen"])
def test_message_has_the_same_size_on_both_wires(settings: dict[str, Any], played: Played) -> None:
    """A real node may have messages queued when it is recorded, except for the last time; only sent ones count."""
    simulated, real = played(settings)
    rows = simulated.metrics.join(real.metrics, on=["round", "node"], suffix="_real").filter(
        pl.col("round") > 0
    )
    rows = rows.filter(pl.col("node") >= 0)
    size = rows["bytes_sent"] / rows["messages_sent"]
    assert size.n_unique() == 1
    assert (rows["bytes_sent_real"] == rows["messages_sent_real"] * size).all()
    assert (rows["messages_sent_real"] <= rows["messages_sent"]).all()
    last = rows.filter(pl.col("round") == settings["stop"]["rounds"])
    assert (last["messages_sent_real"] == last["messages_sent"]).all()


def test_frozen_values_are_in_no_message_and_no_file(played: Played) -> None:
    for run in played(FROZEN):
        assert run.parameters is not None
        assert run.parameters.shape == (4, 9)
        assert "buffers" not in load_file(run.path / "models.safetensors")
        last = run.metrics.filter(pl.col("node") >= 0).filter(pl.col("round") == pl.col("round").max())
        per_message = last["bytes_sent"] / last["messages_sent"]
        assert ((per_message >= 4 * 9) & (per_message < 4 * 9 + 200)).all()


@pytest.mark.parametrize("settings", [BATCH_NORM, FROZEN], ids=["batch-norm", "frozen"])
def test_recorded_model_loads_and_reproduces_its_loss(settings: dict[str, Any], played: Played) -> None:
    run, _ = played(settings)
    inputs, targets = user_tasks.frozen().test  # the same as batch_norm's
    for node in (0, 3):
        module = run.module(node)
        recorded = run.metrics.filter(node=node, round=settings["stop"]["rounds"])["test_loss"].item()
        loss = float(user_tasks.half_mean_square(module(inputs), targets).detach())
        assert loss == pytest.approx(recorded, rel=1e-5)
    with pytest.raises(BadInput, match="rank: 4; accepted: 0 to 3"):
        run.module(4)


def test_learning_rate_follows_its_schedule_under_both_engines(played: Played) -> None:
    """A rate that an algorithm assigns lasts until the end of the round."""
    for run in played(SCHEDULED):
        rows = run.metrics.filter((pl.col("node") >= 0) & (pl.col("round") > 0)).sort("node", "round")
        expected = [0.005, 0.01, 0.01, 0.005, 0.005, 0.0025]
        assert rows["at_first"].to_list() == expected * 4
        assert rows["at_last"].to_list() == [*expected[:2], 0.25, *expected[3:]] * 4


def buffers(run: Run) -> torch.Tensor:
    return load_file(run.path / "models.safetensors")["buffers"]


def test_batch_norm_statistics_are_mixed_as_parameters_are(tmp_path: Path) -> None:
    """On a complete graph one mixing step makes parameters and buffers equal; without it they differ."""
    settings = {**BATCH_NORM, "topology": "complete"}
    mixed = play(settings, tmp_path)
    assert mixed.parameters is not None
    torch.testing.assert_close(mixed.parameters, mixed.parameters[:1].expand(4, -1))
    torch.testing.assert_close(buffers(mixed), buffers(mixed)[:1].expand(4, -1))
    alone = play(settings, tmp_path, algorithm={"name": "local", "local_steps": 2})
    assert (buffers(alone) - buffers(alone)[:1]).abs().max() > 0.01


def test_batch_norm_counters_stay_whole_numbers(tmp_path: Path) -> None:
    """The last buffer counts batches: 2 steps in each of 6 rounds, mixed or not."""
    for algorithm in ("d-psgd", "all-reduce", "local", "sgp"):
        run = play(BATCH_NORM, tmp_path, algorithm={"name": algorithm, "local_steps": 2})
        assert buffers(run)[:, -1].tolist() == [12.0] * 4, algorithm
    for algorithm in ("gradient-tracking", "qg-momentum"):
        run = play(BATCH_NORM, tmp_path, algorithm={"name": algorithm})
        assert buffers(run)[:, -1].tolist() == [6.0] * 4, algorithm


def test_relayed_buffers_come_late_like_the_parameters(tmp_path: Path) -> None:
    """On a path a model from d hops away is d - 1 rounds old; so are its statistics and its batch counter."""
    algorithm = {"name": "relay-sum", "tree": "spanning"}
    run = play(BATCH_NORM, tmp_path, algorithm=algorithm, stop={"rounds": 1})
    assert buffers(run)[:, -1].tolist() == [1.0] * 4
    counts = buffers(play(BATCH_NORM, tmp_path, algorithm=algorithm))[:, -1]
    assert (counts < 6).all()
    assert (counts > 4).all()


@pytest.mark.parametrize("trainer", ["sequential", "batched"])
def test_all_reduce_leaves_bitwise_equal_models(tmp_path: Path, trainer: str) -> None:
    run = play(
        BATCH_NORM,
        tmp_path,
        algorithm="all-reduce",
        engine={"name": "simulate", "trainer": trainer},
    )
    assert run.parameters is not None
    assert torch.equal(run.parameters, run.parameters[:1].expand(4, -1))
    assert torch.equal(buffers(run), buffers(run)[:1].expand(4, -1))
