"""A run that is stopped anywhere and resumed equals, to the bit, the run that was not stopped."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

import gossamer
from gossamer import Experiment, Run
from gossamer.results.checkpoints import newest, read_run_checkpoint
from gossamer.results.observer import Observer
from recorded import check_network_rows, rounds_of

ROUNDS = 11
SETTINGS: dict[str, Any] = {
    "nodes": 4,
    "task": {"name": "least-squares", "features": 5, "samples": 80, "test_samples": 20},
    "topology": "ring",
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.8, "schedule": {"name": "step", "every": 3}},
    "batch_size": 6,
    "compute": {"name": "log-normal", "median_seconds": 0.1, "sigma": 0.6},
    "network": {"name": "uniform", "latency_s": 0.03},
    "evaluation": {"every_rounds": 3},
    "checkpoint": {"every_rounds": 1, "keep": 100},
    "stop": {"rounds": ROUNDS},
    "engine": {"name": "simulate", "trainer": "sequential"},
}
PLAIN = {"optimizer": {"name": "sgd", "lr": 0.05, "schedule": {"name": "step", "every": 3}}}
SYNCHRONOUS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "d-psgd": ({"name": "d-psgd", "local_steps": 2}, {}),
    "d-psgd-adam": ({"name": "d-psgd"}, {"optimizer": {"name": "adam", "lr": 0.01}}),
    "d-psgd-overlap": ({"name": "d-psgd", "overlap": True}, {}),
    "d-psgd-changing": (
        {"name": "d-psgd"},
        {"topology": {"name": "random-regular", "degree": 2, "every_rounds": 1}},
    ),
    "all-reduce": ({"name": "all-reduce"}, {}),
    "centralized": ({"name": "centralized"}, {}),
    "local": ({"name": "local"}, {}),
    "fedavg": ({"name": "fedavg", "client_fraction": 0.4}, {}),
    "d2": ({"name": "d2"}, {"topology": "complete"}),
    "gradient-tracking": ({"name": "gradient-tracking"}, {}),
    "qg-momentum": ({"name": "qg-momentum"}, PLAIN),
    "relay-sum": ({"name": "relay-sum", "tree": "spanning"}, {}),
    "relay-sum-initial": ({"name": "relay-sum", "tree": "spanning", "stand_in": "initial"}, {}),
    "sgp": ({"name": "sgp"}, {"topology": "exponential"}),
    "sgp-overlapped": ({"name": "sgp", "overlap": 2}, {"topology": "exponential"}),
    "epidemic-oracle": ({"name": "epidemic-oracle", "degree": 2}, {}),
    "epidemic-local": ({"name": "epidemic-local", "degree": 2}, {}),
}
ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "ad-psgd": {"name": "ad-psgd"},
    "swift": {"name": "swift"},
    "divshare": {"name": "divshare", "fraction": 0.5, "recipients": 2},
    "swift-artifact": {"name": "swift-artifact", "recipients": 2},
    "ad-psgd-artifact": {"name": "ad-psgd-artifact", "degree": 2},
    "gossip-learning": {"name": "gossip-learning"},
}
PROCESSES = {"name": "processes", "trainer": "sequential"}
REAL = ("time_s", "idle_share", "uplink_share", "downlink_share", "staleness_s", "staleness_max_s")
"""Columns that depend on the clock, which only in a simulation is a function of the experiment."""


def settings(name: str) -> dict[str, Any]:
    algorithm, changes = SYNCHRONOUS[name]
    return {**SETTINGS, "algorithm": algorithm, **changes}


def play(out: Path, described: Mapping[str, Any], observer: Any = None, **changes: Any) -> Run:
    return gossamer.run(Experiment.of({**described, **changes}), out, observer=observer)


def as_left_by_a_kill(run: Run, number: int, to: Path) -> Path:
    """A copy of a run's folder as of a complete checkpoint, except that later rows remain."""
    folder = to / run.path.name
    shutil.copytree(run.path, folder)
    (folder / "status.json").unlink()
    for path in (folder / "checkpoints").iterdir():
        if int(path.name) > number:
            shutil.rmtree(path)
    return folder


