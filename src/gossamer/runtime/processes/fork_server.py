"""The fork server: the worker of a run on one machine, as the coordinator sees it. It imports torch and everything else that
nodes need, which takes seconds. So that it can be started before its coordinator does the same, this module imports almost
nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from gossamer.runtime.processes.system import describe_exit

KILL_S = 10.0
"""Seconds that it has to end in order."""


@dataclass(frozen=True)
class Listen:
    """How workers join a run.

    Args:
        address: "host:port"; workers must reach this address, and nodes of all workers each other.
        token: at least 16 characters, known only to the coordinator and the workers.
        min_workers: how many must have joined before the run starts; it also waits for a slot for each node.
        executor: starts that many workers: "ray", or "module:factory" of a concurrent.futures executor; None: others do.
    """

    address: str
    token: str
    min_workers: int = 1
    executor: str | None = None


class ForkServer:
    """The process from which the nodes of one run are forked, and our ``end`` of the socket to it. It dies with this one."""

    def __init__(self) -> None:
        self.end, theirs = socket.socketpair()
        self._runs = self._closed = False
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gossamer.runtime.processes.worker",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is this process's to handle
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()

    def begin(self) -> socket.socket:
        """Have it serve a run, at this end."""
        self._runs = True
        return self.end

    def how_it_died(self) -> str:
        return describe_exit(self._process.wait(KILL_S))

    def close(self) -> None:
        """End it, and with it every node; a second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self.end.close()
        if not self._runs:
            self._process.kill()  # perhaps during its imports, or a step; it has no nodes
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
