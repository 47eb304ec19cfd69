"""Users' case O05: tied weights, and files of other programs in ``initial.from``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

import gossamer
from gossamer import BadInput, Experiment, Task
from gossamer.node.setup import Setup
from gossamer.runtime.setup import prepare


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 12, bias=False)
        self.embedding = nn.Embedding(12, 8)
        self.head.weight = self.embedding.weight
        self.middle = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(F.relu(self.middle(self.embedding(x).mean(1))))
        return outputs


class Frozen(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)


def words(model: Callable[[], nn.Module]) -> Task:
    x = torch.randint(0, 12, (400, 5), generator=torch.Generator().manual_seed(1))
    y = x.amax(1)
    return Task(model, train=(x[:300], y[:300]), test=(x[300:], y[300:]), loss=F.cross_entropy)


def tied() -> Task:
    return words(Tied)


def frozen() -> Task:
    return words(Frozen)


def described(task: str = "tied", **fields: Any) -> Experiment:
    return Experiment.of(
        {
            "nodes": 4,
            "task": f"{__name__}:{task}",
            "topology": "ring",
            "algorithm": "d-psgd",
            "evaluation": {"every_rounds": 1},
            "stop": {"rounds": 1},
            "engine": {"name": "simulate", "trainer": "sequential"},
            **fields,
        }
    )


def start(path: Path, task: str = "tied") -> Setup:
    return prepare(described(task, initial={"from": str(path)}))


def refused(path: Path, task: str = "tied") -> str:
    with pytest.raises(BadInput) as caught:
        start(path, task)
    line = str(caught.value)
    assert line.startswith(f"initial.from: {path}")
    assert "\n" not in line
    assert len(line) < 420 + len(str(path))
    return line.removeprefix(f"initial.from: {path}")


def trained(module: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad]).tolist()


def state(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """All names, each with a tensor of its own."""
    return {prefix + name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.fixture
def module() -> Tied:
    torch.manual_seed(7)
    return Tied()


def test_tied_parameters_are_read_under_any_of_their_names(tmp_path: Path, module: Tied) -> None:
    both = state(module)
    files = {
        "kept": None,  # save_model keeps one name of each tensor
        "both": both,
        "head": {name: tensor for name, tensor in both.items() if name != "embedding.weight"},
        "embedding": {name: tensor for name, tensor in both.items() if name != "head.weight"},
    }
    for name, tensors in files.items():
        path = tmp_path / f"{name}.safetensors"
        save_model(module, str(path)) if tensors is None else save_file(tensors, path)
        assert start(path).initial(2).parameters.tolist() == trained(module)


def test_tied_parameters_with_other_values_are_refused(tmp_path: Path, module: Tied) -> None:
    tensors = state(module)
    tensors["embedding.weight"] += 1
    save_file(tensors, tmp_path / "unequal.safetensors")
    assert refused(tmp_path / "unequal.safetensors").startswith(
        ": 'embedding.weight' and 'head.weight' differ, but are one parameter of task.model; accepted: equal values"
    )


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.net."])
def test_prefixes_of_all_names_are_left_out_and_said(tmp_path: Path, module: Tied, prefix: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state(module, prefix), path)
    setup = start(path)
    assert setup.initial(0).parameters.tolist() == trained(module)
    assert f"initial.from: {path}: names are read without their prefix {prefix!r}" in setup.notes()


def test_model_of_a_run_can_be_saved_and_read(tmp_path: Path) -> None:
    """safetensors' save_model refuses tensors that are views of one vector."""
    run = gossamer.run(described(), tmp_path)
    again = run.module()
    assert isinstance(again, Tied)
    assert again.head.weight is again.embedding.weight
    for path in (tmp_path / "model.safetensors", tmp_path / "state.safetensors"):
        save_model(again, str(path)) if path.stem == "model" else save_file(state(again), path)
        assert start(path).initial(0).parameters.tolist() == trained(again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_converted(tmp_path: Path, module: Tied, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in state(module).items()}, path)
    found = start(path).initial(0).parameters
    assert found.tolist() == torch.tensor(trained(module)).to(dtype).float().tolist()


def test_float64_values_beyond_float32_are_refused(tmp_path: Path, module: Tied) -> None:
    tensors = {name: tensor.double() for name, tensor in state(module).items()}
    tensors["middle.bias"][0] = 1e300
    save_file(tensors, tmp_path / "large.safetensors")
    assert refused(tmp_path / "large.safetensors").startswith(
        ": 'middle.bias' has values that are not finite"
    )


def test_frozen_names_are_names_of_the_model(tmp_path: Path) -> None:
    fresh = prepare(described("frozen")).task.model()
    path = tmp_path / "frozen.safetensors"
    save_file(state(fresh), path)
    assert start(path, "frozen").initial(0).parameters.tolist() == trained(fresh)
    tensors = state(fresh)
    tensors["middle.bias"] += 1
    save_file(tensors, path)
    assert refused(path, "frozen") == (
        ": 'middle.bias' is not trained, and has other values in task.model; accepted: a file without it, or a model that has"
        " the file's values"
    )


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "renamed.safetensors", "old.pt"])
def test_files_of_torch_say_how_to_convert_them(tmp_path: Path, module: Tied, name: str) -> None:
    path = tmp_path / name
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=name != "old.pt")
    assert refused(path) == (
        ": a file of torch.save or of pickle, which may run code when it is read; accepted: safetensors, as from"
        " safetensors.torch.save_model(module, file)"
    )


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, " has no tensors; accepted: the parameters of a model"),
        (
            {"buffers": torch.zeros(0)},
            " lacks head.weight, middle.bias and middle.weight, and has buffers, which the model lacks",
        ),
        (
            {"parameters": torch.zeros(3)},
            " lacks head.weight, middle.bias and middle.weight, and has parameters, which",
        ),
        ({"parameters": torch.zeros(0, 168)}, ""),
        ({"parameters": torch.zeros(2, 168), "buffers": torch.zeros(3, 0)}, " lacks head.weight"),
        (
            {"parameters": torch.zeros(2, 100)},
            " has 100 parameters and 0 values in buffers; accepted: 168 and 0",
        ),
        (
            {f"layer{k}.weight": torch.zeros(2) for k in range(99)},
            " lacks head.weight, middle.bias and middle.weight, and has layer",
        ),
    ],
)
def test_files_without_the_model_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], problem: str
) -> None:
    path = tmp_path / "odd.safetensors"
    save_file(tensors, path)
    assert load_file(path).keys() == tensors.keys()
    if problem:
        assert refused(path).startswith(problem)
    else:
        with pytest.raises(
            BadInput, match="initial.rank: null, of a run without finite models; accepted: a rank"
        ):
            start(path)
