"""The limits of the machine, to which other figures are compared."""

from __future__ import annotations

import json
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from apart import answers
from gossamer.cores import cores

SIZE = 1024


def describe() -> dict[str, Any]:
    """Cores, versions, and the roofline: arithmetic, memory, interpreter."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "GFLOP/s of one thread": _products(1),
        f"GFLOP/s of {cores()} threads": _products(cores()),
        "GB/s read and written by copy_": _copy(),
        "ns a turn of a Python loop": _turns(),
    }


def plain_steps(processes: int, steps: int, batch: int, *, tuned: bool) -> tuple[float, float]:
    """GN-LeNet steps of several single-threaded processes at once: no framework, no lock, nothing shared but
    the machine.

    Args:
        processes: number of processes.
        steps: measured steps of each process, after a warm-up.
        batch: samples per step.
        tuned: whether to use ``channels_last`` and an allocator that keeps freed memory.

    Returns:
        Steps per second of all processes, and milliseconds of CPU time per step.
    """
    rates, cpu_ms = zip(
        *answers(f"import machine; machine.train({steps}, {batch}, {tuned})", processes), strict=True
    )
    return sum(rates), statistics.mean(cpu_ms)


def train(steps: int, batch: int, tuned: bool) -> None:
    """Print steps per second, and milliseconds of CPU time per step; runs in a separate process."""
    from gossamer.learning.malloc import keep_freed_memory
    from gossamer.tasks.models import GNLeNet

    if tuned:
        keep_freed_memory()
    torch.set_num_threads(1)
    model = GNLeNet((3, 32, 32), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    if tuned:
        inputs = inputs.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(20):
        step()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    print(json.dumps([steps / (time.perf_counter() - start), 1e3 * (time.process_time() - cpu) / steps]))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _products(threads: int) -> float:
    torch.set_num_threads(1)
    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)

    def work() -> None:
        for _ in range(10):
            left @ right

    def all_threads() -> None:
        running = [threading.Thread(target=work) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    work()
    return threads * 10 * 2 * SIZE**3 / min(_seconds(all_threads) for _ in range(3)) / 1e9


def _copy() -> float:
    torch.set_num_threads(cores())
    source = torch.randn(256 << 18)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(_seconds(lambda: target.copy_(source)) for _ in range(4)) / 1e9


def _turns() -> float:
    def work() -> None:
        for number in range(1_000_000):
            number * number

    return min(_seconds(work) for _ in range(3)) * 1e3


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
