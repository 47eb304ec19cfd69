"""``make bench``: what the framework costs, each row as a ratio to a plain PyTorch loop in the same run.

    python benchmarks/run.py [--json FILE]

Machines are noisy: only ratios within one run mean something. Each row is measured several times, in turns with its
baseline, and the median is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baselines import independent_loops
from gossamer import Experiment, run
from stubs import no_compute

REPEATS = 3


def simulated(experiment: Experiment) -> Callable[[], float]:
    """Seconds of one whole run without evaluation, loading and reporting left out."""

    def once() -> float:
        with tempfile.TemporaryDirectory() as folder:
            seconds = run(experiment, folder).wall_s
        assert seconds is not None
        return seconds

    return once


def mlp(nodes: int, rounds: int, trainer: str) -> Experiment:
    """D-PSGD on digits: one step a round, random 4-regular graph, no evaluation."""
    return Experiment.of(
        {
            "name": "bench",
            "nodes": nodes,
            "task": {"name": "digits"},
            "topology": {"name": "random-regular", "degree": 4},
            "algorithm": {"name": "d-psgd"},
            "optimizer": {"name": "sgd", "lr": 0.05},
            "batch_size": 16,
            "evaluation": {"every_rounds": None},
            "stop": {"rounds": rounds},
            "engine": {"name": "simulate", "trainer": trainer},
        }
    )


def ratio(
    row: str, nodes: int, rounds: int, measured: Callable[[], float], baseline: Callable[[], float]
) -> Any:
    """One row: node-rounds per second of both, and the median of their ratios."""
    pairs = [(measured(), baseline()) for _ in range(REPEATS)]
    work = nodes * rounds
    return {
        "row": row,
        "node_rounds_per_s": work / statistics.median(ours for ours, _ in pairs),
        "baseline_node_rounds_per_s": work / statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(theirs / ours for ours, theirs in pairs),
    }


def overhead(nodes: int, rounds: int) -> Any:
    """Wall time of a node-round whose computation is stubbed out: events, messages and mixing of tiny vectors."""
    experiment = no_compute(nodes, rounds)
    seconds = [simulated(experiment)() for _ in range(REPEATS)]
    return {
        "row": f"engine alone, {nodes} nodes, five messages each",
        "microseconds_per_node_round": statistics.median(seconds) / (nodes * rounds) * 1e6,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    nodes, rounds = 64, 100
    baseline = independent_loops(nodes, rounds)
    rows = [
        ratio(
            f"MLP on digits, {nodes} nodes, sequential",
            nodes,
            rounds,
            simulated(mlp(nodes, rounds, "sequential")),
            baseline,
        ),
        ratio(
            f"MLP on digits, {nodes} nodes, batched",
            nodes,
            rounds,
            simulated(mlp(nodes, rounds, "batched")),
            baseline,
        ),
        overhead(1000, 20),
    ]
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    for row in rows:
        print(
            "  ".join(
                f"{key}: {value:.4g}" if isinstance(value, float) else str(value)
                for key, value in row.items()
            )
        )
    print("  ".join(f"{key}: {value}" for key, value in machine.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"took {time.perf_counter() - started:.0f} s")
