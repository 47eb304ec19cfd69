"""Run schedules for a while, or one of them again: ``python -m chaos`` with ``tests`` on the import path (``make chaos``)."""

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
Result = tuple[int, list[str]]  # a seed, and the violations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this schedule alone, and print it")
    parser.add_argument(
        "--engine", choices=["simulate", "processes"], help="one engine (default: both, in turn)"
    )
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="begin with this seed")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    options = parser.parse_args()
    engines = [options.engine] if options.engine else ["simulate", "processes"]
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unmounts file systems
    # In memory: the speed of the disk is not under test.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=memory if memory.is_dir() else None) as folder:
        out, violated = Path(folder), False
        for engine in engines:
            if options.seed is None:
                deadline = time.monotonic() + options.seconds / len(engines)
                run = _simulated if engine == "simulate" else _real
                violated |= _report(engine, run(options.first, deadline, out))
            else:
                print(f"{engine}: {draw(options.seed)}")
                lines = (simulated if engine == "simulate" else real).check(draw(options.seed), out / "run")
                print(*(lines or ["nothing is violated"]), sep="\n")
                violated |= bool(lines)
        FORKER.close()
    return int(violated)


def _report(engine: str, runs: Iterable[Result]) -> bool:
    """Print the number of schedules by kind of disturbance, and the violations; tell whether there are any."""
    start, total, kinds, violated = time.monotonic(), 0, Counter[str](), []
    for seed, lines in runs:
        schedule, total = draw(seed), total + 1
        kinds.update(
            schedule.kinds | {item.outside for item in schedule.disturbances if item.outside} or {"nothing"}
        )
        kinds["stop and resume"] += schedule.stopped_at is not None
        if lines:
            violated.append((seed, lines))
            print(f"{engine}, seed {seed}: {lines[0]}", flush=True)
    minutes = (time.monotonic() - start) / 60
    print(f"{engine}: {total} schedules, {total / minutes:.0f} a minute, {len(violated)} with violations")
    print("  " + ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    for seed, lines in violated:
        command = f"PYTHONPATH=tests {sys.executable} -m chaos --engine {engine} --seed {seed}"
        print(f"  {command}", *lines, sep="\n    ")
    return bool(violated)


def _simulated(first: int, deadline: float, out: Path) -> Iterator[Result]:
    """Simulate schedules on all cores."""
    starts = count(first, CHUNK)
    with ProcessPoolExecutor(cores(), get_context("fork")) as pool:  # forks need no imports
        running = {pool.submit(_chunk, next(starts), out) for _ in range(2 * cores())}
        while running:
            running.remove(done := next(as_completed(running)))
            if time.monotonic() < deadline:
                running.add(pool.submit(_chunk, next(starts), out))
            yield from done.result()


def _chunk(first: int, out: Path) -> list[Result]:
    results = [(seed, simulated.check(draw(seed), out / str(seed))) for seed in range(first, first + CHUNK)]
    gc.collect()  # each run reserves address space, which thousands of runs would exhaust
    return results


def _real(first: int, deadline: float, out: Path) -> Iterator[Result]:
    """Run schedules as real processes, one after the other, since their times are real."""
    for seed in count(first):
        if time.monotonic() > deadline:
            return
        yield seed, real.check(draw(seed), out / str(seed))


if __name__ == "__main__":
    sys.exit(main())
