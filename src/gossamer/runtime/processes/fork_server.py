"""The fork server: the worker of a run on one machine, as the coordinator sees it. It imports torch and
everything else that nodes need, which takes seconds. This module imports almost nothing, so that the fork
server can start before the coordinator's own imports."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass

from gossamer.runtime.processes.system import check_supported, describe_exit
from gossamer.startup import environment, program

KILL_S = 10.0
"""Seconds that the fork server has to end by itself."""


@dataclass(frozen=True)
class Listen:
    """How workers join a run.

    Args:
        address: "host:port". Workers must reach this address, and all nodes must reach each other.
        token: at least 16 characters, known only to the coordinator and the workers.
        min_workers: number of workers that must join before the run starts, with a slot for each node.
        executor: starts that many workers: "ray", or "module:factory" of a concurrent.futures executor. None
            if workers are started otherwise.
    """

    address: str
    token: str
    min_workers: int = 1
    executor: str | None = None


class ForkServer:
    """The process from which the nodes of one run are forked, and this process's ``end`` of the socket to it. The
    fork server dies with this process."""

    def __init__(self) -> None:
        check_supported()
        self.end, theirs = socket.socketpair()
        self._runs = self._closed = False
        arguments = str(theirs.fileno()), str(os.getpid())
        self._process = subprocess.Popen(
            program("from gossamer.runtime.processes.worker.start import main; main()", *arguments),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # only this process handles Ctrl-C at the terminal
            env=environment(),
        )
        theirs.close()

    def begin(self) -> socket.socket:
        """Begin a run. Returns this process's end of the socket."""
        self._runs = True
        return self.end

    def how_it_died(self) -> str:
        return describe_exit(self._process.wait(KILL_S))

    def close(self) -> None:
        """End the process and all of its nodes. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.end.close()
        if not self._runs:
            self._process.kill()  # it may still be importing, and has no nodes
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
