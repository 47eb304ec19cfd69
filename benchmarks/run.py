"""``make bench``: the cost of the framework, each row as a ratio to a plain PyTorch loop in the same run.

    python benchmarks/run.py [--json FILE] [--only WORD]

Machines are noisy: only ratios within one run are meaningful. Measurements of each row alternate with those
of its baseline. It prints the median of the ratios, and the medians of both sides."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from apart import answer
from baselines import evaluating, loop
from figures import Row, report
from gossamer import Experiment, run
from gossamer.cores import cores
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.malloc import keep_freed_memory
from gossamer.learning.mixing import Sum, allow_compiled_loops, mix_rows
from gossamer.learning.parameters import initial_model
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.messages.tags import Model
from gossamer.results.observer import Observer
from gossamer.runtime.setup import prepare
from gossamer.topology import Graph
from machine import plain_steps
from stubs import images, no_compute

REPEATS = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--only", default="", help="rows whose name has this word")
    arguments = parser.parse_args()
    groups = (training, asynchronous, scaling, mixing, evaluation, overhead, two_cores, start_up)
    report(chain.from_iterable(measure(arguments.only) for measure in groups), arguments.json)


def experiment(task: dict[str, Any], nodes: int, batch_size: int, rounds: int, **changes: Any) -> Experiment:
    """D-PSGD with one step per round, a random 5-regular graph and no evaluation."""
    return Experiment.of(
        {
            "name": "bench",
            "nodes": nodes,
            "task": task,
            "topology": {"name": "random-regular", "degree": 5},
            "algorithm": {"name": "d-psgd"},
            "optimizer": {"name": "sgd", "lr": 0.01},
            "batch_size": batch_size,
            "evaluation": {"every_rounds": None},
            "stop": {"rounds": rounds},
            **changes,
        }
    )


def synthetic(model: str | dict[str, Any], channels: int, size: int, samples: int) -> dict[str, Any]:
    """Random images; the figures do not depend on their content."""
    return {"name": "stubs:images", "model": model, "channels": channels, "size": size, "samples": samples}


def seconds_of(settings: Experiment, observer: Observer | None = None) -> float:
    """Seconds of one whole run, without loading and reporting."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = run(settings, folder, observer=observer).wall_s
    assert seconds is not None
    return seconds


def against(name: str, work: int, ours: Callable[[], float], theirs: Callable[[], float]) -> Row:
    """One row: node-rounds per second of both, and the median of their ratios."""
    pairs = [(ours(), theirs()) for _ in range(REPEATS)]
    return {
        "row": name,
        "node_rounds_per_s": work / statistics.median(mine for mine, _ in pairs),
        "baseline_node_rounds_per_s": work / statistics.median(other for _, other in pairs),
        "ratio": statistics.median(other / mine for mine, other in pairs),
    }


def training(only: str) -> Iterator[Row]:
    """Whole runs against the loop."""
    mlp = {"name": "mlp", "hidden": [128]}
    cases = [
        ("GN-LeNet 3x32x32, 64 nodes, batch 8", ("gn-lenet", 3, 32), 64, 8, 20, False, cores()),
        ("MLP 784-128-10, 100 nodes, batch 16", (mlp, 1, 28), 100, 16, 60, True, 1),
        ("logistic 784-10, 100 nodes, batch 16", ("logistic", 1, 28), 100, 16, 100, True, 1),
        ("logistic 784-10, 4096 nodes, batch 8", ("logistic", 1, 28), 4096, 8, 8, True, cores()),
        ("LeNet-5 28x28, 100 nodes, batch 16", ("lenet5", 1, 28), 100, 16, 20, True, 1),
    ]
    for name, shape, nodes, batch, rounds, mixes, threads in cases:
        if only in name:
            samples = 100 * nodes if nodes < 1000 else 16 * nodes
            settings = experiment(synthetic(*shape, samples), nodes, batch, rounds)
            baseline = loop(prepare(settings), rounds, mixing=mixes, threads=threads)
            yield against(name, nodes * rounds, lambda d=settings: seconds_of(d), baseline)  # type: ignore[misc]


