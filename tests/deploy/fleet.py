"""Nodes as processes of their own, forked from one that has imported everything: four of them start in a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gossamer import Experiment
from gossamer.runtime.processes.security.keys import make_keys
from gossamer.runtime.processes.security.peers import Peer, Peers
from gossamer.runtime.processes.transport.transport import listen

FORKER = """
import ctypes, json, os, sys, traceback
import torch
torch.set_num_threads(1)
import sklearn.datasets
import gossamer.deploy.node, gossamer.deploy.watch, gossamer.tasks, gossamer.tasks.images, gossamer.algorithms
from gossamer.cli import main
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, 9)  # nothing outlives the tests, however they end
def become(order):
    libc.prctl(1, 9)
    try:
        if order["space"]:
            space = os.open("/run/netns/" + order["space"], os.O_RDONLY)
            if libc.setns(space, 0x40000000):
                raise OSError(ctypes.get_errno(), "setns")
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(order["folder"])
        sys.argv = ["gossamer", *order["arguments"]]
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        _, status = os.waitpid(order["wait"], 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        become(order)
    print(pid, flush=True)
"""

LIMIT_S = 90.0

SETTINGS: dict[str, Any] = {
    "name": "deployed",
    "nodes": 4,
    "seed": 3,
    "task": {"name": "digits", "model": "mlp", "hidden": [16]},
    "topology": "ring",
    "algorithm": {"name": "d-psgd", "local_steps": 1},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "evaluation": {"every_rounds": 2, "samples": 50},
    "stop": {"rounds": 6},
    "failures": {"heartbeat_s": 0.2, "detection_s": 1.0},
    "engine": "processes",
}


class Forker:
    """The process that all others are forked from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **order: Any) -> int:
        """Have it fork, or wait for one that it has forked; gives a process id, or an exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.communicate()


class Fleet:
    """Starts ``gossamer`` with some arguments, and ends what it started.

    Args:
        forker: forks the processes.
        folder: where they work, and what they print is kept.
    """

    def __init__(self, forker: Forker, folder: Path) -> None:
        self.folder = folder
        self._forker = forker
        self.pids: dict[str, int] = {}
        self.codes: dict[str, int] = {}

    def start(self, name: str, *arguments: Any, space: str = "") -> None:
        """Start a process under a name, in a network namespace if one is named."""
        self.pids[name] = self._forker.ask(
            arguments=[str(each) for each in arguments],
            space=space,
            output=str(self.folder / f"{name}.out"),
            folder=str(self.folder),
        )

    def said(self, name: str) -> str:
        """What a process has printed by now."""
        path = self.folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something that the processes bring about."""
        end = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < end, {name: self.said(name) for name in self.pids}
            time.sleep(0.02)

    def wait(self, name: str) -> int:
        """The exit code of a process, negative for the signal that killed it."""
        if name not in self.codes:
            self.codes[name] = self._forker.ask(wait=self.pids[name])
        return self.codes[name]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process that has not been waited for."""
        os.kill(self.pids[name], number)

    def close(self) -> None:
        """End all that is left."""
        for name, pid in self.pids.items():
            if name not in self.codes:
                os.kill(pid, signal.SIGKILL)
                self.wait(name)


def nodes(made: Fleet, ranks: Sequence[int], *more: Any, experiment: str = "experiment.yaml") -> None:
    """Start nodes, as the documentation says; their files are in the fleet's folder."""
    for rank in ranks:
        made.start(f"node-{rank}", "node", experiment, "--rank", rank, "--peers", "keys/peers.yaml", *more)


def free_addresses(count: int) -> list[str]:
    listeners = [listen() for _ in range(count)]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    for listener in listeners:
        listener.close()
    return addresses


def prepare(folder: Path, **changes: Any) -> Experiment:
    """An experiment file, keys and a peers file."""
    experiment = Experiment.of({**SETTINGS, **changes})
    experiment.save(folder / "experiment.yaml")
    certificates = make_keys(folder / "keys", range(experiment.nodes))
    addresses = free_addresses(experiment.nodes)
    Peers(Peer.of(rank, addresses[rank], der) for rank, der in certificates.items()).save(
        folder / "keys" / "peers.yaml"
    )
    return experiment
