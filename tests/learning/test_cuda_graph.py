"""Recorded functions on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name

from gossamer import Model, Task
from gossamer.config.registry import build
from gossamer.learning import SGD, cuda_graph
from gossamer.learning.cuda_graph import MAX_GRAPHS, Recorded
from gossamer.learning.parameters import initial_model
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import BatchedTrainer, GradientJob, SequentialTrainer, Trainer, TrainJob
from gossamer.tasks import load_task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: recorded functions")


def on_gpu(*values: float) -> Tensor:
    return torch.tensor(values, device="cuda")


def test_recording_computes_with_the_values_of_each_call() -> None:
    calls = []

    def double(x: Tensor) -> tuple[Tensor]:
        calls.append(x)
        return (2 * x,)

    recorded = Recorded(double)
    results = [recorded(on_gpu(number))[0].item() for number in range(5)]
    assert results == [0, 2, 4, 6, 8]
    assert len(calls) == 2  # once plainly, once to record it
    assert recorded(on_gpu(1, 2))[0].tolist() == [2, 4]


def test_function_that_reads_a_value_is_not_recorded() -> None:
    def sign(x: Tensor) -> tuple[Tensor]:
        kept = F.dropout(torch.ones(1000, device="cuda"))
        return (x if x.sum().item() * kept.sum().item() > 0 else -x,)

    recorded, stream = Recorded(sign), torch.cuda.current_stream()
    assert [recorded(on_gpu(value))[0].item() for value in (1, -2, 3, -4)] == [1, 2, 3, 4]
    assert torch.cuda.current_stream() == stream
    torch.rand(1, device="cuda")


def test_function_that_draws_on_the_cpu_is_not_recorded() -> None:
    def sometimes(x: Tensor) -> tuple[Tensor]:
        return (x + 1 if torch.rand(()) < 0.5 else x,)

    def results(function: Any) -> list[float]:
        torch.manual_seed(1)
        return [function(on_gpu(0))[0].item() for _ in range(20)]

    assert results(Recorded(sometimes)) == results(sometimes)


def test_large_inputs_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MAX_BYTES", 100)
    recorded = Recorded(lambda x: (x + 1,))
    for length in (20, 20, 10, 10):
        assert recorded(torch.zeros(length, device="cuda"))[0].tolist() == [1.0] * length
    assert [recording._inputs[0].numel() for recording in recorded._recordings.values()] == [20]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_failing_function_raises_its_own_error() -> None:
    def fail(x: Tensor) -> tuple[Tensor]:
        raise RuntimeError("the model's own")

    recorded = Recorded(fail)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the model's own"):
            recorded(on_gpu(1))


def test_recordings_are_limited_in_number() -> None:
    recorded = Recorded(lambda x: (x + 1,))
    for length in range(1, MAX_GRAPHS + 5):
        for _ in range(3):
            assert recorded(torch.zeros(length, device="cuda"))[0].tolist() == [1.0] * length
    assert len(recorded._recordings) == MAX_GRAPHS


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


MODELS: dict[str, Any] = {"digits": None, "dropout": Noisy, "batch norm": Normed}


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), SGD(lr=0.1, momentum=0.9)])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(SequentialTrainer, name) for name in MODELS]
    + [(BatchedTrainer, "digits"), (BatchedTrainer, "batch norm")],
)
def test_recorded_steps_have_the_bits_of_plain_ones(
    kind: type[Trainer], name: str, optimizer: SGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Recorded] = []

    def recorded(function: Any) -> Recorded:
        made.append(Recorded(function))
        return made[-1]

    monkeypatch.setattr("gossamer.learning.trainer.Recorded", recorded)
    given = load_task(build("task", "digits"), None, 1)
    task = given if MODELS[name] is None else Task(MODELS[name], given.train, given.test, given.loss)
    start = Model(*(vector.cuda() for vector in initial_model(task.model, 1)))

    def run(cuda_graphs: bool) -> list[Tensor]:
        rows = Rows(len(start.parameters), "cuda")
        trainer = kind(task, optimizer, rows, cuda_graphs=cuda_graphs)
        models, states = [start] * 3, [optimizer.init(start.parameters) for _ in range(3)]
        outputs = []
        for number in range(4):
            batches = [[torch.arange(k, k + 8) + 10 * number for k in range(2)] for _ in models]
            jobs = [
                TrainJob(*given, 0.1, state, 10 * number + rank)
                for rank, (given, state) in enumerate(
                    zip(zip(models, batches, strict=True), states, strict=True)
                )
            ]
            results = trainer.train(jobs)
            models, states = [result.model for result in results], [result.state for result in results]
            outputs += [
                torch.tensor([result.loss for result in results]),
                *trainer.gradient([GradientJob(models[0], batches[0][0], 3)]),
            ]
        return [*outputs, *(vector for model in models for vector in model)]

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)
    buffers = (kind, name) == (SequentialTrainer, "batch norm")  # a recording would not update them
    assert [bool(function._recordings) for function in made] == ([] if buffers else [True])