def asynchronous(only: str) -> Iterator[Row]:
    """Nodes with unequal step times and no barrier, against a synchronous run of the same length."""
    name = "asynchronous gossip, MLP, 256 nodes"
    if only not in name:
        return
    task, nodes, rounds = synthetic("mlp", 1, 28, 25600), 256, 30
    compute = {"name": "log-normal", "median_seconds": 0.01, "sigma": 0.3}
    unsynchronized = experiment(task, nodes, 16, rounds, algorithm={"name": "stubs:Push"}, compute=compute)
    synchronous = experiment(task, nodes, 16, rounds)
    yield against(name, nodes * rounds, lambda: seconds_of(unsynchronized), lambda: seconds_of(synchronous))


def scaling(only: str) -> Iterator[Row]:
    """Cost of a node-round as the number of nodes grows tenfold, each size in a separate process: from the
    second round on, and for the whole run, whose first round allocates all memory."""
    cases = [("gn-lenet", 3, 32, 1000, 3), ("logistic", 1, 28, 10_000, 4)]
    for model, channels, size, nodes, rounds in cases:
        name = f"{model}, {nodes} to {10 * nodes} nodes"
        if only not in name:
            continue
        calls = (f"run.print_cost({model!r}, {channels}, {size}, {n}, {rounds})" for n in (nodes, 10 * nodes))
        small, large = (answer(f"import run; {call}") for call in calls)
        yield {
            "row": name,
            "microseconds_per_node_round": small["us"],
            "of_ten_times_as_many": large["us"],
            "ratio": large["us"] / small["us"],
            "whole_run": small["whole_us"],
            "whole_run_of_ten_times_as_many": large["whole_us"],
            "peak_GiB": large["peak_GiB"],
        }


def print_cost(model: str, channels: int, size: int, nodes: int, rounds: int) -> None:
    """One run in this process: its microseconds per node-round, and the peak of its memory. Modules and
    compiled loops are loaded beforehand, because their cost would weigh more at the small size."""
    seconds_of(experiment(synthetic(model, channels, size, 640), 64, 8, 2))
    mixing_of(64, 1000, 1)
    settings = experiment(synthetic(model, channels, size, 10 * nodes), nodes, 8, rounds)
    progress = Progress()
    seconds = seconds_of(settings, progress)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = {
        "us": progress.node_round_s(nodes) * 1e6,
        "whole_us": seconds / (nodes * rounds) * 1e6,
        "peak_GiB": peak,
    }
    print(json.dumps(figures))


