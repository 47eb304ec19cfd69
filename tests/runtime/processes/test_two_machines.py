"""Two network namespaces as two machines, with a worker each: the record is as on one machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

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


def test_sixteen_nodes_on_two_machines(machines: Lab, tmp_path: Path) -> None:
    described = Experiment.of(
        {
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
    )
    described.save(tmp_path / "experiment.yaml")
    fleet = Fleet(tmp_path)
    try:
        address = f"{machines.address('alice')}:9000"
        spaces = [f"{machines.prefix}{name}" for name in ("alice", "bob")]
        options = ["--listen", address, "--token", TOKEN, "--min-workers", "2", "--no-report", "--json"]
        run = fleet.run(
            ["run", str(tmp_path / "experiment.yaml"), "--out", str(tmp_path / "runs"), *options], spaces[0]
        )
        workers = [fleet.start(address, slots=8, space=space) for space in spaces]
        assert fleet.wait(run) == 0, fleet.said()
        assert [fleet.wait(worker) for worker in workers] == [0, 0]
    finally:
        fleet.close()
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
