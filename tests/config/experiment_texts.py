"""A full and a small experiment file."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gossamer import BadInput, Experiment

BASE = {"nodes": 4, "task": "digits", "algorithm": "d-psgd", "stop": {"rounds": 5}}
DESIGN = """
name: quickstart
seed: 1
nodes: 16
task: {name: digits}
partition: {name: dirichlet, alpha: 0.3}
topology: {name: random-regular, degree: 4}
algorithm: {name: d-psgd, local_steps: 5}
optimizer: {name: sgd, lr: 0.1}
batch_size: 16            # or "full"
initial: common           # or independent
compute: {name: constant, seconds_per_step: 0.01}
network: {name: uniform, latency_s: 0.001, bandwidth_mbps: 60}
evaluation: {every_rounds: 10, nodes: all, samples: 1000}
stop: {rounds: 100}       # and/or time_s, and/or target: {metric: test_accuracy, value: 0.9}
data_root: null
engine: {name: simulate, trainer: auto}
"""


def text(**changes: Any) -> str:
    """A small valid experiment file; omits fields whose value is ``...``."""
    fields = {name: value for name, value in {**BASE, **changes}.items() if value is not ...}
    return yaml.safe_dump(fields)


def refused(source: str, *overrides: str, engine: str | None = None) -> tuple[str, ...]:
    with pytest.raises(BadInput) as failure:
        Experiment.parse(source, overrides, engine)
    return failure.value.problems
