"""The trainer that torch.compile makes, in processes of their own: it translates no tests' checks of shapes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gossamer

EXPERIMENT = """
name: compiled
nodes: 4
task: {name: digits, model: {name: mlp, hidden: [16]}}
topology: {name: ring}
algorithm: {name: d-psgd}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
evaluation: {every_rounds: null}
stop: {rounds: 20}
engine: {name: simulate, workers: 2}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: g++")
def test_compiled_steps_repeat_their_bits_and_are_those_of_the_sequential_trainer(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    first, again, sequential = (
        parameters(tmp_path, out, trainer)
        for out, trainer in (("first", "compiled"), ("again", "compiled"), ("sequential", "sequential"))
    )
    assert torch.equal(first, again)
    torch.testing.assert_close(first, sequential, rtol=1e-5, atol=1e-6)


def parameters(folder: Path, out: str, trainer: str) -> torch.Tensor:
    """Of all nodes, at the end."""
    command = ["run", "experiment.yaml", "--out", out, "--set", f"engine.trainer={trainer}"]
    subprocess.run([sys.executable, "-m", "gossamer", *command], cwd=folder, check=True, timeout=300)
    found = gossamer.load_run(next((folder / out).iterdir())).parameters
    assert found is not None
    return found