def assert_same(resumed: Run, whole: Run, *, timed: bool = True) -> None:
    models, expected = (load_file(run.path / "models.safetensors") for run in (resumed, whole))
    for name in expected:
        assert torch.equal(models[name], expected[name]), name
    left, right = (run.metrics.drop("wall_s").sort("node", "round", "moment") for run in (resumed, whole))
    assert left.columns == right.columns
    counters = [name for name in left.columns if name.startswith(("bytes_", "messages_"))]
    if not whole.virtual:
        # The messages under way at a row depend on the machine, except at the last row.
        last = pl.col("round") == pl.col("round").max()
        ends = (table.filter(last).sort("node") for table in (left, right))
        sent = ["node", "bytes_sent", "messages_sent", "messages_lost"]
        first, second = (table.select(sent) for table in ends)
        assert first.equals(second)
        check_network_rows(resumed, rounds_of(whole, 0))
        check_network_rows(whole, rounds_of(whole, 0))
        both = set(rounds_of(resumed, -1)) & set(rounds_of(whole, -1))
        left, right = (
            table.filter((pl.col("node") >= 0) | pl.col("round").is_in(both)) for table in (left, right)
        )
    if not (timed and whole.virtual):
        left, right = (
            table.drop(*REAL, *counters, "model_age_s", "network_bytes") for table in (left, right)
        )
    elif "network_bytes" in left.columns:
        # It may include the byte that each message which is leaving has begun.
        pairs = zip(left["network_bytes"].to_list(), right["network_bytes"].to_list(), strict=True)
        assert all(abs(one - other) <= whole.nodes for one, other in pairs)
        left, right = (table.drop("network_bytes") for table in (left, right))
    for name in right.columns:
        assert left[name].to_list() == right[name].to_list(), name
    assert resumed.status == whole.status == "done"


class Stopper(Observer):
    """Stops a run with SIGTERM at a number of rows."""

    def __init__(self, rows: int) -> None:
        self._left = rows

    def row(self, row: Mapping[str, Any]) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGTERM)


class Counter(Observer):
    """Keeps the lowest reported number of completed rounds."""

    lowest = math.inf

    def progress(self, rounds: int, time_s: float) -> None:
        self.lowest = min(self.lowest, rounds)


