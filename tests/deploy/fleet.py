"""Nodes as processes of their own, forked from one that has imported everything: four of them start in a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORKER = """
import ctypes, json, os, sys, traceback
import torch
torch.set_num_threads(1)
import sklearn.datasets
import gossamer.deploy.node, gossamer.deploy.watch, gossamer.tasks, gossamer.tasks.digits, gossamer.algorithms
from gossamer.cli import main
libc = ctypes.CDLL(None, use_errno=True)
def become(order):
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


class Fleet:
    """Starts ``gossamer`` with some arguments, and ends what it started.

    Args:
        folder: where the processes work, and what they print is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._forker = subprocess.Popen(
            [sys.executable, "-c", FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pids: dict[str, int] = {}
        self.codes: dict[str, int] = {}

    def start(self, name: str, *arguments: Any, space: str = "") -> None:
        """Start a process under a name, in a network namespace if one is named."""
        order = {
            "arguments": [str(each) for each in arguments],
            "space": space,
            "output": str(self.folder / f"{name}.out"),
            "folder": str(self.folder),
        }
        self.pids[name] = int(self._ask(order))

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
            self.codes[name] = int(self._ask({"wait": self.pids[name]}))
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
        self._forker.communicate()

    def _ask(self, order: dict[str, Any]) -> str:
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(json.dumps(order) + "\n")
        self._forker.stdin.flush()
        return self._forker.stdout.readline()


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """A fleet; nothing of it is left afterwards."""
    made = Fleet(folder)
    try:
        yield made
    finally:
        made.close()


def nodes(made: Fleet, ranks: Sequence[int], *more: Any, experiment: str = "experiment.yaml") -> None:
    """Start nodes, as the documentation says; their files are in the fleet's folder."""
    for rank in ranks:
        made.start(
            f"node-{rank}", "node", experiment, "--rank", rank, "--peers", "keys/peers.yaml", *more
        )
