"""Sweeps of runs that take a tenth of a second, and algorithms that fail, die, or stop the sweep."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from gossamer import Node, Sweep, run_sweep
from gossamer.algorithms import DPSGD
from gossamer.sweep.execute import SweepOutcome

TINY: dict[str, Any] = {
    "nodes": 4,
    "task": {"name": "least-squares", "samples": 16, "features": 3, "test_samples": 20},
    "algorithm": {"name": "d-psgd"},
    "batch_size": "full",
    "evaluation": {"every_rounds": 2},
    "stop": {"rounds": 2},
    "engine": {"name": "simulate", "trainer": "sequential", "workers": 1},
}


def make_sweep(out: Path, **fields: Any) -> Sweep:
    """A sweep over :data:`TINY`; ``base`` changes some of its fields."""
    base = {**TINY, **fields.pop("base", {})}
    return Sweep.of({"name": "small", "base": base, **fields}, out=out)


HERE = ("--workers", "sweeps:one_thread")
"""Run a sweep in a thread of this process, without a new process that would import torch."""


def one_thread() -> Executor:
    """An executor for the command line."""
    return ThreadPoolExecutor(1)


def run_here(sweep: Sweep, **options: Any) -> SweepOutcome:
    """Run a sweep in a thread of this process."""
    with one_thread() as thread:
        return run_sweep(sweep, thread, **options)


class Fails(DPSGD):
    """Fails in its first round while the file exists."""

    while_there: str

    async def run(self, node: Node) -> None:
        if node.rank == 1 and Path(self.while_there).exists():
            await node.sleep(0.05)
            raise ValueError("the second node has had enough")
        await super().run(node)


class Dies(DPSGD):
    """Kills its process once; ``once`` is a file that marks this."""

    once: str

    async def run(self, node: Node) -> None:
        if node.rank == 0 and not Path(self.once).exists():
            Path(self.once).touch()
            await node.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        await super().run(node)


class AsksForTheEnd(DPSGD):
    """Signals the sweep to stop, and runs until it is stopped; later runs are ordinary.

    Args:
        asked: a file that marks the signal.
        pid: the process of the sweep, which gets the signal when ``runs`` runs have started.
    """

    asked: str
    pid: int
    runs: int = 1

    async def run(self, node: Node) -> None:
        asked = Path(self.asked)
        if node.rank == 0 and not asked.exists():
            Path(f"{asked}-by-{os.getpid()}").touch()
            if len(workers(asked)) == self.runs:
                with suppress(FileExistsError):  # a second signal would interrupt at once
                    asked.touch(exist_ok=False)
                    os.kill(self.pid, signal.SIGTERM)
            while True:
                await node.sleep(1.0)
        await super().run(node)


class WaitsToBeSeen(DPSGD):
    """Begins its first round when a file exists."""

    seen: str

    async def run(self, node: Node) -> None:
        while not Path(self.seen).exists():
            time.sleep(0.02)
            await node.sleep(1.0)
        await super().run(node)


class Meets(DPSGD):
    """Begins its first round when runs of several processes have begun; ``folder`` has a file for each."""

    folder: str
    processes: int

    async def run(self, node: Node) -> None:
        Path(self.folder, str(os.getpid())).touch()
        while len(os.listdir(self.folder)) < self.processes:  # noqa: PTH208
            time.sleep(0.02)
        await super().run(node)


def workers(flag: Path) -> list[int]:
    """The processes in which an :class:`AsksForTheEnd` has started."""
    return [int(path.name.rpartition("-")[2]) for path in flag.parent.glob(f"{flag.name}-by-*")]