QUICK = ("d-psgd", "fedavg", "sgp-overlapped")
"""The algorithms that every test run resumes; all of them together would be slow."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SYNCHRONOUS]
)
def test_resumed_simulation_has_the_same_bits(tmp_path: Path, name: str) -> None:
    described = settings(name)
    whole = play(tmp_path, described)
    draw = np.random.default_rng(list(name.encode()))
    killed = as_left_by_a_kill(whole, int(draw.integers(1, ROUNDS)), tmp_path / "killed")
    assert_same(gossamer.resume(killed), whole)

    rows = int(draw.integers(2, max(whole.metrics.height - 6, 4)))
    stopped = play(tmp_path / "stopped", described, Stopper(rows))
    assert stopped.status == "stopped"
    resumed = gossamer.resume(stopped.path)
    assert_same(resumed, whole)
    assert resumed.events["event"].to_list() == ["resumed"]


@pytest.mark.parametrize("sharing", ["fair", pytest.param("fifo", marks=pytest.mark.slow)])
def test_messages_under_way_survive_a_resume(tmp_path: Path, sharing: str) -> None:
    """On slow links, many messages are under way at a checkpoint."""
    network = {"name": "uniform", "latency_s": 0.05, "bandwidth_mbps": 0.02, "sharing": sharing}
    described = {**settings("gradient-tracking"), "network": network}
    whole = play(tmp_path, described)
    for number in (2, 7):
        resumed = gossamer.resume(as_left_by_a_kill(whole, number, tmp_path / str(number)))
        assert_same(resumed, whole)
    stopped = play(tmp_path / "stopped", described, Stopper(9))
    assert_same(gossamer.resume(stopped.path), whole)


@pytest.mark.parametrize(
    "name",
    [
        "d-psgd",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fedavg", "gradient-tracking", "relay-sum")
        ),
    ],
)
def test_resumed_processes_have_the_same_bits(tmp_path: Path, name: str) -> None:
    described = {**settings(name), "engine": PROCESSES, "network": "uniform"}
    whole = play(tmp_path, described)
    draw = np.random.default_rng(list(name.encode()))
    killed = as_left_by_a_kill(whole, int(draw.integers(1, ROUNDS)), tmp_path / "killed")
    assert_same(gossamer.resume(killed), whole)
    # A long run, which does not end before it is told to stop.
    stopped = play(tmp_path / "stopped", {**described, "stop": {"rounds": 100_000}}, Stopper(6))
    assert stopped.status == "stopped"
    last, counter = newest(stopped.path / "checkpoints"), Counter()
    assert last is not None
    rounds = max(last.rounds.values()) + 5
    resumed = gossamer.resume(stopped.path, [f"stop.rounds={rounds}"], observer=counter)
    assert_same(resumed, play(tmp_path, {**described, "stop": {"rounds": rounds}}))
    assert counter.lowest >= sum(last.rounds.values())


SLOW = {"name": "uniform", "latency_s": 0.05, "bandwidth_mbps": 0.01}
NETWORKS: dict[str, dict[str, Any]] = {
    "latency": {"name": "uniform", "latency_s": 0.03},
    "fair": SLOW,
    "fifo": {**SLOW, "sharing": "fifo"},
}
LONG = {
    **SETTINGS,
    "checkpoint": {"every_s": 0.4, "keep": 100},
    "evaluation": {"every_rounds": 2},
    "stop": {"rounds": 25},
}


class Listener(Observer):
    """Keeps messages to the user."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    @property
    def computed_again(self) -> bool:
        return any("the run is computed again" in line for line in self.lines)


def killed_and_resumed(whole: Run, draw: np.random.Generator, tmp_path: Path) -> Run:
    """Resume from a random checkpoint of a run, without computing the run from its start."""
    numbers = sorted(int(path.name) for path in (whole.path / "checkpoints").iterdir())
    listener, number = Listener(), int(draw.choice(numbers[:-1]))
    run = gossamer.resume(as_left_by_a_kill(whole, number, tmp_path / f"killed-{number}"), observer=listener)
    assert not listener.computed_again
    return run


