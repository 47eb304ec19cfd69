"""The processor time that all trials (first steps, evaluation, encoding) add to the set-up of a run on digits: medians of
five, kernels loaded.

python benchmarks/proof.py [--json FILE]"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from figures import Row, report
from gossamer import Experiment
from gossamer.learning.evaluation_metrics import EvaluationMetrics
from gossamer.runtime import setup

REPEATS = 5
CASES = [
    ("logistic", 16, "auto"),
    ("mlp", 16, "auto"),
    ("gn-lenet", 16, "auto"),
    ("proof:curved", 40, "auto"),
    ("mlp", 16, "sequential"),
    ("gn-lenet", 16, "sequential"),
    ("convnet", 16, "sequential"),
    ("resnet18", 16, "sequential"),
]
"""Model, nodes, trainer."""
UNTRIED = {
    "failure_of": None,
    "tried_metrics": (EvaluationMetrics({}, columns={}), []),
    "try_exchange": None,
    "_check_metric": None,
}
"""What the functions of the set-up that try something return, if they do nothing."""


def curved(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model that is batched."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, classes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    torch.set_num_threads(1)
    report(rows(), parser.parse_args().json)


def rows() -> Iterator[Row]:
    for model, nodes, trainer in CASES:
        experiment = Experiment.of(
            {
                "nodes": nodes,
                "task": {"name": "digits", "model": model},
                "algorithm": "d-psgd",
                "topology": "ring",
                "stop": {"rounds": 1},
                "codec": "float16",
                "engine": {"name": "simulate", "trainer": trainer},
            }
        )
        with_ms, without_ms = [], []
        for _ in range(1 + REPEATS):  # the first loads kernels
            with_ms.append(spent_ms(experiment))
            with ExitStack() as stack:
                for name, value in UNTRIED.items():
                    stack.enter_context(mock.patch.object(setup, name, return_value=value))
                without_ms.append(spent_ms(experiment))
        chosen = setup.prepare(experiment).trainer
        medians = [statistics.median(values[1:]) for values in (with_ms, without_ms)]
        yield {
            "row": f"{model}, {nodes} nodes, {chosen}",
            "with_ms": round(medians[0], 1),
            "without_ms": round(medians[1], 1),
        }


def spent_ms(experiment: Experiment) -> float:
    began = time.process_time()
    setup.prepare(experiment)
    return 1000 * (time.process_time() - began)


if __name__ == "__main__":
    main()
