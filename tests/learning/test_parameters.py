from __future__ import annotations

import pytest
import torch
from learning_tasks import MODELS
from torch import nn

from gossamer.errors import BadInput
from gossamer.learning.many import named_buffers
from gossamer.learning.parameters import (
    Field,
    FlatModule,
    Layout,
    ModuleMaker,
    bare_module,
    flatten,
    initial_model,
)
from gossamer.messages.tags import Model


def fresh(name: str, seed: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_flat_vector_holds_the_parameters_in_order(name: str) -> None:
    module = fresh(name)
    layout = Layout.of(module)
    flat = flatten(module)
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert layout.size == sum(parameter.numel() for _, parameter in trained)
    for field, (known, parameter) in zip(layout.parameters, trained, strict=True):
        assert (field.name, field.shape) == (known, tuple(parameter.shape))
        assert torch.equal(field.of(flat.parameters), parameter.detach())
    for field, (known, buffer) in zip(layout.buffers, module.named_buffers(), strict=True):
        assert field.name == known
        assert torch.equal(field.of(flat.buffers), buffer.float())


def called(module: nn.Module, model: Model, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A module's outputs with the values of flat vectors, and its buffers afterwards."""
    flat = FlatModule(module)
    flat.load(model)
    outputs = flat.module(images)
    return outputs, flat.buffers() if flat.layout.buffers else model.buffers


@pytest.mark.parametrize("name", MODELS)
def test_module_loaded_from_flat_vectors_gives_the_same_outputs(name: str) -> None:
    module, images = fresh(name).eval(), torch.randn(5, 1, 8, 8)
    model = flatten(module)
    outputs, buffers = called(bare_module(MODELS[name]).eval(), model, images)
    assert torch.equal(outputs, module(images))
    assert torch.equal(buffers, model.buffers)


@pytest.mark.parametrize("name", MODELS)
def test_buffers_written_by_a_forward_pass_are_returned(name: str) -> None:
    module, images = fresh(name).train(), torch.randn(5, 1, 8, 8)
    model = flatten(module)
    before = model.buffers.clone()
    _, buffers = called(bare_module(MODELS[name]).train(), model, images)
    module(images)
    assert torch.equal(buffers, flatten(module).buffers)
    assert torch.equal(model.buffers, before)


def test_integer_buffers_stay_integers_and_are_rounded() -> None:
    module = nn.BatchNorm1d(1)
    flat = FlatModule(module)
    flat.load(Model(torch.zeros(2), torch.tensor([0.25, 1.5, 6.75])))
    assert module.num_batches_tracked is not None
    assert module.num_batches_tracked.dtype == torch.int64
    assert flat.buffers().tolist() == [0.25, 1.5, 7.0]
    stacked = named_buffers(torch.tensor([[0.25, 1.5, 6.75], [1.0, 1.0, 2.2]]), Layout.of(module), module)
    assert stacked["num_batches_tracked"].tolist() == [7, 2]


def test_initial_models_are_keyed_and_leave_the_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = (initial_model(MODELS["mlp"], seed) for seed in (1, 1, 2))
    bare_module(MODELS["mlp"])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.parameters, same.parameters)
    assert not torch.equal(one.parameters, other.parameters)


def test_field_is_a_view_of_vectors_and_of_stacks() -> None:
    vector = torch.arange(7.0)
    field, scalar = Field("a", 1, (2, 2)), Field("b", 6, ())
    assert (field.stop, scalar.stop) == (5, 7)
    field.of(vector)[0, 0] = -1.0
    assert vector[1] == -1.0
    stack = torch.stack([vector, vector + 10])
    assert field.of(stack).shape == (2, 2, 2)
    assert scalar.of(vector).item() == 6.0
    assert scalar.of(stack).tolist() == [6.0, 16.0]


def test_unsupported_modules_are_refused() -> None:
    with pytest.raises(
        BadInput, match=r"task\.model: parameter 'weight' is torch\.float64; accepted: torch\.float32"
    ):
        Layout.of(nn.Linear(2, 1).double())
    with pytest.raises(BadInput, match=r"task\.model: the module has no parameters; accepted: at least one"):
        Layout.of(nn.ReLU())
    frozen = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(BadInput, match=r"task\.model: all 2 parameters are frozen; accepted: at least one"):
        Layout.of(frozen)


class Constants(nn.Module):
    """A tied frozen weight, a frozen LSTM, a half-precision parameter, a constant and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, batch_first=True).requires_grad_(False)
        self.one, self.two = nn.Linear(3, 3, bias=False).requires_grad_(False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.coarse = nn.Parameter(torch.rand(3, dtype=torch.float16), requires_grad=False)
        self.register_buffer("constant", torch.rand(3), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.trained = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.trained(
            self.two(self.one(self.lstm(x)[0])) * self.coarse + self.constant
        )
        return outputs


def test_modules_share_frozen_parameters_and_constants() -> None:
    make = ModuleMaker(Constants, 7)
    one, other = make(), make()
    assert isinstance(one, Constants)
    assert isinstance(other, Constants)
    for name, parameter in other.named_parameters():
        assert (one.get_parameter(name) is parameter) == (not name.startswith("trained"))
    assert one.one.weight is one.two.weight
    assert one.constant is other.constant
    assert one.count is not other.count
    layout = Layout.of(one)
    assert [field.name for field in (*layout.parameters, *layout.buffers)] == [
        "trained.weight",
        "trained.bias",
        "count",
    ]
    torch.manual_seed(7)
    drawn = Constants()
    drawn.trained = other.trained
    x = torch.rand(2, 4, 3)
    expected = drawn(x)
    assert torch.equal(other(x), expected)
    assert torch.equal(called(one, flatten(other), x)[0], expected)
    again = ModuleMaker(Constants, 7)()
    assert torch.equal(called(again, flatten(other), x)[0], expected)
    assert not torch.equal(called(ModuleMaker(Constants, 8)(), flatten(other), x)[0], expected)
