"""Two network namespaces as two machines, with a worker each: the record is as on one machine."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import gossamer
from gossamer import Experiment
from network.kernel import Lab, lab, missing
from worker_fleet import TOKEN, Fleet


@pytest.fixture
def machines() -> Iterator[Lab]:
    if reason := missing():
        pytest.skip(reason)
    with lab() as machines:
        for name in ("alice", "bob"):
            machines.host(name)
        machines.switch("switch")
        for name in ("alice", "bob"):
            machines.link(name, "switch", math.inf, math.inf)
        yield machines


def experiment(**changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "name": "two-machines",
        "nodes": 16,
        "task": {"name": "least-squares", "features": 5, "samples": 320},
        "topology": {"name": "random-regular", "degree": 4},
        "algorithm": {"name": "d-psgd", "local_steps": 1},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "batch_size": 6,
        "evaluation": {"every_rounds": 5},
        "stop": {"rounds": 10},
        "engine": {"name": "processes", "trainer": "sequential"},
    }
    return Experiment.of({**fields, **changes})


def start(fleet: Fleet, machines: Lab, described: Experiment, *options: str) -> list[int]:
    """The process ids of a run at alice, and of a worker at each machine."""
    described.save(fleet.folder / "experiment.yaml")
    address = f"{machines.address('alice')}:9000"
    spaces = [f"{machines.prefix}{name}" for name in ("alice", "bob")]
    files = [str(fleet.folder / "experiment.yaml"), "--out", str(fleet.folder / "runs"), "--no-report"]
    listen = ["--listen", address, "--token", TOKEN, "--min-workers", "2"]
    run = fleet.run(["run", *files, *listen, *options], spaces[0])
    return [run, *(fleet.start(address, slots=described.nodes // 2, space=space) for space in spaces)]


def test_sixteen_nodes_on_two_machines(machines: Lab, fleet: Fleet, tmp_path: Path) -> None:
    described = experiment()
    run, *workers = start(fleet, machines, described, "--json")
    assert fleet.wait(run) == 0, fleet.said()
    assert [fleet.wait(worker) for worker in workers] == [0, 0]
    summary = json.loads((tmp_path / "output-1.txt").read_text().splitlines()[-1])
    assert summary["status"] == "done"
    recorded = gossamer.load_run(tmp_path / "runs")
    simulated = described.override(engine={"name": "simulate", "trainer": "sequential"})
    alike = gossamer.run(simulated, tmp_path / "simulated")
    assert recorded.parameters is not None
    assert alike.parameters is not None
    assert torch.equal(recorded.parameters, alike.parameters)
    assert set(recorded.events["event"]) == {"worker-joined", "placed"}
    placed = {worker["address"]: worker["ranks"] for worker in recorded.environment["workers"]}
    assert set(placed) == {machines.address(name) for name in ("alice", "bob")}
    assert sorted(placed.values()) == [[*range(8)], [*range(8, 16)]]


@pytest.mark.slow
def test_short_outage_and_a_goodbye_are_said_and_recorded(
    machines: Lab, fleet: Fleet, tmp_path: Path
) -> None:
    """The outage breaks no connection and costs nothing. The goodbye needs no time of detection."""

    def wait_for(text: str) -> None:
        while text not in fleet.said():
            assert "error" not in fleet.said(), fleet.said()
            time.sleep(0.01)

    described = experiment(
        nodes=4,
        topology="ring",
        compute={"name": "constant", "seconds_per_step": 0.05},
        failures={"detection_s": 100.0},
        stop={"rounds": 10**5},
        engine={"name": "processes", "trainer": "sequential", "pace": True},
    )
    run, _, bob = start(fleet, machines, described)
    wait_for("round 5 ")
    machines.cut("bob", "switch")
    wait_for("has not been heard from for 3 s")
    machines.join("bob", "switch")
    wait_for("was not heard from for")
    os.kill(bob, signal.SIGTERM)
    assert fleet.wait(run) == 1
    assert fleet.wait(bob) == 130
    recorded = gossamer.load_run(tmp_path / "runs")
    assert recorded.error is not None
    assert re.fullmatch(
        rf"node \d died in round \d+: worker \d \({machines.address('bob')}\) was stopped", recorded.error
    )
    happened = recorded.events.filter(pl.col("node").is_null())["event"].to_list()
    assert happened == ["worker-joined"] * 2 + ["placed"] * 2 + ["worker-silent", "worker-stopped"]
