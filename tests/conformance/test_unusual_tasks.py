"""Tasks, models and components of users that behave unusually."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from pydantic import PrivateAttr
from safetensors.torch import save_file
from torch import Tensor, nn

import gossamer
from gossamer import Algorithm, BadInput, Experiment, Node, RunFailed, Task, Tracker
from gossamer.learning import Aggregator
from gossamer.tasks import Partition


class Writing(nn.Module):
    """Normalises its inputs in place, unless told otherwise."""

    def __init__(self, *, in_place: bool = True) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(4, 3), in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.sub_(0.5) if self.in_place else x - 0.5
        scores: Tensor = self.layer(x)
        return scores


class Sometimes(nn.Module):
    """Drops values of some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(F.dropout(x, 0.5, self.training and bool(x[0, 0] > 0)))
        return scores


class WithBuffer(nn.Linear):
    def __init__(self, value: Tensor) -> None:
        super().__init__(4, 3)
        self.register_buffer("kept", value)


ONE = nn.Linear(4, 3)
MODELS: dict[str, Any] = {
    "writing": Writing,
    "plain": lambda: Writing(in_place=False),
    "sometimes": Sometimes,
    "linear": lambda: nn.Linear(4, 3),
    "one": lambda: ONE,
    "large": lambda: WithBuffer(torch.tensor(2**24 + 1)),
    "complex": lambda: WithBuffer(torch.tensor(1j)),
    "float32": lambda: nn.Linear(4, 3, dtype=torch.float32),
}


def made(model: str = "linear", targets: str = "classes") -> Task:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(96, 4, generator=rng, dtype=torch.float32)
    y = torch.randint(3, (96,), generator=rng)
    loss: Any = F.cross_entropy
    if targets == "signs":
        y, loss = 2 * (y % 2) - 1, lambda outputs, y: F.soft_margin_loss(outputs[:, 0], y.float())
    elif targets == "large":
        y, loss = y * 10**9, lambda outputs, y: F.mse_loss(outputs[:, 0], y.float() / 1e9)
    elif targets == "several":
        y, loss = (
            F.one_hot(y, 3).bool(),
            lambda outputs, y: F.binary_cross_entropy_with_logits(outputs, y.float()),
        )
    return Task(MODELS[model], (x, y), (x.clone(), y.clone()), loss)


def play(out: Path, **fields: Any) -> gossamer.Run:
    task = {"name": f"{__name__}:made", **fields.pop("task", {})}
    values = {
        "nodes": 4,
        "task": task,
        "topology": "ring",
        "algorithm": "d-psgd",
        "optimizer": {"name": "sgd", "lr": 1e-6},
        "batch_size": 4,
        "evaluation": {"every_rounds": 1},
        "stop": {"rounds": 4},
        "engine": {"name": "simulate", "trainer": "sequential"},
        **fields,
    }
    return gossamer.run(Experiment.of(values), out)


def test_model_that_modifies_its_inputs_is_evaluated_correctly(tmp_path: Path) -> None:
    writing, plain = (
        play(tmp_path, task={"model": model}).metrics["test_loss"] for model in ("writing", "plain")
    )
    np.testing.assert_allclose(writing, plain, rtol=1e-6)


def test_model_with_occasional_randomness_is_repeatable(tmp_path: Path) -> None:
    engine = {"name": "simulate", "trainer": "sequential", "workers": 2}
    runs = [
        play(
            tmp_path,
            nodes=8,
            task={"model": "sometimes"},
            optimizer={"name": "sgd", "lr": 0.5},
            engine=engine,
        )
        for _ in range(3)
    ]
    assert torch.equal(runs[0].parameters, runs[1].parameters)  # type: ignore[arg-type]
    assert torch.equal(runs[0].parameters, runs[2].parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("targets", ["signs", "large", "several"])
def test_targets_need_not_be_class_numbers(tmp_path: Path, targets: str) -> None:
    assert play(tmp_path, task={"targets": targets}).status == "done"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("one", "returns the same parameters twice; accepted: a function that returns a fresh nn.Module"),
        ("large", "buffer 'kept' has an integer above 16,777,216"),
        ("complex", "buffer 'kept' has complex"),
    ],
)
def test_models_that_vectors_cannot_hold_are_refused(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        play(tmp_path, task={"model": model})


def test_metrics_with_colliding_names_are_refused() -> None:
    pair = (torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))
    for metrics, tests in (
        ({"loss": F.cross_entropy}, {}),
        ({"a_m": F.cross_entropy, "m": F.cross_entropy}, {"test_a": pair}),
    ):
        with pytest.raises(BadInput, match="task.metrics: got"):
            Task(MODELS["linear"], pair, pair, F.cross_entropy, metrics=metrics, tests=tests)


