"""Runs schedules for a while, or one of them again: ``python -m chaos`` with ``tests`` on the import path (``make chaos``)."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import count
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import torch

from chaos import real, simulated
from chaos.schedule import draw
from forked import FORKER
from gossamer.cores import cores

CHUNK = 20
Found = tuple[int, list[str]]  # a seed, and the violations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this schedule alone, and print it")
    parser.add_argument(
        "--engine", choices=["simulate", "processes"], help="one engine (default: both, in turn)"
    )
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="begin with this seed")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    asked = parser.parse_args()
    engines = [asked.engine] if asked.engine else ["simulate", "processes"]
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # file systems are unmounted
    # In memory: what is tested is not how fast a disk is.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=memory if memory.is_dir() else None) as folder:
        out, violated = Path(folder), False
        for engine in engines:
            if asked.seed is None:
                deadline = time.monotonic() + asked.seconds / len(engines)
                run = _simulated if engine == "simulate" else _real
                violated |= _report(engine, run(asked.first, deadline, out))
            else:
                print(f"{engine}: {draw(asked.seed)}")
                found = (simulated if engine == "simulate" else real).check(draw(asked.seed), out / "run")
                print(*(found or ["nothing is violated"]), sep="\n")
                violated |= bool(found)
        FORKER.close()
    return int(violated)


def _report(engine: str, runs: Iterable[Found]) -> bool:
    """Print how many schedules were run, by what went wrong in them, and the violations; says whether there are any."""
    start, total, kinds, violated = time.monotonic(), 0, Counter[str](), []
    for seed, found in runs:
        schedule, total = draw(seed), total + 1
        kinds.update(
            schedule.kinds | {each.outside for each in schedule.disturbances if each.outside} or {"nothing"}
        )
        kinds["stop and resume"] += schedule.stopped_at is not None
        if found:
            violated.append((seed, found))
            print(f"{engine}, seed {seed}: {found[0]}", flush=True)
    minutes = (time.monotonic() - start) / 60
    print(f"{engine}: {total} schedules, {total / minutes:.0f} a minute, {len(violated)} with violations")
    print("  " + ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    for seed, found in violated:
        command = f"PYTHONPATH=tests {sys.executable} -m chaos --engine {engine} --seed {seed}"
        print(f"  {command}", *found, sep="\n    ")
    return bool(violated)


def _simulated(first: int, deadline: float, out: Path) -> Iterator[Found]:
    """Simulate schedules on all cores."""
    starts = count(first, CHUNK)
    with ProcessPoolExecutor(cores(), get_context("fork")) as pool:  # forks import nothing again
        running = {pool.submit(_chunk, next(starts), out) for _ in range(2 * cores())}
        while running:
            running.remove(done := next(as_completed(running)))
            if time.monotonic() < deadline:
                running.add(pool.submit(_chunk, next(starts), out))
            yield from done.result()


def _chunk(first: int, out: Path) -> list[Found]:
    found = [(seed, simulated.check(draw(seed), out / str(seed))) for seed in range(first, first + CHUNK)]
    gc.collect()  # each run has reserved address space, of which thousands would take all that there is
    return found


def _real(first: int, deadline: float, out: Path) -> Iterator[Found]:
    """Run schedules as real processes, one after the other, since their times are real."""
    for seed in count(first):
        if time.monotonic() > deadline:
            return
        yield seed, real.check(draw(seed), out / str(seed))


if __name__ == "__main__":
    sys.exit(main())
