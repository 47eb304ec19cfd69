"""Inputs that users tried, which ended in silence, in the middle of a run, or in a line that did not help."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import nn

import gossamer
from gossamer import BadInput, Experiment, Task, files
from gossamer.config.experiment import Evaluation
from gossamer.errors import RunFailed
from gossamer.files import parse_yaml
from gossamer.process_memory import available_bytes
from gossamer.runtime.outcome import describe_waits
from gossamer.runtime.setup import prepare
from gossamer.runtime.simulate import host

BASE: dict[str, Any] = {
    "nodes": 4,
    "task": {"name": "digits", "model": "logistic", "samples": 200},
    "topology": "ring",
    "algorithm": "d-psgd",
    "stop": {"rounds": 2},
    "engine": {"name": "simulate", "trainer": "sequential"},
}


def described(**changes: Any) -> Experiment:
    return Experiment.of({**BASE, **changes})


def refused(experiment: Experiment) -> str:
    with pytest.raises(BadInput) as caught:
        prepare(experiment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_run_that_only_time_ends_fails_if_time_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and messages that take no time: a run until one second never ends."""
    experiment = described(
        compute={"name": "constant", "seconds_per_step": 0.0},
        evaluation={"every_rounds": None},
        stop={"time_s": 1.0},
    )
    monkeypatch.setattr(host, "MAX_ROUNDS", 20)
    with pytest.raises(RunFailed, match=r"it completed 20 rounds at 0\.0 s without letting time pass"):
        gossamer.run(experiment, tmp_path)


def test_rounds_without_time_end_by_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_ROUNDS", 20)
    experiment = described(
        task={"name": "least-squares", "features": 2, "samples": 8},
        compute={"name": "constant", "seconds_per_step": 0.0},
        evaluation={"every_rounds": None},
        stop={"rounds": 30},
    )
    assert gossamer.run(experiment, tmp_path).status == "done"


def test_data_larger_than_memory_are_not_drawn() -> None:
    problem = refused(described(task={"name": "synthetic", "owners": 10**12}))
    assert problem.startswith(
        "task: synthetic: the 50,000,000,000,000 samples of 1,000,000,000,000 owners take"
    )


def test_limit_of_addresses_is_a_limit_of_memory() -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    free = available_bytes()
    assert free is not None
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, hard))
    try:
        limited = available_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
    assert limited is not None
    assert 2**27 < limited <= 2**28


def tokens() -> Task:
    """A thousand sequences of tokens below 50, but for one."""
    inputs = torch.randint(50, (1000, 6), generator=torch.Generator().manual_seed(1))
    inputs[777, 3] = 50
    model = lambda: nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, 2))  # noqa: E731
    targets = inputs[:, 0] % 2
    pair = inputs[:20], targets[:20]
    return Task(model=model, train=(inputs, targets), test=pair, loss=F.cross_entropy)


@pytest.mark.parametrize("trainer", ["sequential", "auto"])
def test_highest_token_is_part_of_the_trial(trainer: str) -> None:
    problem = refused(described(task=f"{__name__}:tokens", engine={"name": "simulate", "trainer": trainer}))
    assert "index out of range" in problem


def broadcast() -> Task:
    """Outputs [n, 1] and targets [n], of which torch's losses make [n, n]."""
    inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
    pair = inputs, inputs.sum(1)
    return Task(model=lambda: nn.Linear(5, 1), train=pair, test=pair, loss=F.mse_loss)


def test_loss_that_broadcasts_is_refused() -> None:
    problem = refused(described(task=f"{__name__}:broadcast"))
    assert problem.startswith("task.loss")
    assert "one shape, in place of (" in problem
    assert "outputs.squeeze(1) or targets[:, None]" in problem


def test_header_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "twice.csv"
    table.write_text("a,a,c\n" + "".join(f"{k},{10 * k},{k % 2}\n" for k in range(40)))
    task = {"name": "hub", "path": str(table), "inputs": "a", "targets": "c", "model": "logistic"}
    problem = refused(described(task=task))
    assert problem.endswith(
        "twice.csv: two columns have the name 'a'; accepted: names that differ, in the file or in task.csv.columns"
    )


def test_learning_on_receipt_needs_a_sender() -> None:
    problem = refused(described(nodes=1, topology="complete", algorithm="gossip-learning-on-receipt"))
    assert problem.startswith("nodes: 1 for gossip-learning-on-receipt")


def test_waits_for_no_message_are_described() -> None:
    assert describe_waits({0: [], 1: []}, {}) == (
        "for something other than a message: a timer, a computation or a task"
    )


def test_object_in_place_of_a_name_is_shown_in_part() -> None:
    with pytest.raises(BadInput) as caught:
        described(task=broadcast())
    line = str(caught.value)
    assert line.startswith("task: got Task(model=")
    assert line.endswith("...; accepted: a name, or a mapping with 'name' and its parameters")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "meant"), [("010", "8"), ("1:30", "90"), ("-017", "-15"), ("1:00:00.5", "3600.5")]
)
def test_numbers_in_base_8_or_60_are_refused(text: str, meant: str) -> None:
    with pytest.raises(
        BadInput, match=f"{text} would mean {meant}; accepted: {meant}, or '{text}' for a text"
    ):
        parse_yaml(f"a: {text}", "a file")


