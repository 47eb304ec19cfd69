from __future__ import annotations

import pytest
import torch
from learning_tasks import MODELS
from torch import nn

from gossamer.errors import BadInput
from gossamer.learning.parameters import Field, FlatModule, Layout, flatten, initial_model
from gossamer.messages import Model


def fresh(name: str, seed: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_the_flat_vector_is_the_parameters_in_their_order(name: str) -> None:
    module = fresh(name)
    layout = Layout.of(module)
    flat = flatten(module, layout)
    assert layout.size == sum(parameter.numel() for parameter in module.parameters())
    for field, (known, parameter) in zip(layout.parameters, module.named_parameters(), strict=True):
        assert (field.name, field.shape) == (known, tuple(parameter.shape))
        assert torch.equal(field.of(flat.parameters), parameter.detach())
    for field, (known, buffer) in zip(layout.buffers, module.named_buffers(), strict=True):
        assert field.name == known
        assert torch.equal(field.of(flat.buffers), buffer.float())


@pytest.mark.parametrize("name", MODELS)
def test_a_flat_module_is_the_module(name: str) -> None:
    module, images = fresh(name).eval(), torch.randn(5, 1, 8, 8)
    flat = FlatModule(MODELS[name])
    flat.load(flatten(module, flat.layout))
    flat.module.eval()
    assert torch.equal(flat.module(images), module(images))


@pytest.mark.parametrize("name", MODELS)
def test_what_was_loaded_comes_back(name: str) -> None:
    flat = FlatModule(MODELS[name])
    module = fresh(name)
    with torch.no_grad():
        for number, buffer in enumerate(module.buffers()):
            buffer.fill_(number + 2)  # the batch counter, an integer, too
    model = flatten(module, flat.layout)
    flat.load(model)
    assert torch.equal(flat.parameters, model.parameters)
    assert torch.equal(flat.buffers(), model.buffers)
    assert torch.equal(flatten(flat.module, flat.layout).buffers, model.buffers)


def test_integer_buffers_stay_integers_and_round_a_mean() -> None:
    flat = FlatModule(lambda: nn.BatchNorm1d(1))
    flat.load(Model(torch.zeros(2), torch.tensor([0.25, 1.5, 6.75])))
    counter = dict(flat.module.named_buffers())["num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert int(counter) == 7
    assert flat.buffers().tolist() == [0.25, 1.5, 7.0]


def test_gradients_and_writes_go_through_the_vectors() -> None:
    flat = FlatModule(lambda: nn.Linear(2, 1))
    flat.parameters.copy_(torch.tensor([2.0, 3.0, 1.0]))
    output = flat.module(torch.tensor([[10.0, 100.0]]))
    assert output.item() == 321.0
    output.sum().backward()
    assert flat.gradient.tolist() == [10.0, 100.0, 1.0]
    flat.gradient.zero_()
    assert next(flat.module.parameters()).grad is not None
    assert next(flat.module.parameters()).grad.abs().sum() == 0  # type: ignore[union-attr]


def test_initial_models_are_keyed_and_disturb_nobody() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = (initial_model(MODELS["mlp"], seed) for seed in (1, 1, 2))
    FlatModule(MODELS["mlp"])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.parameters, same.parameters)
    assert not torch.equal(one.parameters, other.parameters)


def test_a_field_is_a_view_also_of_a_stack_and_also_where_it_is_a_scalar() -> None:
    vector = torch.arange(7.0)
    field, scalar = Field("a", 1, (2, 2)), Field("b", 6, ())
    assert (field.stop, scalar.stop) == (5, 7)
    field.of(vector)[0, 0] = -1.0
    assert vector[1] == -1.0
    stack = torch.stack([vector, vector + 10])
    assert field.of(stack).shape == (2, 2, 2)
    assert scalar.of(vector).item() == 6.0
    assert scalar.of(stack).tolist() == [6.0, 16.0]


def test_frozen_parameters_travel_and_are_not_trained() -> None:
    def make() -> nn.Module:
        module = nn.Linear(2, 1)
        module.bias.requires_grad_(False)
        return module

    flat = FlatModule(make)
    flat.parameters.fill_(1.0)
    flat.module(torch.ones(1, 2)).sum().backward()
    assert flat.layout.size == 3
    assert flat.gradient.tolist() == [1.0, 1.0, 0.0]


def test_what_can_not_be_flattened_is_refused() -> None:
    with pytest.raises(
        BadInput, match=r"task\.model: parameter 'weight' is torch\.float64; accepted: torch\.float32"
    ):
        Layout.of(nn.Linear(2, 1).double())
    with pytest.raises(BadInput, match=r"task\.model: the module has no parameters; accepted: at least one"):
        Layout.of(nn.ReLU())
