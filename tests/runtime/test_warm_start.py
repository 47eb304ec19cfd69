"""``initial: {from: ...}``: all nodes start with the model of a run or of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gossamer import BadInput, Experiment, Run, Task, run
from gossamer.runtime.setup import prepare

FEATURES = 3


class Net(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(features), nn.Linear(features, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))[:, 0]


def noise(features: int = FEATURES) -> Task:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((60, features), dtype=np.float32))
    return Task(
        model=lambda: Net(features),
        train=(x[:40], x[:40, 0]),
        test=(x[40:], x[40:, 0]),
        loss=nn.functional.mse_loss,
    )


def experiment(**fields: Any) -> Experiment:
    return Experiment.of(
        {
            "nodes": 4,
            "task": {"name": f"{__name__}:noise"},
            "topology": "complete",
            "algorithm": "local",
            "evaluation": {"every_rounds": 1},
            "stop": {"rounds": 2},
            "engine": {"name": "simulate", "trainer": "sequential"},
            **fields,
        }
    )


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(experiment(), tmp_path_factory.mktemp("origin"))


@pytest.mark.parametrize("rank", [None, 2])
def test_nodes_start_with_the_mean_model_or_that_of_one_rank(origin: Run, rank: int | None) -> None:
    assert origin.parameters is not None
    assert origin.buffers is not None
    setup = prepare(experiment(initial={"from": str(origin.path), "rank": rank}))
    for node in (0, 3):
        for vector, values in zip(setup.initial(node), (origin.parameters, origin.buffers), strict=True):
            mean = values.double().numpy().mean(axis=0) if rank is None else values[rank].numpy()
            np.testing.assert_allclose(vector.numpy(), mean, rtol=1e-7)


def test_both_engines_use_and_record_a_warm_start(origin: Run, tmp_path: Path) -> None:
    warm = experiment(initial={"from": str(origin.path.parent)})  # a folder that holds one run
    done = run(warm, tmp_path)
    file = origin.path / "models.safetensors"
    crc32 = done.experiment["initial"].pop("crc32")
    assert done.experiment["initial"] == {"from": str(file), "rank": None}
    x, y = noise().test  # type: ignore[misc]
    with torch.no_grad():
        expected = nn.functional.mse_loss(origin.module()(x), y)
    first = done.metrics.filter(done.metrics["round"] == 0, done.metrics["node"] == 0)
    assert first["test_loss"].item() == pytest.approx(float(expected), rel=1e-6)
    real = run(warm.override(engine="processes"), tmp_path)
    assert real.parameters.equal(done.parameters)  # type: ignore[union-attr, arg-type]
    again = Experiment.load(done.path / "experiment.yaml")
    assert prepare(again).initial(0).parameters.equal(prepare(warm).initial(0).parameters)
    assert again.initial.crc32 == crc32  # type: ignore[union-attr]


def test_nodes_start_from_a_file_of_named_tensors(tmp_path: Path) -> None:
    module = Net(FEATURES)
    module.norm.running_mean.fill_(0.5)  # type: ignore[union-attr, operator]
    save_file(module.state_dict(), tmp_path / "net.safetensors")
    start = prepare(experiment(initial={"from": str(tmp_path / "net.safetensors")})).initial(1)
    named = dict(module.named_parameters())
    assert (
        start.parameters.tolist()
        == torch.cat([tensor.detach().flatten() for tensor in named.values()]).tolist()
    )
    assert start.buffers.tolist() == [0.5] * FEATURES + [1.0] * FEATURES + [0.0]
    save_file({name: tensor.detach() for name, tensor in named.items()}, tmp_path / "bare.safetensors")
    start = prepare(experiment(initial={"from": str(tmp_path / "bare.safetensors")})).initial(1)
    assert start.buffers.tolist() == [0.0] * FEATURES + [1.0] * FEATURES + [0.0]  # those of a new model


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            {"from": "nowhere"},
            r"^initial.from: .*nowhere: No such file or directory; accepted: the folder of a run",
        ),
        ({"from": "net"}, "^initial.from: .*net: not a run"),
        ({"from": "text"}, "text: .*; accepted: safetensors"),
        (
            {"from": "less"},
            r"less lacks last.weight; accepted: the trained parameters of task.model by their names, such as norm.weight, and",
        ),
        ({"from": "more"}, "more has other, which the model lacks; accepted"),
        ({"from": "wide"}, r"'last.weight' has the shape \[1, 4\]; accepted: \[1, 3\], as in task.model"),
        (
            {"from": "whole", "rank": 1},
            r"initial.rank: 1, with one model in .*whole; accepted: null",
        ),
        (
            {"from": "whole", "crc32": "00000000"},
            "has the checksum .*; accepted: 00000000, as recorded",
        ),
        (
            {"from": "whole", "rnk": 1},
            r"initial.rnk: unknown field \(did you mean 'rank'\?\); accepted: crc32, from, rank",
        ),
        ({"rank": 1}, "initial.from: missing; a value is required"),
        ("comon", "initial: got 'comon'; accepted: 'common' or 'independent' or a mapping of fields"),
    ],
)
def test_invalid_initial_model_is_bad_input(tmp_path: Path, start: Any, message: str) -> None:
    whole = {name: tensor.detach().clone() for name, tensor in Net(FEATURES).named_parameters()}
    save_file(whole, tmp_path / "whole")
    save_file({**whole, "other": torch.zeros(1)}, tmp_path / "more")
    save_file({**whole, "last.weight": torch.zeros(1, 4)}, tmp_path / "wide")
    del whole["last.weight"]
    save_file(whole, tmp_path / "less")
    (tmp_path / "net").mkdir()
    (tmp_path / "text").write_text("text")
    if "from" in start:
        start = {**start, "from": str(tmp_path / start["from"])}
    with pytest.raises(BadInput, match=message):
        prepare(experiment(initial=start))


def test_run_with_another_or_no_finite_model_is_refused(origin: Run, tmp_path: Path) -> None:
    start = {"from": str(origin.path)}
    task = {"name": f"{__name__}:noise", "features": 5}
    with pytest.raises(
        BadInput, match=r"has 10 parameters and 7 values in buffers; accepted: 16 and 11, as task.model"
    ):
        prepare(experiment(initial=start, task=task))
    with pytest.raises(BadInput, match="initial.rank: 4; accepted: 0 to 3"):
        prepare(experiment(initial={**start, "rank": 4}))
    save_file({"parameters": torch.full((1, 10), torch.nan), "buffers": torch.zeros(1, 7)}, tmp_path / "nan")
    with pytest.raises(BadInput, match="initial.rank: null, of a run without finite models"):
        prepare(experiment(initial={"from": str(tmp_path / "nan")}))
    with pytest.raises(BadInput, match="not finite"):
        prepare(experiment(initial={"from": str(tmp_path / "nan"), "rank": 0}))


@pytest.mark.parametrize(("value", "lost"), [(1 + 2**-40, True), (1.5, False)])
def test_rounded_weights_are_said(tmp_path: Path, value: float, lost: bool) -> None:
    state = Net(FEATURES).double().state_dict()
    state["last.weight"].fill_(value)
    for name in ("norm.weight", "norm.bias", "last.bias", "norm.running_mean", "norm.running_var"):
        state[name].fill_(0.5)
    save_file(state, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    notes = prepare(experiment(initial={"from": str(path)})).notes()
    said = f"initial.from: {path}: 'last.weight' is float64, and was rounded to float32"
    assert (said in notes) is lost
    assert sum("rounded" in note for note in notes) == lost
