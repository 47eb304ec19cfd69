"""Many nodes on one machine: shared and private memory, and the limits of the machine."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
import torch

import gossamer
from gossamer import BadInput, Experiment, Run
from gossamer.cli import main
from gossamer.learning.batches import BatchStream
from gossamer.learning.malloc import keep_freed_memory, trim
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import SequentialTrainer, TrainJob
from gossamer.process_memory import available_bytes, private_bytes
from gossamer.runtime.processes.node_process import host
from gossamer.runtime.processes.node_process.host import ComputeResources
from gossamer.runtime.processes.system import SPARE_DESCRIPTORS, raise_descriptor_limit
from gossamer.runtime.setup import Setup, prepare

MIB = 2**20
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SETTINGS: dict[str, Any] = {
    "name": "many",
    "nodes": 4,
    "task": {"name": "least-squares", "features": 4, "samples": 512, "test_samples": 20},
    "topology": {"name": "random-regular", "degree": 3},
    "algorithm": "d-psgd",
    "evaluation": {"every_rounds": 2, "nodes": 2},
    "engine": {"name": "processes", "trainer": "sequential"},
    "stop": {"rounds": 2},
}
linux = pytest.mark.skipif(private_bytes() is None, reason="the system does not report private memory")


def experiment(**changes: Any) -> Experiment:
    return Experiment.of({**SETTINGS, **changes})


def play(out: Path, **changes: Any) -> Run:
    return gossamer.run(experiment(**changes), out)


def in_child(work: Callable[[], Any]) -> None:
    """Run a function in a fork, which must succeed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # a fork has none of its parent's threads
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


# --- private memory


@linux
def test_run_reports_private_memory_of_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described = tmp_path / "many.yaml"
    experiment().save(described)
    monkeypatch.setattr(
        "sys.argv", ["gossamer", "run", str(described), "--out", str(tmp_path), "--no-report"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    [folder] = (tmp_path / "many").iterdir()
    private = gossamer.load_run(folder).figures["private_bytes"]
    assert private is not None
    assert MIB < private["mean"] <= private["max"] < 100 * MIB
    mean, maximum = (private[name] / MIB for name in ("mean", "max"))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("private memory")]
    assert line.split(maxsplit=2)[2] == f"{mean:.1f} MiB per node, {maximum:.1f} at most"


def test_simulated_run_reports_no_private_memory(tmp_path: Path) -> None:
    assert (
        play(tmp_path, engine={"name": "simulate", "trainer": "sequential"}).figures["private_bytes"] is None
    )


@linux
def test_private_memory_follows_writes_and_releases() -> None:
    """Even if freed memory was kept for reuse, and its last part is still in use."""

    def work() -> None:
        keep_freed_memory()
        before = private_bytes()
        tensors = [torch.ones(16 * 1024) for _ in range(64 * 16)]  # 64 KiB each
        last = torch.ones(16 * 1024)
        taken = private_bytes()
        del tensors
        kept = private_bytes()
        trim()
        after = private_bytes()
        assert before is not None
        assert taken is not None
        assert kept is not None
        assert after is not None
        assert taken > before + 60 * MIB
        assert kept > before + 60 * MIB
        # Each of the 1,024 tensors may leave the two pages that it shares with its neighbours: 8 MiB.
        assert after < before + 16 * MIB
        assert bool((last == 1).all())

    in_child(work)


def test_trimming_memory_leaves_no_garbage() -> None:
    def work() -> None:  # in a process without threads of earlier tests
        trim()
        gc.collect()
        trim()
        assert gc.collect() == 0

    in_child(work)


@pytest.mark.parametrize(
    ("available", "freed", "trims"), [(81, 10, False), (79, 10, True), (None, 10, True), (10**12, None, True)]
)
def test_freed_memory_is_kept_if_half_of_what_is_left_holds_it(
    monkeypatch: pytest.MonkeyPatch, available: int | None, freed: int | None, trims: bool
) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: available)
    resources = ComputeResources(prepare(experiment(engine={"name": "processes", "trainer": "sequential"})))
    resources._freed_bytes = freed
    assert resources.returns_memory() is trims


@linux
def test_warm_up_measures_the_memory_of_a_step() -> None:
    """A model of 2^20 parameters: each copy of them, or of their gradients, takes 4 MiB."""
    setup = prepare(
        experiment(task={"name": "least-squares", "features": 2**20, "samples": 8, "test_samples": 4})
    )

    def work() -> None:
        keep_freed_memory()
        resources = ComputeResources(setup)
        resources.warm_up()
        assert resources._freed_bytes is not None
        assert 8 * MIB < resources._freed_bytes < 100 * MIB

    in_child(work)


