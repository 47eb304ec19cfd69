"""What the machine can do at all: the figures that the others are to be read against."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gossamer.learning.workers import cores

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


def plain_steps_in_processes(steps: int) -> tuple[float, float]:
    """GN-LeNet steps a second of one process of one thread, and of one such process a core at once: no framework, no
    lock, nothing shared but the machine."""

    def together(count: int) -> float:
        code = f"import machine; machine.plain_steps({steps})"
        folder = Path(__file__).parent
        running = [
            subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        return sum(json.loads(process.communicate()[0]) for process in running)

    return together(1), together(cores())


def plain_steps(steps: int) -> None:
    """In a process of its own: print steps a second."""
    from gossamer.tasks.models import model_factory

    torch.set_num_threads(1)
    model = model_factory("gn-lenet", (3, 32, 32), 10, hidden=())()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(20):
        step()
    print(steps / _seconds(lambda: [step() for _ in range(steps)]))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _products(threads: int) -> float:
    torch.set_num_threads(1)
    one, other = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)

    def work() -> None:
        for _ in range(10):
            one @ other

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
