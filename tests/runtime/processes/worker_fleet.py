"""Workers as processes of their own, forked from one that has imported everything: they join within a second."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TOKEN = "a token for the tests"
FORKER = """
import ctypes, json, os, sys, traceback
import torch
torch.set_num_threads(1)
import gossamer.runtime.processes.worker.worker, gossamer.tasks, gossamer.algorithms
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


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Fleet:
    """Starts workers.

    Args:
        folder: where their output goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._forker = subprocess.Popen(
            [sys.executable, "-c", FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._number = 0
        self._running: set[int] = set()

    def start(self, address: str, *options: str, slots: int = 4, token: str = TOKEN, space: str = "") -> int:
        """Start a worker; gives its process id."""
        arguments = ["worker", address, "--join", token, "--slots", str(slots), *options]
        return self.run(arguments, space)

    def run(self, arguments: Sequence[str], space: str = "") -> int:
        """Run gossamer, in a network namespace if one is named."""
        self._number += 1
        output = str(self.folder / f"output-{self._number}.txt")
        pid = self._ask({"arguments": arguments, "space": space, "output": output})
        self._running.add(pid)
        return pid

    def said(self) -> str:
        """What all have said."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("output-*.txt")))

    def wait(self, pid: int) -> int:
        """Wait until a worker has ended; gives its exit code."""
        self._running.discard(pid)
        return self._ask({"wait": pid})

    def kill(self, pid: int) -> None:
        """Kill a worker."""
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all."""
        for pid in list(self._running):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        self._forker.communicate()

    def _ask(self, order: dict[str, object]) -> int:
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(json.dumps(order) + "\n")
        self._forker.stdin.flush()
        return int(self._forker.stdout.readline())