class Progress(Observer):
    """Records the number of completed node-rounds over time."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, float]] = []

    def progress(self, rounds: int, time_s: float) -> None:
        self._marks.append((rounds, time.perf_counter()))

    def node_round_s(self, nodes: int) -> float:
        """Seconds per node-round from the second round on. Its two marks are equally far before the ends of rounds."""
        (first, begun), (last, ended) = max(mark for mark in self._marks if mark[0] <= nodes), self._marks[-1]
        return (ended - begun) / (last - first)


def mixing(only: str) -> Iterator[Row]:
    """Mixing alone against one copy of the same matrix with the same number of threads."""
    for nodes, length in ((1024, 89_834), (100, 101_770), (4096, 7850)):
        for threads in dict.fromkeys((1, cores())):
            name = f"mixing alone, {nodes} x {length}, degree 5, {threads} threads"
            if only in name:
                yield {"row": name, **mixing_of(nodes, length, threads)}


def mixing_of(nodes: int, length: int, threads: int, device: str = "cpu") -> Row:
    """Seconds of the sums of all nodes of a 5-regular graph, and of a copy, measured alternately."""
    keep_freed_memory()
    allow_compiled_loops()
    graph: Graph = prepare(no_compute(nodes, 1)).topology.graph(0)
    rows, workers = Rows(length, device), ThreadPool(threads)
    vectors = [rows.fresh().normal_() for _ in range(nodes)]
    sums = [Sum([vectors[i], *(vectors[j] for j in graph.neighbors(i))], [1 / 6] * 6) for i in range(nodes)]
    results = [rows.fresh() for _ in range(nodes)]
    source = torch.randn(nodes, length, device=device)
    target = torch.empty_like(source)
    while mix_rows(sums, results, workers) != "together" and device == "cpu":
        pass  # until the compiled loops have been loaded
    finish = (lambda: None) if device == "cpu" else torch.cuda.synchronize

    def timed(call: Callable[[], object], torch_threads: int) -> float:
        torch.set_num_threads(torch_threads)
        finish()
        start = time.perf_counter()
        call()
        finish()
        return time.perf_counter() - start

    pairs = [
        (
            timed(lambda: mix_rows(sums, results, workers), 1),
            timed(lambda: target.copy_(source), threads),
        )
        for _ in range(12)
    ][2:]
    workers.close()
    return {
        "seconds": statistics.median(adding for adding, _ in pairs),
        "copy_seconds": statistics.median(copying for _, copying in pairs),
        "ratio": statistics.median(adding / copying for adding, copying in pairs),
    }


def evaluation(only: str) -> Iterator[Row]:
    """Evaluating all nodes on a thousand samples, against one module per node, on all cores."""
    for model, channels, size, nodes in (("logistic", 1, 28, 1024), ("mlp", 1, 28, 256)):
        name = f"evaluation of {nodes} nodes, {model} {size}x{size}, 1000 samples"
        if only not in name:
            continue
        task = images(model, channels, size, 1000)
        task = replace(task, test=task.train)
        start = initial_model(task.model, 1)
        rows, workers = Rows(len(start.parameters)), ThreadPool()
        models = [
            Model(rows.fresh().normal_(std=0.01).add_(start.parameters), start.buffers) for _ in range(nodes)
        ]
        evaluator = Evaluator(task, 1, threads=workers, rows=rows)
        torch.set_num_threads(1)
        evaluator.test_each(models)
        baseline = evaluating(task, nodes)

        def ours(evaluate: Evaluator = evaluator, models: list[Model] = models) -> float:
            torch.set_num_threads(1)
            start = time.perf_counter()
            evaluate.test_each(models)
            return time.perf_counter() - start

        yield against(name, nodes, ours, baseline)
        workers.close()


def overhead(only: str) -> Iterator[Row]:
    """Wall time of a node-round without computation: events, messages and mixing of tiny vectors."""
    nodes, rounds = 1000, 20
    name = f"engine alone, {nodes} nodes, five messages each"
    if only not in name:
        return
    seconds = [seconds_of(no_compute(nodes, rounds)) for _ in range(REPEATS)]
    yield {
        "row": name,
        "microseconds_per_node_round": statistics.median(seconds) / (nodes * rounds) * 1e6,
    }


def two_cores(only: str) -> Iterator[Row]:
    """All cores against one worker with one thread."""
    name = f"{cores()} cores against one, GN-LeNet, 64 nodes"
    if only not in name:
        return
    task, nodes, rounds = synthetic("gn-lenet", 3, 32, 6400), 64, 20
    parallel, single = (
        experiment(task, nodes, 8, rounds, engine={"trainer": "sequential", "workers": workers})
        for workers in (None, 1)
    )
    row = against(name, nodes * rounds, lambda: seconds_of(parallel), lambda: seconds_of(single))
    (one_core, _), (all_cores, _) = (plain_steps(count, 400, 8, tuned=False) for count in (1, cores()))
    yield {**row, "ratio_of_plain_processes": all_cores / one_core}


def start_up(only: str) -> Iterator[Row]:
    """Seconds of whole commands."""
    gossamer = str(Path(sys.executable).with_name("gossamer"))
    quickstart = str(Path(__file__).parent.parent / "experiments" / "quickstart.yaml")
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "gossamer --help": [gossamer, "--help"],
            "run to its first round on digits": [
                gossamer,
                "run",
                quickstart,
                "--set",
                "stop.rounds=1",
                "-q",
                "--out",
                folder,
            ],
            "gossamer demo": [gossamer, "demo", "--quiet", "--out", folder],
        }
        for name, command in cases.items():
            if only in name:
                taken = []
                for _ in range(REPEATS):
                    start = time.perf_counter()
                    subprocess.run(command, check=True, capture_output=True)
                    taken.append(time.perf_counter() - start)
                yield {"row": name, "seconds": statistics.median(taken)}


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    started = time.perf_counter()
    main()
    print(f"took {time.perf_counter() - started:.0f} s")
