"""A simulated run is a function of its experiment, to the bit, regardless of its surroundings (law 3)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal

import gossamer
from gossamer import Experiment, Run

MLP: dict[str, Any] = {
    "nodes": 6,
    "seed": 7,
    "task": {"name": "digits", "model": {"name": "mlp", "hidden": [12]}},
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "topology": {"name": "random-regular", "degree": 3},
    "algorithm": {"name": "d-psgd", "local_steps": 2},
    "batch_size": 8,
    "compute": {"name": "constant", "seconds_per_step": 0.005},
    "evaluation": {"every_rounds": 4, "samples": 50},
    "engine": {"name": "simulate", "trainer": "sequential"},
    "stop": {"rounds": 8},
}
UNEQUAL: dict[str, Any] = {
    "compute": {"name": "log-normal", "median_seconds": 0.01, "sigma": 0.7},
    "network": {"name": "uniform", "latency_s": 0.004, "bandwidth_mbps": 5},
}
ALGORITHMS: list[dict[str, Any]] = [
    {"name": "d-psgd", "local_steps": 2},
    {"name": "d-psgd", "local_steps": 2, "overlap": True},
    {"name": "epidemic-oracle", "degree": 3},
    {"name": "epidemic-local", "degree": 2},
    {"name": "fedavg", "client_fraction": 0.5},
    {"name": "all-reduce"},
    {"name": "gradient-tracking"},
    {"name": "relay-sum", "tree": "spanning"},
]


def play(out: Path, **changes: Any) -> Run:
    return gossamer.run(Experiment.of({**MLP, **changes}), out)


def same_bits(left: Run, right: Run) -> bool:
    assert left.parameters is not None
    assert right.parameters is not None
    return torch.equal(left.parameters, right.parameters)


def assert_same_record(left: Run, right: Run) -> None:
    """Compare parameters to the bit, and every recorded value except real time."""
    assert same_bits(left, right)
    assert_frame_equal(left.metrics.drop("wall_s"), right.metrics.drop("wall_s"), check_exact=True)


def test_trainers_threads_and_workers_agree_and_repeat(tmp_path: Path) -> None:
    """After 8 rounds: to 1e-5 with one another, to the bit with itself.

    At most two threads compute at once: on shared cores, threads that synchronise in every operation take a hundred
    times as long.
    """
    runs: list[Run] = []
    for trainer, (threads, workers) in itertools.product(["sequential", "batched"], [(1, 1), (1, 2), (2, 1)]):
        engine = {"trainer": trainer, "threads": threads, "workers": workers}
        first, again = (
            play(tmp_path / f"{trainer}-{threads}-{workers}-{number}", engine=engine) for number in range(2)
        )
        assert_same_record(first, again)
        runs.append(first)
    reference = runs[0].parameters
    assert reference is not None
    for run in runs[1:]:
        assert run.parameters is not None
        difference = torch.linalg.vector_norm(run.parameters - reference)
        assert difference <= 1e-5 * torch.linalg.vector_norm(reference)
    # With one torch thread in each worker, the number of workers changes no bit.
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[3], runs[4])


@pytest.mark.parametrize("trainer", ["sequential", "batched"])
def test_same_experiment_gives_the_same_record(tmp_path: Path, trainer: str) -> None:
    engine = {"name": "simulate", "trainer": trainer}
    first = play(tmp_path, engine=engine, **UNEQUAL)
    torch.manual_seed(99)  # the state of global generators must not matter
    assert_same_record(first, play(tmp_path, engine=engine, **UNEQUAL))


def test_saved_experiment_reproduces_the_record(tmp_path: Path) -> None:
    first = play(tmp_path, **UNEQUAL)
    again = gossamer.run(Experiment.load(first.path / "experiment.yaml"), tmp_path)
    assert_same_record(first, again)


@pytest.mark.parametrize("field", [{"seed": 8}, {"batch_size": 9}, {"algorithm": "d-psgd"}])
def test_changed_experiment_changes_the_result(tmp_path: Path, field: dict[str, Any]) -> None:
    assert not same_bits(play(tmp_path), play(tmp_path, **field))


def test_global_generators_are_left_unchanged(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    play(tmp_path)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("environment", [{}, UNEQUAL], ids=["equal", "unequal"])
def test_unrelated_timers_change_nothing(tmp_path: Path, environment: dict[str, Any]) -> None:
    """For synchronous nodes: no bit of the models, no instant of the record."""
    quiet = play(tmp_path, **environment)
    busy = play(tmp_path, algorithm={"name": "user_algorithms:Restless", "local_steps": 2}, **environment)
    assert_same_record(quiet, busy)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_timing_does_not_change_synchronous_results(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """Slow nodes and links change times, not results."""
    instant = play(tmp_path, algorithm=algorithm, compute={"name": "constant", "seconds_per_step": 0})
    slow = play(tmp_path, algorithm=algorithm, **UNEQUAL)
    assert same_bits(instant, slow)
    assert instant.metrics["time_s"].max() == 0
    end = slow.metrics["time_s"].max()
    assert isinstance(end, float)
    assert end > 0.1


@pytest.mark.parametrize("trainer", ["sequential", "batched"])
def test_asynchronous_gossip_is_repeatable(tmp_path: Path, trainer: str) -> None:
    settings = {
        "algorithm": "user_algorithms:Chatter",
        "evaluation": {"every_rounds": None, "every_s": 0.05, "samples": 50},
        "engine": {"name": "simulate", "trainer": trainer},
        **UNEQUAL,
    }
    first = play(tmp_path, **settings)
    assert_same_record(first, play(tmp_path, **settings))
    # It is asynchronous: nodes are in different rounds at one instant, and times matter.
    rows = first.metrics.filter(pl.col("node") >= 0)
    assert (rows.group_by("time_s").agg(pl.col("round").n_unique())["round"] > 1).any()
    assert not same_bits(first, play(tmp_path, **{**settings, "network": "uniform"}))


def test_batching_changes_asynchronous_runs_by_rounding_only(tmp_path: Path) -> None:
    """Nodes read messages at due instants: with a batched trainer they read the same ones."""
    settings = {
        "algorithm": "user_algorithms:Chatter",
        "evaluation": {"every_rounds": 1, "samples": 50},
        **UNEQUAL,
    }
    sequential, batched = (
        play(tmp_path, **settings, engine={"name": "simulate", "trainer": trainer})
        for trainer in ("sequential", "batched")
    )
    columns = ["node", "round", "time_s", "heard", "bytes_received"]
    assert_frame_equal(sequential.metrics.select(columns), batched.metrics.select(columns), check_exact=True)
    torch.testing.assert_close(sequential.parameters, batched.parameters, rtol=1e-3, atol=1e-4)
