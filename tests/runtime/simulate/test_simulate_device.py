"""The simulator on a GPU. Tests that need one are skipped without it; others use torch's device ``meta``, whose tensors have
no values: reading one is an error, and so is mixing devices in an operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import Experiment, Model, numerics
from gossamer.algorithms.divshare import assign_fragments
from gossamer.config.registry import build, names
from gossamer.learning import Aggregator, Optimizer
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.parameters import initial_model
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import BatchedTrainer, SequentialTrainer, Trainer, TrainJob
from gossamer.tasks import load_task

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
def test_gpu_run_matches_cpu_run(tmp_path: Path, trainer: str) -> None:
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
        {"codec": {"name": "wavelet"}},
        {"algorithm": {"name": "all-reduce"}, "codec": {"name": "quantize"}},
        {"algorithm": {"name": "influence-corrected"}, "topology": {"name": "star", "weights": "uniform"}},
    ],
)
def test_gpu_run_is_bitwise_repeatable(tmp_path: Path, changes: dict[str, Any]) -> None:
    engine = {"trainer": "sequential", "device": "cuda"}
    first, again = (final(tmp_path / str(k), **changes, engine=engine) for k in range(2))
    assert torch.equal(first, again)


def on_meta(task: gossamer.Task) -> Model:
    return Model(*(vector.to("meta") for vector in initial_model(task.model, 1)))


@pytest.fixture(scope="module")
def task() -> gossamer.Task:
    return load_task(build("task", MLP["task"]), None, 1)


def read_back_by(raised: pytest.ExceptionInfo[NotImplementedError]) -> str:
    """The statement in gossamer that asked for a value."""
    return str([entry for entry in raised.traceback if "gossamer" in entry.path.parts][-1].statement)


@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
@pytest.mark.parametrize("name", names("optimizer"))
def test_training_reads_nothing_back_before_its_losses(
    task: gossamer.Task, kind: type[Trainer], name: str
) -> None:
    start = on_meta(task)
    optimizer = build("optimizer", {"name": name, "lr": 0.1, "clip_norm": 1.0})
    assert isinstance(optimizer, Optimizer)
    trainer = kind(task, optimizer, Rows(len(start.parameters), "meta"))
    batches = [torch.arange(4), torch.arange(2, 6)]
    jobs = [TrainJob(start, batches, 0.1, optimizer.init(start.parameters), 1) for _ in range(3)]
    with pytest.raises(NotImplementedError) as raised:
        trainer.train(jobs)
    assert "torch.stack" in read_back_by(raised)


def test_evaluation_reads_back_only_its_totals(task: gossamer.Task) -> None:
    model = on_meta(task)
    evaluator = Evaluator(task, 1, device="meta", rows=Rows(len(model.parameters), "meta"))
    for evaluate in (
        evaluator.test,
        lambda model: evaluator._together([model] * 5, "test", means_together=True),
        lambda model: evaluator._together([model] * 5, "test", means_together=False),
    ):
        with pytest.raises(NotImplementedError) as raised:
            evaluate(model)
        assert "totals.tolist()" in read_back_by(raised)


@pytest.mark.parametrize(
    "name", ["mean", "deviation-mean", "coordinate-mean", "trimmed-mean", "median", "krum"]
)
def test_aggregators_stay_on_the_device(name: str) -> None:
    parameters = {"trimmed-mean": {"count": 1}, "krum": {"byzantine": 0}}.get(name, {})
    aggregator = build("aggregator", {"name": name, **parameters})
    assert isinstance(aggregator, Aggregator)
    own, *others = (Model(torch.ones(6, device="meta"), torch.ones(2, device="meta")) for _ in range(4))
    mixed = aggregator.aggregate_models(own, others, [0.2, 0.3, 0.1], 0.4)
    assert all(vector.device.type == "meta" for vector in mixed)


def test_fragments_stay_on_the_device() -> None:
    assignment = assign_fragments(1, (5, 6), 3, torch.device("meta"))
    heard = torch.ones(assignment.sizes[0], device="meta")
    assert assignment.mean(torch.ones(11, device="meta"), [(0, heard)]).device.type == "meta"


def test_gpu_settings_are_restored_after_the_run() -> None:
    def settings() -> list[Any]:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        filling = torch.utils.deterministic.fill_uninitialized_memory
        kernels = [cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic]
        return [matmul.allow_tf32, filling, torch.get_deterministic_debug_mode(), *kernels]

    before = settings()
    with pytest.raises(KeyError), numerics.repeatable("cuda"):
        assert settings() == [False, False, 1, False, False, True]
        raise KeyError
    assert settings() == before


@needs_gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_kernel_launches_barely_grow_with_the_number_of_nodes(tmp_path: Path) -> None:
    """A kernel copies about a hundred vectors, so more nodes need a few more kernels."""

    def launches(nodes: int, rounds: int) -> int:
        changes = {"nodes": nodes, "evaluation": {"every_rounds": None}, "stop": {"rounds": rounds}}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            final(tmp_path / f"{nodes}-{rounds}", **changes, engine={"trainer": "batched", "device": "cuda"})
        return sum(event.count for event in profile.key_averages() if "Launch" in event.key)

    def of_five_rounds(nodes: int) -> int:
        return launches(nodes, 10) - launches(nodes, 5)

    launches(8, 5)
    few, many = of_five_rounds(32), of_five_rounds(256)
    assert few > 0
    assert many - few < 5 * (256 - 32) / 2
