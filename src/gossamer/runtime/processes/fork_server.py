"""The fork server, as its launcher sees it. It imports torch and all else that nodes need, which takes seconds; so it can be
started before its launcher does the same, for which this module imports next to nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.protocol import Prepare, Run, ToLauncher
from gossamer.runtime.processes.system.death import describe_exit
from gossamer.runtime.processes.system.shared_file import shared_file

KILL_S = 10.0
"""Seconds that it has to end by itself."""


@dataclass(frozen=True)
class Listen:
    """Where workers join a run.

    Args:
        address: "host:port"; nodes of all workers must reach each other, and workers this address.
        token: at least 16 characters that the coordinator and the workers know, and nobody else.
        min_workers: how many must have joined before the run starts; it also waits for a slot for each node.
        executor: starts that many workers: "ray", or "module:factory" of a concurrent.futures executor; None: others do.
    """

    address: str
    token: str
    min_workers: int = 1
    executor: str | None = None


class ForkServer:
    """The process from which the nodes of one run are forked. It dies with this one.

    Attributes:
        channel: our end of the channel to it.
        memory: descriptor of the file that all processes of the run share.
    """

    def __init__(self) -> None:
        self.memory = shared_file()
        ours, theirs = socket.socketpair()
        self.channel: Channel[ToLauncher] = Channel(ours, ToLauncher)
        self._idle, self._begun, self._closed = True, False, False
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gossamer.runtime.processes.coordinator",
                str(theirs.fileno()),
                str(self.memory),
                str(os.getpid()),
            ],
            pass_fds=(theirs.fileno(), self.memory),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is this process's to handle
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()

    def begin(self, experiment: str, listen: Listen | None = None) -> None:
        """Have it prepare an experiment (YAML); it answers on the channel. With ``listen``, nodes run on workers that join.

        Raises:
            ValueError: if it was used before, or is closed.
        """
        if self._begun or self._closed:
            raise ValueError("this fork server has served its run, or is closed; accepted: a new one")
        self._begun = True
        if listen is None:
            self.channel.send(Prepare(experiment))
        else:
            self.channel.send(Prepare(experiment, listen.address, listen.token, listen.min_workers))

    def fork(self, folder: str, *, resume: bool) -> None:
        """Have it run what it has prepared.

        Args:
            folder: the run's.
            resume: whether from its newest checkpoint.
        """
        self._idle = False
        self.channel.send(Run(folder, resume))

    def how_it_died(self) -> str:
        """How it ended, in words, once the channel says that it has."""
        code = self._process.wait(KILL_S)
        return describe_exit(code << 8 if code >= 0 else -code)

    def close(self) -> None:
        """End it, and with it every node; a second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self.channel.close()
        if self._idle:
            self._process.kill()  # in the middle of its imports, perhaps, or of a step; it has no nodes
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self.memory)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
