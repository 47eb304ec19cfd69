"""Workers as separate processes that join within a second (see :mod:`forked`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from forked import FORKER, Child

TOKEN = "a token for the tests"


def free_port() -> int:
    """A free loopback port outside the range of ephemeral ports."""
    for port in range(10_000 + os.getpid() % 20_000, 32_768):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port")


class Fleet:
    """Starts workers.

    Args:
        folder: where their output goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: dict[int, Child] = {}
        self._outputs: dict[int, Path] = {}

    def start(self, address: str, *options: str, slots: int = 4, token: str = TOKEN, space: str = "") -> int:
        """Start a worker; returns its process id."""
        arguments = ["worker", address, "--join", token, "--slots", str(slots), *options]
        return self.run(arguments, space)

    def run(self, arguments: Sequence[str], space: str = "") -> int:
        """Run gossamer, in network namespace ``space`` if given; returns the process id."""
        output = self.folder / f"output-{len(self._started) + 1}.txt"
        child = FORKER.program(*arguments, output=output, space=space)
        self._started[child.pid], self._outputs[child.pid] = child, output
        return child.pid

    def said(self) -> str:
        """The output of all workers."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("output-*.txt")))

    def last_line(self, pid: int) -> str:
        """The last line that one has printed."""
        return self._outputs[pid].read_text().splitlines()[-1]

    def wait(self, pid: int) -> int:
        """Wait for the end of a worker; returns its exit code."""
        return self._started[pid].wait()

    def kill(self, pid: int) -> None:
        """Kill a worker."""
        self._started[pid].kill()

    def close(self) -> None:
        """End all workers."""
        for child in self._started.values():
            child.end()