def stopped_and_resumed(described: Mapping[str, Any], rows: int, tmp_path: Path) -> Run:
    """Stop a run after a number of rows, and resume it from the checkpoint of that moment."""
    stopped, listener = play(tmp_path / f"stopped-{rows}", described, Stopper(rows)), Listener()
    assert stopped.status == "stopped"
    run = gossamer.resume(stopped.path, observer=listener)
    assert not listener.computed_again
    return run


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("ad-psgd", "divshare") else pytest.param(name, marks=pytest.mark.slow)
        for name in ASYNCHRONOUS
    ],
)
def test_resumed_asynchronous_simulation_has_the_same_bits(tmp_path: Path, name: str, network: str) -> None:
    described = {**LONG, "algorithm": ASYNCHRONOUS[name], "network": NETWORKS[network]}
    whole = play(tmp_path, described)
    draw = np.random.default_rng([*f"{name}/{network}".encode()])
    assert_same(killed_and_resumed(whole, draw, tmp_path), whole)
    rows = int(draw.integers(2, whole.metrics.height - 8))
    assert_same(stopped_and_resumed(described, rows, tmp_path), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ad-psgd", "divshare", "swift", "gossip-learning"])
def test_run_killed_at_twenty_random_instants_resumes(tmp_path: Path, name: str) -> None:
    described = {
        **LONG,
        "algorithm": ASYNCHRONOUS[name],
        "network": SLOW,
        "checkpoint": {"every_s": 0.1, "keep": 500},
    }
    whole, draw = play(tmp_path, described), np.random.default_rng([*name.encode()])
    for k in range(20):
        assert_same(killed_and_resumed(whole, draw, tmp_path / str(k)), whole)


MORE: dict[str, dict[str, Any]] = {
    "wait-free": {"algorithm": {"name": "ad-psgd", "wait_free": True}, "network": NETWORKS["fifo"]},
    "kept-queue": {
        "algorithm": {"name": "divshare", "fraction": 0.5, "recipients": 2, "queue": "keep", "backlog": 2},
        "network": SLOW,
    },
    "codec": {"algorithm": "gossip-learning", "codec": {"name": "top-k", "fraction": 0.3}, "network": SLOW},
    "on-a-grid": {"algorithm": "gossip-learning", "evaluation": {"every_s": 0.3}},
    "target": {
        "algorithm": "gossip-learning",
        "stop": {"rounds": 25, "target": {"metric": "test_loss", "value": 1e-9}},
    },
    "sampled": {"algorithm": "gossip-learning", "topology": {"name": "cyclon", "view": 3, "shuffle": 2}},
    "lossy": {"algorithm": "swift", "network": {"name": "uniform", "latency_s": 0.03, "loss": 0.1}},
    "adam": {"algorithm": "gossip-learning", "optimizer": {"name": "adam", "lr": 0.01}},
    "uneven-rounds": {"algorithm": "d-psgd", "checkpoint": {"every_s": 0.4, "keep": 100}},
}


@pytest.mark.parametrize(
    "name", [name if name == "wait-free" else pytest.param(name, marks=pytest.mark.slow) for name in MORE]
)
def test_other_resumed_runs_have_the_same_bits(tmp_path: Path, name: str) -> None:
    described, draw = {**LONG, **MORE[name]}, np.random.default_rng([*name.encode()])
    whole = play(tmp_path, described)
    assert_same(killed_and_resumed(whole, draw, tmp_path), whole)
    assert_same(
        stopped_and_resumed(described, int(whole.metrics.height * draw.uniform(0.2, 0.7)), tmp_path), whole
    )


def test_resumed_batched_run_has_the_same_bits(tmp_path: Path) -> None:
    """Bits depend on the batches of nodes, which must be the same again."""
    engine = {"name": "simulate", "trainer": "batched"}
    described = {**LONG, "algorithm": "gossip-learning", "engine": engine, "nodes": 8, "network": SLOW}
    whole, draw = play(tmp_path, described), np.random.default_rng(4)
    assert_same(killed_and_resumed(whole, draw, tmp_path), whole)
    assert_same(stopped_and_resumed(described, 30, tmp_path), whole)


def test_run_can_be_resumed_twice(tmp_path: Path) -> None:
    described = {**LONG, "algorithm": ASYNCHRONOUS["ad-psgd"], "network": SLOW}
    whole, stopped = play(tmp_path, described), play(tmp_path / "stopped", described, Stopper(12))
    again = gossamer.resume(stopped.path, observer=Stopper(14))
    assert again.status == "stopped"
    assert_same(gossamer.resume(stopped.path), whole)


def test_extended_run_has_the_bits_of_a_longer_one(tmp_path: Path) -> None:
    """Nodes that had ended would have continued, so the run resumes from an earlier checkpoint."""
    described = {**LONG, "algorithm": ASYNCHRONOUS["divshare"], "network": SLOW}
    short = play(tmp_path / "short", {**described, "stop": {"rounds": 16}})
    longer = gossamer.resume(short.path, ["stop.rounds=25"])
    assert_same(longer, play(tmp_path, described))


def test_extension_without_a_checkpoint_is_computed_again(tmp_path: Path) -> None:
    checkpoint = {"checkpoint": {"every_rounds": 1000}}
    described = {**LONG, **checkpoint, "algorithm": ASYNCHRONOUS["ad-psgd"], "network": SLOW}
    short, listener = play(tmp_path / "short", {**described, "stop": {"rounds": 16}}), Listener()
    longer = gossamer.resume(short.path, ["stop.rounds=25"], observer=listener)
    assert listener.computed_again
    assert_same(longer, play(tmp_path, described))


class Lazy(gossamer.Algorithm):
    """Sends its model only if it has moved far: messages depend on values."""

    gathers: ClassVar[bool] = False

    async def run(self, node: gossamer.Node) -> None:
        sent = node.state.setdefault("sent", {"model": node.model})
        async for r in node.rounds():
            await node.train(1)
            if (node.parameters - sent["model"].parameters).norm() > 0.05:
                sent["model"] = node.model
                node.broadcast(await node.neighbors(r), node.model, tag="model")
            for message in node.drain("model"):
                await node.mix({message.source: message.payload}, {message.source: 0.5})


def test_value_dependent_run_is_computed_again(tmp_path: Path) -> None:
    described = {**LONG, "algorithm": "test_resumed_bits:Lazy"}
    whole = play(tmp_path, described)
    stopped, listener = play(tmp_path / "stopped", described, Stopper(30)), Listener()
    resumed = gossamer.resume(stopped.path, observer=listener)
    assert listener.computed_again
    assert_same(resumed, whole)
    [again, resumed_at] = resumed.events.filter(event="resumed")["detail"]  # in the order of their times
    assert again.startswith("the run is computed again from its start: node ")
    assert resumed_at.startswith("from checkpoint ")


class Remembers(gossamer.Algorithm):
    """A local variable refers to a vector in the state, which a restored node must see."""

    gathers: ClassVar[bool] = False

    async def run(self, node: gossamer.Node) -> None:
        velocity = node.state.setdefault("velocity", torch.zeros_like(node.parameters))
        async for r in node.rounds():
            before = node.parameters
            await node.train(1)
            velocity = node.state["velocity"] = 0.5 * velocity + (node.parameters - before)
            node.parameters = before + velocity
            node.broadcast(await node.neighbors(r), node.model, tag="model")
            await node.sleep(0.01)
            heard = {message.source: message.payload for message in node.drain("model", newest=True)}
            await node.mix(heard, dict.fromkeys(heard, 1 / (1 + len(heard))))


def test_local_variables_see_the_restored_vectors(tmp_path: Path) -> None:
    described = {**LONG, "algorithm": "test_resumed_bits:Remembers"}
    whole = play(tmp_path, described)
    assert_same(killed_and_resumed(whole, np.random.default_rng(1), tmp_path), whole)
    assert_same(stopped_and_resumed(described, 20, tmp_path), whole)


class Plateau(gossamer.Algorithm):
    """Sends its training loss, and lowers its learning rate if the loss does not fall."""

    async def run(self, node: gossamer.Node) -> None:
        node.state.setdefault("best", 1e9)
        async for r in node.rounds():
            loss = await node.train(1)
            node.lr *= 1.0 if loss < node.state["best"] else 0.7
            node.state["best"] = min(node.state["best"], loss)
            peers = await node.neighbors(r)
            node.broadcast(peers, {"model": node.model, "loss": loss}, tag=r)
            heard = await node.gather(peers, r)
            weights = {rank: 1 / (1 + payload["loss"]) for rank, payload in heard.items()}
            total = sum(weights.values()) + 1 / (1 + loss)
            models = {rank: payload["model"] for rank, payload in heard.items()}
            await node.mix(models, {rank: weight / total for rank, weight in weights.items()})


def test_losses_and_learning_rates_are_restored(tmp_path: Path) -> None:
    whole = play(tmp_path, {**LONG, "algorithm": "test_resumed_bits:Plateau"})
    for k in range(3):
        assert_same(killed_and_resumed(whole, np.random.default_rng(k), tmp_path / str(k)), whole)


class Larger(gossamer.Algorithm):
    """Takes over a model with a larger norm: values decide which vector a node has, but no message."""

    gathers: ClassVar[bool] = False

    async def run(self, node: gossamer.Node) -> None:
        async for r in node.rounds():
            await node.train(1)
            node.broadcast(await node.neighbors(r), node.model, tag="model")
            await node.sleep(0.05)
            for message in node.drain("model", newest=True):
                if message.payload.parameters.norm() > node.parameters.norm():
                    node.model = message.payload


def test_restoring_a_node_overwrites_no_other_nodes_vector(tmp_path: Path) -> None:
    whole = play(tmp_path, {**LONG, "algorithm": "test_resumed_bits:Larger"})
    for number in (1, 2, 4):
        folder = as_left_by_a_kill(whole, number, tmp_path / str(number))
        assert_same(gossamer.resume(folder), whole)


def test_missing_rows_are_computed_again(tmp_path: Path) -> None:
    """A machine that fails may have written a checkpoint but not the rows before it."""
    whole, listener = play(tmp_path, {**LONG, "algorithm": ASYNCHRONOUS["swift"]}), Listener()
    folder = as_left_by_a_kill(whole, 4, tmp_path / "killed")
    table = pl.read_parquet(folder / "metrics.parquet")
    table.filter(pl.col("time_s") < 0.5).write_parquet(folder / "metrics.parquet")
    resumed = gossamer.resume(folder, observer=listener)
    assert listener.computed_again
    assert_same(resumed, whole)


def test_missing_network_row_is_computed_again(tmp_path: Path) -> None:
    """Models of nodes are undefined while recorded events are replayed."""
    whole, listener = play(tmp_path, {**LONG, "algorithm": ASYNCHRONOUS["swift"]}), Listener()
    folder = as_left_by_a_kill(whole, 4, tmp_path / "killed")
    table = pl.read_parquet(folder / "metrics.parquet")
    last = table.filter(pl.col("node") == -1, pl.col("time_s") < 0.5)["time_s"].max()
    table.filter((pl.col("node") >= 0) | (pl.col("time_s") < last)).write_parquet(folder / "metrics.parquet")
    resumed = gossamer.resume(folder, observer=listener)
    assert listener.computed_again
    assert_same(resumed, whole)


class StoppedAtOnce(Observer):
    """Stops a run as soon as rounds are completed."""

    def progress(self, rounds: int, time_s: float) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_run_stopped_during_replay_has_no_models_and_resumes(tmp_path: Path) -> None:
    described = {**LONG, "algorithm": ASYNCHRONOUS["swift"]}
    whole = play(tmp_path, described)
    folder = as_left_by_a_kill(whole, 4, tmp_path / "killed")
    stopped = gossamer.resume(folder, observer=StoppedAtOnce())
    assert stopped.status == "stopped"
    assert stopped.parameters is None
    assert_same(gossamer.resume(folder), whole)


def test_end_before_the_record_gives_the_shorter_run(tmp_path: Path) -> None:
    described = {**LONG, "algorithm": ASYNCHRONOUS["gossip-learning"], "network": SLOW}
    whole = play(tmp_path, described)
    cut = read_run_checkpoint(whole.path / "checkpoints", 6)
    rounds = max(cut.rounds.values())
    shorter = gossamer.resume(as_left_by_a_kill(whole, 6, tmp_path / "killed"), [f"stop.rounds={rounds}"])
    assert_same(shorter, play(tmp_path / "short", {**described, "stop": {"rounds": rounds}}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_resumed_asynchronous_processes_go_on_and_learn(tmp_path: Path, name: str) -> None:
    """Real nodes that never wait do not repeat their bits, but they learn the same task."""
    described = {
        **SETTINGS,
        "algorithm": ASYNCHRONOUS[name],
        "optimizer": {"name": "sgd", "lr": 0.05},
        "stop": {"rounds": 40},
        # Steps without duration would be over before any message arrives.
        "engine": {**PROCESSES, "pace": True},
        "compute": {"name": "log-normal", "median_seconds": 0.05, "sigma": 0.6},
        "checkpoint": {"every_rounds": 10},
    }
    stopped = play(tmp_path, described, Stopper(30))
    assert stopped.status == "stopped"
    resumed = gossamer.resume(stopped.path)
    assert resumed.status == "done"
    # (A node that averages after its rounds has another row at the end.)
    rows = resumed.metrics.filter(pl.col("node") >= 0, moment="round").sort("node", "round")
    assert rows.filter(pl.col("round") == 40)["node"].to_list() == [0, 1, 2, 3]
    assert not rows.select("node", "round").is_duplicated().any()
    losses = rows.group_by("round").agg(pl.col("test_loss").mean()).sort("round")["test_loss"]
    assert losses[-1] < losses[0] / 3


TICKS: dict[str, Any] = {
    "algorithm": "d-psgd",
    "compute": {"name": "constant", "seconds_per_step": 0.1},
    "evaluation": {"every_s": 0.2, "every_rounds": 2},
    "checkpoint": {"every_rounds": 2, "keep": 100},
}


@pytest.mark.parametrize(
    ("short", "long", "given", "changes"),
    [
        ({"time_s": 0.4}, {"time_s": 0.8}, "stop.time_s=0.8", {}),
        ({"rounds": 4}, {"rounds": 8}, "stop.rounds=8", {}),
        (
            {"rounds": 5},
            {"rounds": 10},
            "stop.rounds=10",
            {"compute": {"name": "per-node", "seconds_per_step": [0.1, 0.1, 0.1, 0.35]}},
        ),
        (
            {"rounds": 10, "bytes": 2000},
            {"rounds": 20, "bytes": 2000},
            "stop.rounds=20",
            {"evaluation": {"every_rounds": 2}},
        ),
    ],
    ids=["time", "rounds", "nodes that end apart", "bytes"],
)
def test_extended_run_has_every_row_of_a_longer_one(
    tmp_path: Path, short: dict[str, Any], long: dict[str, Any], given: str, changes: dict[str, Any]
) -> None:
    def experiment(stop: dict[str, Any]) -> Experiment:
        return Experiment.of({**SETTINGS, **PLAIN, **TICKS, **changes, "stop": stop})

    whole = gossamer.run(experiment(long), tmp_path / "whole")
    resumed = gossamer.resume(gossamer.run(experiment(short), tmp_path / "short").path, [given])
    key = ["node", "time_s", "round", "moment"]
    columns = [*key, "test_loss", "bytes_sent", "bytes_received", "train_loss"]
    expected, actual = (run.metrics.select(columns).sort(key) for run in (whole, resumed))
    assert expected.equals(actual)
    assert torch.equal(whole.parameters, resumed.parameters)  # type: ignore[arg-type]


def test_checkpoints_drop_messages_to_ended_nodes(tmp_path: Path) -> None:
    """No node reads them, and the slowest node sends ten times as many."""
    peaks = [
        gossamer.run(
            Experiment.of(
                {
                    **SETTINGS,
                    **PLAIN,
                    "algorithm": "swift",
                    "compute": {"name": "per-node", "seconds_per_step": [0.01] * 3 + [0.1]},
                    "evaluation": {"every_rounds": None},
                    "checkpoint": {"every_rounds": rounds // 3},
                    "stop": {"rounds": rounds},
                }
            ),
            tmp_path,
        ).figures["peak_vectors"]
        for rounds in (30, 90)
    ]
    assert peaks[1] < 1.3 * peaks[0]
