"""Four network namespaces as four hosts with shaped links, two nodes each; keys and peers files by the documented commands."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fleet import SETTINGS, Fleet

from gossamer import Experiment
from gossamer.deploy.collect import collect
from gossamer.results.report import write_report
from gossamer.runtime.setup import prepare
from network.kernel import Lab, lab, missing

HOSTS = ("alice", "bob", "carol", "dave")
MBIT = 20
WINDOW = 64
"""Bytes of parameters that are looked for together."""

CAPTURE = """
import socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
print("ready", flush=True)
with open(sys.argv[1], "wb") as file:
    while True:
        file.write(packets.recv(1 << 16))
        file.flush()
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def hosts() -> Iterator[Lab]:
    with lab() as made:
        for name in HOSTS:
            made.host(name)
        made.switch("switch")
        for name in HOSTS:
            made.link(name, "switch", MBIT, MBIT)
        yield made


@contextmanager
def captured(hosts: Lab, name: str, path: Path) -> Iterator[None]:
    """All frames that a host sends and receives are written into a file."""
    command = ["ip", "netns", "exec", f"{hosts.prefix}{name}", sys.executable, "-S", "-c", CAPTURE, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.communicate()


def settle(made: Fleet, hosts: Lab, each: int, **changes: Any) -> Experiment:
    """The experiment file, keys and the peers file, for so many nodes a host. Nothing is learned, so that all that is sent
    are the parameters that all start with."""
    fixed = {"optimizer": {"name": "sgd", "lr": 1e-30}, "gather": {"lost_peer": "skip"}}
    experiment = Experiment.of({**SETTINGS, **fixed, "nodes": each * len(HOSTS), **changes})
    experiment.save(made.folder / "experiment.yaml")
    ports = f"29600-{29600 + each - 1}" if each > 1 else "29600"
    addresses = [f"--address={hosts.address(name)}:{ports}" for name in HOSTS]
    made.start("keys", "keys", "keys", "--nodes", experiment.nodes, *addresses)
    assert made.wait("keys") == 0, made.said("keys")
    return experiment


def start(made: Fleet, hosts: Lab, experiment: Experiment, *more: Any) -> list[str]:
    names = [f"node-{rank}" for rank in range(experiment.nodes)]
    each = experiment.nodes // len(HOSTS)
    for rank, name in enumerate(names):
        arguments = ["experiment.yaml", "--rank", rank, "--peers", "keys/peers.yaml", *more]
        made.start(name, "node", *arguments, space=f"{hosts.prefix}{HOSTS[rank // each]}")
    return names


def in_clear(experiment: Experiment, path: Path) -> int:
    """How many pieces of the parameters stand in what was captured."""
    frames = path.read_bytes()
    parameters = prepare(experiment).initial(0).parameters.numpy().tobytes()
    pieces = [parameters[at : at + WINDOW] for at in range(0, len(parameters) - WINDOW, WINDOW)]
    assert len(frames) > len(parameters)
    return sum(piece in frames for piece in pieces)


@pytest.mark.slow
def test_a_run_on_four_hosts_of_which_one_dies_shows_nothing_on_the_wire(made: Fleet, hosts: Lab) -> None:
    experiment = settle(made, hosts, 2, topology="complete", stop={"rounds": 60})
    frames = made.folder / "frames"
    with captured(hosts, "alice", frames):
        names = start(made, hosts, experiment, "--keys", "keys")
        made.until(lambda: all("round 2 " in made.said(name) for name in names))
        for rank in (6, 7):
            made.signal(names[rank], signal.SIGKILL)
        assert [made.wait(name) for name in names] == [0] * 6 + [-9] * 2, made.said("node-0")
    assert in_clear(experiment, frames) == 0
    put_together = collect([made.folder / "runs"], made.folder / "whole")
    run = put_together.run
    assert run.outcome == "done, 2 nodes lost"
    assert run.lost == [6, 7]
    ends = run.metrics.filter((run.metrics["node"] >= 0) & (run.metrics["round"] == 60))
    assert sorted(ends["node"]) == [0, 1, 2, 3, 4, 5]
    assert run.metrics.filter(run.metrics["node"] == 7)["round"].min() == 0
    assert "2 nodes lost" in write_report([run], made.folder / "report.html").read_text()


@pytest.mark.slow
def test_without_keys_the_parameters_can_be_read_on_the_wire(made: Fleet, hosts: Lab) -> None:
    experiment = settle(made, hosts, 1, stop={"rounds": 2})
    frames = made.folder / "frames"
    with captured(hosts, "alice", frames):
        names = start(made, hosts, experiment, "--insecure")
        assert [made.wait(name) for name in names] == [0] * 4, made.said("node-0")
    assert in_clear(experiment, frames) > 0


@pytest.mark.slow
def test_hosts_that_are_parted_find_each_other_again(made: Fleet, hosts: Lab) -> None:
    experiment = settle(
        made,
        hosts,
        1,
        stop={"time_s": 20.0},
        gather={"lost_peer": "skip", "timeout_s": 0.5},
        topology="complete",
    )
    names = start(made, hosts, experiment, "--keys", "keys")
    made.until(lambda: all("round 2 " in made.said(name) for name in names))
    hosts.cut("dave", "switch")
    made.until(lambda: all("node 3 can't be reached" in made.said(name) for name in names[:3]))
    made.until(lambda: all(f"node {rank} can't be reached" in made.said(names[3]) for rank in range(3)))
    hosts.join("dave", "switch")
    made.until(lambda: all("node 3 is back" in made.said(name) for name in names[:3]))
    assert [made.wait(name) for name in names] == [0] * 4, made.said("node-3")
    run = collect([made.folder / "runs"], made.folder / "whole").run
    assert run.outcome == "done"
    assert run.parameters is not None
    assert bool(run.parameters.isfinite().all())
    ends = run.metrics.filter(run.metrics["node"] >= 0).group_by("node").max()
    assert ends["time_s"].max() >= 20.0  # the first clock that says so ends the run
    assert ends["time_s"].min() >= 15.0