@linux
def test_available_memory_does_not_exceed_the_machine() -> None:
    available = available_bytes()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- shared state


def jobs(setup: Setup) -> list[TrainJob]:
    batches = BatchStream(setup.experiment.seed, 0, setup.parts[0], setup.experiment.batch_size)
    model = setup.initial(0)
    state = setup.experiment.optimizer.init(model.parameters)
    return [TrainJob(model, [batches.batch(k), batches.batch(k + 1)], 0.1, state, 7) for k in range(3)]


def digits() -> Setup:
    task = {"name": "digits", "model": {"name": "mlp", "hidden": [16]}}
    return prepare(experiment(task=task, evaluation={"every_rounds": 1, "samples": 130}))


def test_training_after_warm_up_has_the_same_bits() -> None:
    setup = digits()
    resources, alone = (
        ComputeResources(setup),
        SequentialTrainer(setup.task, setup.experiment.optimizer, Rows(setup.layout.size)),
    )
    resources.warm_up()
    for job in jobs(setup):
        [warm], [cold] = resources.trainer.train([job]), alone.train([job])
        assert torch.equal(warm.model.parameters, cold.model.parameters)
        assert warm.loss == cold.loss
    assert resources.evaluator.test(warm.model) == resources.evaluator.test(cold.model)


def test_common_initial_model_is_made_once() -> None:
    setup = digits()
    resources = ComputeResources(setup)
    assert resources.initial(0) is resources.initial(3)
    assert torch.equal(resources.initial(3).parameters, setup.initial(3).parameters)
    assert resources.rows.owns(resources.initial(0).parameters)
    independent = ComputeResources(
        prepare(experiment(initial="independent", task={"name": "digits", "model": "logistic"}))
    )
    assert not torch.equal(independent.initial(0).parameters, independent.initial(1).parameters)


def test_failed_warm_up_is_left_to_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepare(experiment())

    def fail(*_: Any) -> Any:
        raise ArithmeticError("the well is dry")

    monkeypatch.setattr(SequentialTrainer, "train", fail)
    resources = ComputeResources(setup)
    resources.warm_up()
    monkeypatch.undo()
    [result] = resources.trainer.train([jobs(setup)[0]])
    assert bool(result.model.parameters.isfinite().all())


# --- limits of the machine


def test_too_low_open_file_limit_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 400 + SPARE_DESCRIPTORS - 1))
    with pytest.raises(
        BadInput, match=r"nodes: 200 .* need 464 open files .* hard limit, 463 \(ulimit -Hn\)"
    ):
        raise_descriptor_limit(200)
    assert not raised
    for hard in (464, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (100, hard))
        raise_descriptor_limit(200)
        assert raised.pop() == (hard, hard)


@pytest.mark.slow
def test_run_of_128_processes_completes(tmp_path: Path) -> None:
    run = play(tmp_path, nodes=128, topology={"name": "random-regular", "degree": 5})
    assert run.status == "done"
    assert not run.lost
    nodes = run.metrics.filter(pl.col("node") >= 0)
    for round in (0, 2):
        assert sorted(nodes.filter(pl.col("round") == round)["node"]) == list(range(128))
    assert nodes.filter(pl.col("round") == 2)["messages_sent"].to_list() == [2 * 5] * 128
    assert run.parameters is not None
    assert run.parameters.shape == (128, 4)
    assert bool(run.parameters.isfinite().all())


# --- the benchmark


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("processes")


@linux
def test_benchmark_counts_bytes_and_memory(benchmark: ModuleType) -> None:
    row = benchmark.measure(benchmark.experiment(4, 8, samples=400))
    assert (row["nodes"], row["rounds"]) == (4, 8)
    assert 1.0 < row["bytes_over_minimum"] < 1.01
    assert row["bytes_a_node_round"] == pytest.approx(3 * 4 * 89_834, rel=0.01)
    assert 1 < row["private_MiB_mean"] <= row["private_MiB_max"] < 200
    assert 1 < row["private_MiB_mean_at_end"] <= row["private_MiB_max_at_end"] < 200
    assert row["node_rounds_per_s"] > 0
    assert not row["cpu_ms_a_node_round"] <= 0  # (perhaps not a number)


@linux
def test_benchmark_times_the_start_up_of_the_command(benchmark: ModuleType) -> None:
    started = time.monotonic()
    seconds = benchmark.start_up(benchmark.experiment(4, 4, samples=400))
    assert 0 < seconds < time.monotonic() - started
