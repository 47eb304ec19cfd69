"""Three network namespaces as machines, of which two can't reach each other, or only in one direction."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest

import gossamer
from gossamer import Experiment
from network.kernel import Lab, lab, missing
from worker_fleet import TOKEN, Fleet

NAMES = ("alice", "bob", "carol")
PORT = 9000
EXPERIMENT = Experiment.of(
    {
        "name": "cut",
        "nodes": 6,
        "task": {"name": "least-squares", "features": 5, "samples": 60},
        "topology": "complete",
        "algorithm": {"name": "d-psgd", "local_steps": 1},
        "compute": {"name": "constant", "seconds_per_step": 0.02},
        "gather": {"lost_peer": "skip"},
        "failures": {"detection_s": 2.0},
        "evaluation": {"every_rounds": 1},
        "stop": {"rounds": 300},
        "engine": {"name": "processes", "trainer": "sequential"},
    }
)


@pytest.fixture
def machines() -> Iterator[Lab]:
    if reason := missing():
        pytest.skip(reason)
    with lab() as machines:
        for name in NAMES:
            machines.host(name)
        machines.switch("switch")
        for name in NAMES:
            machines.link(name, "switch", math.inf, math.inf)
        yield machines


def do(machines: Lab, name: str, command: str) -> str:
    """What a command of ``ip`` or ``ss`` says on a machine."""
    whole = ["ip", "netns", "exec", f"{machines.prefix}{name}", *command.split()]
    return subprocess.run(whole, check=True, capture_output=True, text=True, timeout=20).stdout


def cut(machines: Lab, how: str) -> Callable[[], None]:
    """Cut bob off from carol: in both directions, or let nobody in at carol. Returns what undoes it."""
    bob, carol = (machines.address(name) for name in ("bob", "carol"))
    done = []
    if how != "one way":
        for name, other in (("bob", carol), ("carol", bob)):
            done.append((name, f"ip route {{}} blackhole {other}/32"))
    else:  # what carol's nodes answer to bob's goes nowhere
        ports = re.findall(r":(\d+)\s", do(machines, "carol", "ss -ltnH"))
        done = [("carol", f"ip rule {{}} to {bob} ipproto tcp sport {port} blackhole") for port in {*ports}]
    for name, command in done:
        do(machines, name, command.format("add"))

    def undo() -> None:
        for name, command in done:
            do(machines, name, command.format("del"))

    return undo


@pytest.mark.slow
@pytest.mark.parametrize("how", ["for a while", "for good", "one way"])
def test_machines_that_cannot_reach_each_other_hold_nobody_up(
    machines: Lab, fleet: Fleet, tmp_path: Path, how: str
) -> None:
    EXPERIMENT.save(tmp_path / "experiment.yaml")
    address = f"{machines.address('alice')}:{PORT}"
    options = ["--listen", address, "--token", TOKEN, "--min-workers", "3", "--no-report", "--json"]
    arguments = ["run", str(tmp_path / "experiment.yaml"), "--out", str(tmp_path / "runs"), *options]
    run = fleet.run(arguments, f"{machines.prefix}alice")
    for name in NAMES:
        fleet.start(address, slots=2, space=f"{machines.prefix}{name}")

    def until(happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline, fleet.said()
            time.sleep(0.01)

    until(lambda: sum(path.stat().st_size for path in tmp_path.glob("runs/**/metrics*")) > 20_000)
    undo = cut(machines, how)
    until(lambda: fleet.said().count("the two go on without each other") == 4)
    if how == "for a while":
        undo()
        until(lambda: fleet.said().count("reach each other again") == 4)
    assert fleet.wait(run) == 0, fleet.said()
    summary = json.loads((tmp_path / "output-1.txt").read_text().splitlines()[-1])
    assert summary["status"] == "done"
    recorded = gossamer.load_run(tmp_path / "runs")
    kinds = recorded.events["event"].to_list()
    assert kinds.count("unreachable") == 4
    assert kinds.count("reached") == (4 if how == "for a while" else 0)
    assert not {"lost", "returned"} & {*kinds}  # all take part, all the time
    rows = recorded.metrics.filter(pl.col("node") >= 0)
    assert sorted(rows["node"].to_list()) == sorted([*range(6)] * 301)