def test_other_numbers_and_texts_in_yaml_stay() -> None:
    text = (
        "{a: 0, b: -0.5, c: 1e3, d: '010', e: 'x:30', f: 100, g: 0.05, h: 127.0.0.1:90, i: 2026-11-27, j: 08}"
    )
    assert [*parse_yaml(text, "a file").values()][:3] == [0, -0.5, "1e3"]


def test_folder_with_a_part_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked.csv").write_text("a,b\n1,2\n")

    def locked(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", lambda path: locked(path) if path.name == "locked.csv" else False)
    task = {"name": "hub", "path": str(tmp_path), "inputs": "a", "targets": "b", "model": "logistic"}
    problem = refused(described(task=task))
    assert problem.endswith(
        "locked.csv can't be read (Permission denied); accepted: a folder whose files can be read"
    )


def with_model(model: Any, **changes: Any) -> Experiment:
    return described(task={"name": "digits", "model": model, "samples": 200}, **changes)


@pytest.mark.parametrize(
    ("hidden", "problem"),
    [
        ([10**12], "the 75,000,000,000,010 parameters of one model take 2.79e+05 GiB of memory"),
        ([10**7, 10**7], "the 100,000,760,000,010 parameters of one model take 3.73e+05 GiB of memory"),
        ([10**18], "no tensor has so many values"),
        ([2**70], "no tensor has so many values"),
    ],
)
def test_model_that_does_not_fit_is_refused_by_its_field(hidden: list[int], problem: str) -> None:
    assert refused(with_model({"name": "mlp", "hidden": hidden})).startswith(
        f"task.model.hidden: got {hidden}: {problem}; accepted: "
    )


def test_many_models_that_do_not_fit_are_refused_by_both_fields() -> None:
    """750,010 parameters, twice for each node."""
    assert refused(with_model({"name": "mlp", "hidden": [10_000]}, nodes=1_000_000)).startswith(
        "nodes: 1000000 with 750010 parameters each (task.model.hidden: [10000]) take at least 5.59e+03 GiB"
    )


def enormous(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(10**12, 1)


def test_own_model_that_does_not_fit_is_refused_at_its_line() -> None:
    line = enormous.__code__.co_firstlineno + 1
    assert refused(with_model(f"{__name__}:enormous")) == (
        f"task.model: needs more memory than is free (test_cases_tried.py, line {line}); accepted: what fits"
    )


class WithoutGradient(nn.Module):
    """A model that trains nothing, since its forward has no gradient or no parameter."""

    def __init__(self, shape: tuple[int, ...], classes: int, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(64, classes)
        self.layers = [nn.Linear(64, classes)]  # unknown to torch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layers[0] if self.kind == "list" else self.layer
        with torch.set_grad_enabled(self.kind != "no_grad"):
            outputs: torch.Tensor = layer(x.flatten(1))
        return outputs.detach() if self.kind == "training" and self.training else outputs


@pytest.mark.parametrize("kind", ["no_grad", "training", "list"])
@pytest.mark.parametrize("trainer", ["auto", "sequential", "batched"])
def test_model_without_gradient_is_refused(kind: str, trainer: str) -> None:
    model = {"name": f"{__name__}:WithoutGradient", "kind": kind}
    problem = refused(with_model(model, engine={"name": "simulate", "trainer": trainer}))
    assert problem.startswith(
        "task.model: no trained parameter takes part in its outputs during training, so the loss has no gradient; accepted: a"
    )


def errors() -> Task:
    """A loss that has no gradient: the share of wrong classes."""
    inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
    pair = inputs, (inputs.sum(1) > 0).long()
    wrong = lambda outputs, targets: (outputs.argmax(1) != targets).float().mean()  # noqa: E731
    return Task(model=lambda: nn.Linear(5, 2), train=pair, test=pair, loss=wrong)


def test_loss_without_gradient_is_refused() -> None:
    assert refused(described(task=f"{__name__}:errors")).startswith(
        "task.loss: its value has no gradient, although the outputs of task.model have one; accepted: functions of torch"
    )


def test_table_of_metrics_that_does_not_fit_is_refused_before_the_run() -> None:
    """A row of each of 4 nodes and of the network, 10^12 + 1 times."""
    experiment = described(evaluation={"every_rounds": 1}, stop={"rounds": 10**12})
    assert refused(experiment).startswith(
        "evaluation.every_rounds: got 1, which makes a table of 5,000,000,000,005 rows that takes "
    )
    prepare(described(evaluation={"every_rounds": 10**11}, stop={"rounds": 10**12}))


def test_record_that_could_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory alone limits tables."""
    experiment = described(task={"name": "least-squares", "features": 2, "samples": 8}, stop={"rounds": 5})
    monkeypatch.setattr(files, "MAX_VALUES", 600)
    run = gossamer.run(experiment.model_copy(update={"evaluation": Evaluation(every_rounds=1)}), tmp_path)
    assert run.status == "done"
    assert gossamer.load_run(run.path).metrics.height * run.metrics.width > 600
