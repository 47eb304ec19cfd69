"""One training step of many nodes by each trainer in turn: microseconds of CPU time per node, and wall time.

python benchmarks/trainers.py [--json FILE] [--only WORD]

The ratio compares the fused trainer with the best other one. Mixing and messages are excluded."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name

from figures import Row, report
from gossamer import Task
from gossamer.config.registry import build
from gossamer.cores import cores
from gossamer.learning.computation import trainer_of
from gossamer.learning.malloc import keep_freed_memory
from gossamer.learning.optimizer import SGD
from gossamer.learning.parameters import initial_model
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.learning.trainer import TrainJob
from gossamer.messages.tags import Model
from gossamer.tasks import model_factory

REPEATS, WARMUPS = 7, 2
# Model, image (channels, height and width), nodes, batch size.
CASES = [
    ("logistic", (1, 28), 100, 16),
    ("mlp", (1, 28), 100, 16),
    ("lenet5", (1, 28), 100, 16),
    ("gn-lenet", (3, 32), 8, 16),
    ("gn-lenet", (3, 32), 8, 8),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--only", default="", help="rows whose name has this word")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    report(rows(arguments.only), arguments.json)


def rows(only: str) -> Iterator[Row]:
    for threads in range(1, cores() + 1):
        for model, image, nodes, batch in CASES:
            name = f"{model} {image[1]}x{image[1]}, {nodes} nodes, batch {batch}, {threads} threads"
            if only in name:
                yield {"row": name, **measured(model, image, nodes, batch, threads)}


def measured(model: str, image: tuple[int, int], nodes: int, batch: int, threads: int) -> dict[str, Any]:
    """Medians of CPU and wall time. Every step starts where the previous one ended."""
    channels, size = image
    inputs, labels = torch.randn(6400, channels, size, size), torch.randint(10, (6400,))
    spec = {"name": "mlp", "hidden": [128]} if model == "mlp" else model
    create_model: Any = model_factory(build("model", spec), shape=(channels, size, size), classes=10)
    task = Task(create_model, (inputs, labels), (inputs[:10], labels[:10]), F.cross_entropy)
    names = ["sequential", "batched", "fused"] if model in ("logistic", "mlp") else ["sequential", "fused"]
    start = initial_model(task.model, 1)
    trainers, models, workers = {}, {}, ThreadPool(threads)
    for name in names:
        store = Rows(len(start.parameters))
        trainers[name] = trainer_of(name)(task, SGD(lr=0.01), store, workers)
        models[name] = [Model(store.store(start.parameters), start.buffers) for _ in range(nodes)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(WARMUPS + REPEATS):
        for name, trainer in trainers.items():
            jobs = [TrainJob(model, [torch.randint(6400, (batch,))], 0.01, {}, 0) for model in models[name]]
            cpu, wall = time.process_time(), time.perf_counter()
            results = trainer.train(jobs)
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
            models[name] = [result.model for result in results]
            del jobs, results
    workers.close()
    medians = {
        name: [statistics.median(column[WARMUPS:]) / nodes * 1e6 for column in zip(*runs, strict=True)]
        for name, runs in times.items()
    }
    figures = {f"{name}_cpu_us": cpu for name, (cpu, _) in medians.items()}
    figures |= {f"{name}_wall_us": wall for name, (_, wall) in medians.items()}
    *others, fused = medians.values()
    ratios = [min(other[k] for other in others) / fused[k] for k in range(2)]
    return {**figures, "cpu_ratio": ratios[0], "wall_ratio": ratios[1]}


if __name__ == "__main__":
    main()
