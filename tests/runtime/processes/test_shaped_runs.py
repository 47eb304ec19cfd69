"""Complete runs over a limited network under both engines, and the pace of the compute profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from safetensors.torch import load_file

import gossamer
from gossamer import Experiment, Run
from gossamer.errors import BadInput
from gossamer.network import Path as Link
from gossamer.network import delivery
from gossamer.results.observer import Observer
from gossamer.runtime.processes.launcher import ProcessesEngine

SETTINGS: dict[str, Any] = {
    "nodes": 4,
    "seed": 3,
    "task": {"name": "digits", "model": {"name": "mlp", "hidden": [64]}},
    "topology": "ring",
    "algorithm": {"name": "d-psgd", "local_steps": 2},
    "compute": {"name": "constant", "seconds_per_step": 0.01},
    "network": {"name": "uniform", "latency_s": 0.01, "bandwidth_mbps": 5},
    "evaluation": {"every_rounds": 4, "samples": 50},
    "stop": {"rounds": 8},
}
SIMULATE = {"name": "simulate", "trainer": "sequential"}
COUNTED = ["node", "round", "bytes_sent", "bytes_received", "messages_sent", "messages_lost"]


class Notes(Observer):
    """Keeps messages to the user."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)

    @property
    def of_compute(self) -> bool:
        """Whether a note says that the compute profile is not kept."""
        return any(text.startswith("compute: ") for text in self.texts)


def play(out: Path, notes: Notes | None = None, **changes: Any) -> Run:
    return gossamer.run(Experiment.of({**SETTINGS, **changes}), out, observer=notes)


def last_rows(run: Run) -> pl.DataFrame:
    rows = pl.read_parquet(run.path / "metrics.parquet").filter(pl.col("node") >= 0)
    return rows.filter(pl.col("round") == pl.col("round").max()).sort("node")


def test_shaped_run_has_the_bits_and_bytes_of_a_simulation(tmp_path: Path) -> None:
    runs = [
        play(tmp_path, engine=engine)
        for engine in (SIMULATE, {"name": "processes", "trainer": "sequential", "pace": True})
    ]
    models = [load_file(run.path / "models.safetensors")["parameters"] for run in runs]
    assert bool((models[0] == models[1]).all())
    simulated, real = (last_rows(run) for run in runs)
    assert simulated.select(COUNTED).equals(real.select(COUNTED))
    assert simulated["bytes_sent"].min() > 8 * 2 * 4 * 64 * 64
    assert real["time_s"].max() >= simulated["time_s"].max()


def test_losses_depend_on_message_number_between_two_nodes(tmp_path: Path) -> None:
    """Each node sends one message a round to either neighbour, and continues without those that are lost. (Without pace, the
    compute profile neither delays a node nor marks it as slow.)"""
    run = play(
        tmp_path,
        notes := Notes(),
        network={"name": "uniform", "loss": 0.3},
        gather={"timeout_s": 0.3},
        compute={"name": "constant", "seconds_per_step": 1000.0},
        stop={"rounds": 4},
        engine="processes",
    )
    assert run.events.is_empty()
    assert notes.of_compute
    lossy = Link((0, 1), loss=0.3)
    lost = {
        (source, to): sum(delivery(lossy, SETTINGS["seed"], source, to, k) is None for k in range(4))
        for source in range(4)
        for to in ((source - 1) % 4, (source + 1) % 4)
    }
    rows = last_rows(run)
    assert sum(lost.values()) > 0
    assert rows["messages_sent"].to_list() == [8] * 4
    for node, row in enumerate(rows.iter_rows(named=True)):
        assert row["messages_lost"] == sum(count for (source, _), count in lost.items() if source == node)
        arrived = 8 - sum(count for (_, to), count in lost.items() if to == node)
        # (A node's last row does not count messages that arrive later.)
        assert row["bytes_received"] * 8 <= row["bytes_sent"] * arrived


def test_pacing_delay_counts_as_computing(tmp_path: Path) -> None:
    """In the record and in the timeline, from the start of a computation until it is due."""
    run = play(
        tmp_path,
        nodes=2,
        network="uniform",
        algorithm={"name": "local", "local_steps": 1},
        compute={"name": "constant", "seconds_per_step": 0.3},
        evaluation={"every_rounds": 2, "samples": 50, "timeline": {"to_s": 60.0}},
        stop={"rounds": 2},
        engine={"name": "processes", "trainer": "sequential", "pace": True},
    )
    lanes = run.timeline.filter(pl.col("kind") == "train")
    assert lanes["node"].to_list() == [0, 0, 1, 1]
    assert (lanes["end_s"] - lanes["start_s"]).min() >= 0.3 - 1e-6
    rows = last_rows(run)
    assert (rows["idle_share"] * rows["time_s"] <= rows["time_s"] - 0.6 + 1e-6).all()


def test_node_that_cannot_keep_pace_is_recorded_as_slow(tmp_path: Path) -> None:
    compute = {"name": "constant", "seconds_per_step": 0.0}
    paced = {"name": "processes", "trainer": "sequential", "pace": True}
    changes = {"nodes": 2, "network": "uniform", "compute": compute, "stop": {"rounds": 3}, "engine": paced}
    run = play(tmp_path, notes := Notes(), **changes)
    assert not notes.of_compute
    rows = run.events.sort("node")
    assert rows["node"].to_list() == [0, 1]
    assert rows["event"].to_list() == ["slow", "slow"]
    assert rows["detail"].to_list() == ["3 of 3 computations took longer than the compute profile says"] * 2


def test_end_by_time_does_not_wait_for_queued_messages(tmp_path: Path) -> None:
    """Bytes that have left by then are counted: none here."""
    network = {"name": "uniform", "bandwidth_mbps": 0.005}  # a chunk in 26 s
    run = play(tmp_path, notes := Notes(), network=network, stop={"time_s": 1.0}, engine="processes")
    assert not notes.of_compute  # the default profile needs no note
    rows = last_rows(run)
    assert rows["round"].max() == 0
    assert rows["bytes_sent"].sum() == 0
    assert run.status == "done"


def test_mismatched_network_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise BadInput("network: of 3 nodes; accepted: 4")

    monkeypatch.setattr("gossamer.network.UniformNetwork.conditions", refuse)
    with pytest.raises(BadInput, match="network: of 3 nodes"):
        ProcessesEngine(Experiment.of({**SETTINGS, "engine": "processes"}))
