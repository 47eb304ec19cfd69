"""Sweeps of runs that take a tenth of a second, and algorithms that fail, die, or ask for the end."""

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
"""Run a sweep in a thread of this process, which starts no process that would import torch."""


def one_thread() -> Executor:
    """An executor for the command line."""
    return ThreadPoolExecutor(1)


def run_here(sweep: Sweep, **options: Any) -> SweepOutcome:
    """Run a sweep in a thread of this process."""
    with one_thread() as thread:
        return run_sweep(sweep, thread, **options)


class Fails(DPSGD):
    """Fails in its second round while the file is there."""

    while_there: str

    async def run(self, node: Node) -> None:
        if node.rank == 1 and Path(self.while_there).exists():
            await node.sleep(0.05)
            raise ValueError("the second node has had enough")
        await super().run(node)


class Dies(DPSGD):
    """Its process is killed, the first time."""

    once: str

    async def run(self, node: Node) -> None:
        if node.rank == 0 and not Path(self.once).exists():
            Path(self.once).touch()
            await node.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        await super().run(node)


class AsksForTheEnd(DPSGD):
    """Asks for the end of the sweep, and goes on until it is stopped; all later runs are ordinary.

    Args:
        asked: a file that is there once it has been asked for.
        of: the process that runs the sweep, which is asked once ``least`` runs are under way.
    """

    asked: str
    pid: int
    runs: int = 1

    async def run(self, node: Node) -> None:
        asked = Path(self.asked)
        if node.rank == 0 and not asked.exists():
            Path(f"{asked}-by-{os.getpid()}").touch()
            if len(workers(asked)) == self.runs:
                with suppress(FileExistsError):  # one signal: a second one would interrupt at once
                    asked.touch(exist_ok=False)
                    os.kill(self.pid, signal.SIGTERM)
            while True:
                await node.sleep(1.0)
        await super().run(node)


class WaitsToBeSeen(DPSGD):
    """Begins its first round once a file is there."""

    seen: str

    async def run(self, node: Node) -> None:
        while not Path(self.seen).exists():
            time.sleep(0.02)
            await node.sleep(1.0)
        await super().run(node)


def workers(flag: Path) -> list[int]:
    """The processes in which an :class:`AsksForTheEnd` was under way."""
    return [int(path.name.rpartition("-")[2]) for path in flag.parent.glob(f"{flag.name}-by-*")]
