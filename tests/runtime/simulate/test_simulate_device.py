"""The simulator on a GPU. Tests that need one are skipped by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import Experiment

MLP: dict[str, Any] = {
    "nodes": 8,
    "task": {"name": "digits", "model": {"name": "mlp", "hidden": [12]}},
    "topology": {"name": "random-regular", "degree": 3},
    "algorithm": {"name": "d-psgd"},
    "batch_size": 8,
    "evaluation": {"every_rounds": 5},
    "stop": {"rounds": 5},
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: a run on a GPU")


def final(out: Path, **changes: Any) -> torch.Tensor:
    run = gossamer.run(Experiment.of({**MLP, **changes}), out)
    assert run.parameters is not None
    return run.parameters


@needs_gpu
@pytest.mark.parametrize("trainer", ["sequential", "batched"])
def test_a_run_on_a_gpu_is_the_run_on_the_cpu(tmp_path: Path, trainer: str) -> None:
    on_cpu = final(tmp_path / "cpu", engine={"trainer": trainer})
    on_gpu = final(tmp_path / "gpu", engine={"trainer": trainer, "device": "cuda"})
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-4, atol=1e-5)


@needs_gpu
def test_launches_do_not_grow_with_the_number_of_nodes(tmp_path: Path) -> None:
    def launches(nodes: int) -> int:
        changes = {"nodes": nodes, "evaluation": {"every_rounds": None}}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            final(tmp_path / str(nodes), **changes, engine={"trainer": "batched", "device": "cuda"})
        return sum(event.count for event in profile.key_averages())

    launches(8)
    assert launches(256) < 2 * launches(32)