@pytest.mark.parametrize(
    "name", ["f1=macro", "[bold]x", "a<b>", "with space", "a,b", "s/l", "top-5", "*", "", "5f"]
)
def test_metrics_without_an_identifier_as_name_are_refused(name: str) -> None:
    pair = (torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(
        BadInput, match=r"^task.metrics: got '.*'; accepted: an identifier: letters, digits and _"
    ) as error:
        Task(MODELS["linear"], pair, pair, F.cross_entropy, metrics={name: F.cross_entropy})
    assert len(error.value.problems) == 1


class Recording(Algorithm):
    column: str
    number: int = 5

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            node.record(**{self.column: self.number})


@pytest.mark.parametrize("column", ["node", "moment", "bytes_sent", "test_loss"])
def test_algorithms_cannot_record_reserved_columns(tmp_path: Path, column: str) -> None:
    with pytest.raises(RunFailed, match=f"node.record: {column}: every row has this column"):
        play(tmp_path, algorithm={"name": f"{__name__}:Recording", "column": column})


def test_algorithms_record_only_under_identifiers(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="node.record: 'f1=macro'; accepted: an identifier"):
        play(tmp_path, algorithm={"name": f"{__name__}:Recording", "column": "f1=macro"})


def test_recorded_whole_numbers_fit_a_table(tmp_path: Path) -> None:
    """Larger ones would become floats, and lose digits without a word."""
    recording = {"name": f"{__name__}:Recording", "column": "count"}
    run = play(tmp_path / "largest", algorithm={**recording, "number": 2**63 - 1})
    assert run.metrics["count"].drop_nulls().unique().to_list() == [2**63 - 1]
    with pytest.raises(RunFailed, match="node.record: count: got a whole number of 64 bits"):
        play(tmp_path / "larger", algorithm={**recording, "number": 2**63})


class Scalar(Aggregator):
    def aggregate(self, own: Tensor, vectors: Any, weights: Any, self_weight: float) -> Tensor:
        return own.mean()


def test_aggregator_that_returns_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"^aggregator: .*Scalar returns a tensor of shape \(\); accepted: \(15,\)"
    ):
        play(tmp_path, aggregator=f"{__name__}:Scalar")


class Lists(Partition):
    def split(self, task: Task, nodes: int, rng: Any) -> Any:
        return [list(range(k, task.samples, nodes)) for k in range(nodes)]


def test_partition_may_return_lists(tmp_path: Path) -> None:
    assert play(tmp_path, partition=f"{__name__}:Lists").status == "done"


def test_initial_file_with_nonfinite_values_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(4, 3)
    module.weight.data[0, 0] = float("nan")
    save_file(module.state_dict(), tmp_path / "start.safetensors")
    with pytest.raises(BadInput, match="'weight' has values that are not finite"):
        play(tmp_path, initial={"from": str(tmp_path / "start.safetensors")})


counted: list[int] = []


class Counting(Tracker):
    _rows: list[Any] = PrivateAttr(default_factory=list)

    def row(self, row: Any) -> None:
        self._rows.append(row)
        counted.append(len(self._rows))


def test_every_run_has_its_own_trackers(tmp_path: Path) -> None:
    values: dict[str, Any] = {"trackers": [{"name": f"{__name__}:Counting"}]}
    experiment = Experiment.load(play(tmp_path, **values).path / "experiment.yaml")
    first = max(counted)
    counted.clear()
    gossamer.run(experiment, tmp_path)
    gossamer.run(experiment, tmp_path)
    assert max(counted) == first


def test_local_algorithm_class_runs_with_the_auto_trainer(tmp_path: Path) -> None:
    class Local(Algorithm):
        async def run(self, node: Node) -> None:
            async for _ in node.rounds():
                await node.train()

    run = play(tmp_path, algorithm=Local(), engine={"name": "simulate"})
    assert run.status == "done"
    assert run.metrics.filter(pl.col("round") == 4).height > 0


@pytest.mark.parametrize("trainer", ["sequential", "batched", "fused"])
def test_runs_complete_with_another_default_dtype(tmp_path: Path, trainer: str) -> None:
    engine = {"name": "simulate", "trainer": trainer}
    before = torch.get_default_dtype()
    plain = play(tmp_path, engine=engine)
    torch.set_default_dtype(torch.float64)
    try:
        other = play(tmp_path, engine=engine, task={"model": "float32"})
    finally:
        torch.set_default_dtype(before)
    assert other.status == plain.status == "done"
