"""The simulator on a GPU. Tests that need one are skipped by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import Experiment
from gossamer.runtime.simulate.simulation import _repeatable

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
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "divshare", "fraction": 0.3}},
        {"aggregator": {"name": "deviation-mean"}},
        {"codec": {"name": "top-k", "fraction": 0.2}, "gather": {"missing": "renormalize"}},
    ],
)
def test_a_run_on_a_gpu_repeats_its_bits(tmp_path: Path, changes: dict[str, Any]) -> None:
    engine = {"trainer": "sequential", "device": "cuda"}
    first, again = (final(tmp_path / str(k), **changes, engine=engine) for k in range(2))
    assert torch.equal(first, again)


def test_settings_for_a_gpu_last_as_long_as_the_run() -> None:
    def settings() -> list[Any]:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        filling = torch.utils.deterministic.fill_uninitialized_memory
        kernels = [cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic]
        return [matmul.allow_tf32, filling, torch.get_deterministic_debug_mode(), *kernels]

    before = settings()
    with pytest.raises(KeyError), _repeatable():
        assert settings() == [False, False, 1, False, False, True]
        raise KeyError
    assert settings() == before


@needs_gpu
def test_launches_do_not_grow_with_the_number_of_nodes(tmp_path: Path) -> None:
    def launches(nodes: int) -> int:
        changes = {"nodes": nodes, "evaluation": {"every_rounds": None}}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            final(tmp_path / str(nodes), **changes, engine={"trainer": "batched", "device": "cuda"})
        return sum(event.count for event in profile.key_averages())

    launches(8)
    assert launches(256) < 2 * launches(32)
