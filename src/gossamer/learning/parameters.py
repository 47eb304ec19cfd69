"""Flat vectors and modules: all trained parameters as one float32 vector, all buffers as another.

The order is that of ``module.named_parameters()``. Integer buffers (a batch counter) are stored as whole
numbers. Frozen parameters (``requires_grad=False``) and constants (non-persistent buffers) are not part of
the vectors: they stay in the modules (:class:`ModuleMaker`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gossamer.errors import BadInput
from gossamer.learning.guard import refusing
from gossamer.messages.tags import Model
from gossamer.randomness import SHARED, torch_seed
from gossamer.tasks.task import Task, for_each


@dataclass(frozen=True)
class Field:
    """The position of one named tensor in a flat vector."""

    name: str
    start: int
    shape: tuple[int, ...]
    integer: bool = False  # a buffer of whole numbers, such as a counter

    @property
    def stop(self) -> int:
        """The first coordinate after this field."""
        return self.start + prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the tensor as a matrix: a convolution's kernel [out, in, height, width] has out rows, and a
        vector has one column."""
        return (self.shape[0] if self.shape else 1), prod(self.shape[1:])

    def of(self, v: Float[Tensor, "*nodes params"]) -> Float[Tensor, "..."]:
        """The field as a view of a vector, or of each row of a stack of vectors."""
        return v[..., self.start : self.stop].view((*v.shape[:-1], *self.shape))


MAX_WHOLE = 2**24  # float32 holds every integer up to this one


@dataclass(frozen=True)
class Layout:
    """The shapes behind the flat vectors: one field per trained parameter and per persistent buffer."""

    parameters: tuple[Field, ...]
    buffers: tuple[Field, ...]

    @property
    def size(self) -> int:
        """P, the number of trained values."""
        return self.parameters[-1].stop if self.parameters else 0

    @property
    def buffer_size(self) -> int:
        """B, the number of values in buffers."""
        return self.buffers[-1].stop if self.buffers else 0

    @staticmethod
    def of(module: nn.Module) -> Layout:
        """The layout of a module. BadInput if a trained parameter is not float32, or if no parameter is
        trained."""
        trained, buffers = _trained(module), _buffers(module)
        for name, parameter in trained:
            if parameter.dtype != torch.float32:
                raise BadInput(
                    f"task.model: parameter {name!r} is {parameter.dtype}; accepted: torch.float32"
                )
        for name, buffer in buffers:
            has_values = buffer.numel() and not buffer.is_meta
            integers = has_values and not (buffer.is_floating_point() or buffer.is_complex())
            if buffer.is_complex() or (integers and int(buffer.to(torch.int64).abs().max()) > MAX_WHOLE):
                kind = "complex" if buffer.is_complex() else f"an integer above {MAX_WHOLE:,}"
                raise BadInput(
                    f"task.model: buffer {name!r} has {kind}, but buffers are sent as float32; accepted: other values, or"
                    " persistent=False"
                )
        layout = Layout(_fields(trained), _fields(buffers))
        if layout.size == 0:
            frozen = sum(1 for _ in module.parameters())
            problem = f"all {frozen} parameters are frozen" if frozen else "the module has no parameters"
            raise BadInput(f"task.model: {problem}; accepted: at least one that is trained")
        return layout


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The persistent buffers. Non-persistent buffers are constants, such as a causal mask."""
    saved = module.state_dict().keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in saved]


class ModuleMaker:
    """Creates the modules of a run, each like the first one.

    Lazy layers get their shapes from a call with some ``inputs``. All modules share the frozen parameters and the constants
    of the first one, which are drawn for a seed: a process has only one copy for all nodes, and all processes have the same
    values. A forward pass must not modify them. BadInput if the user's function or the module raises an error, or for a
    module that is not like the first one.

    Attributes:
        layout: that of each module.
        names: every name of a parameter or buffer, with the first name of the same tensor, which the layout has.
        constants: the shared tensors, by every name."""

    def __init__(self, make: Callable[[], nn.Module], seed: int, inputs: Any = None) -> None:
        self._make, self._inputs = make, inputs
        with drawing_from(seed):
            module = self._made()
        with refusing("task.model", _FRESH):
            self.layout = Layout.of(module)
            saved = module.state_dict().keys()
            parameters = dict(module.named_parameters(remove_duplicate=False))
            buffers = dict(module.named_buffers(remove_duplicate=False))
        self.constants: dict[str, Tensor] = {
            **{name: parameter for name, parameter in parameters.items() if not parameter.requires_grad},
            **{name: buffer for name, buffer in buffers.items() if name not in saved},
        }
        first: dict[int, str] = {}
        self.names = {name: first.setdefault(id(t), name) for name, t in {**parameters, **buffers}.items()}

    def __call__(self) -> nn.Module:
        module = self._made()
        with refusing("task.model", _FRESH):
            if Layout.of(module) != self.layout:
                raise BadInput(
                    "task.model: a later call returns a module with other parameters or buffers; accepted: modules that"
                    " differ only in their values"
                )
            for name, tensor in self.constants.items():
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, tensor)
        return module

    def _made(self) -> nn.Module:
        with refusing("task.model", _FRESH):
            module: Any = self._make()
            if not isinstance(module, nn.Module):
                raise BadInput(f"task.model: returns {type(module).__name__}; accepted: {_FRESH}")
            if self._inputs is not None and _lazy(module):
                self._materialise(module)
            for _, parameter in _trained(module):
                if hasattr(parameter, _MADE):
                    raise BadInput(f"task.model: returns the same parameters twice; accepted: {_FRESH}")
                setattr(parameter, _MADE, True)
            if lazy := _lazy(module):
                raise BadInput(
                    f"task.model: {lazy[0]!r} has no shape yet, as in a lazy layer that a call does not reach; accepted:"
                    " layers with shapes"
                )
        return module

    def _materialise(self, module: nn.Module) -> None:
        """Give lazy layers their shapes by a call in evaluation mode, which leaves the statistics of batch norms alone."""
        training = module.training
        module.eval()
        with torch.no_grad():
            scores(module, for_each(torch.clone, self._inputs))
        module.train(training)


_MADE = "_gossamer_made"  # attribute of parameters of a module that was returned before
_FRESH = "a function that returns a fresh nn.Module at each call"


def _lazy(module: nn.Module) -> list[str]:
    """The names of parameters and buffers without a shape."""
    named = chain(module.named_parameters(), module.named_buffers())
    return [name for name, tensor in named if is_lazy(tensor)]


def with_maker(task: Task, seed: int) -> tuple[Task, ModuleMaker]:
    """The same task with a :class:`ModuleMaker` as its model, and this. The key of constants is that of the common initial
    model, so all processes have the same ones, even with independent models."""
    inputs = for_each(lambda tensor: tensor[:2], task.train[0])
    maker = ModuleMaker(task.model, torch_seed(seed, "initial", SHARED), inputs)
    return replace(task, model=maker), maker


def _fields(named: Iterable[tuple[str, Tensor]]) -> tuple[Field, ...]:
    fields: list[Field] = []
    for name, tensor in named:
        start, integer = fields[-1].stop if fields else 0, not tensor.is_floating_point()
        fields.append(Field(name, start, tuple(tensor.shape), integer))
    return tuple(fields)


def flatten(module: nn.Module) -> Model:
    """A module's trained parameters [P] and buffers [B] as new flat vectors on the CPU."""

    def flat(named: Iterable[tuple[str, Tensor]]) -> Tensor:
        parts = [tensor.detach().reshape(-1).to("cpu", torch.float32) for _, tensor in named]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32)

    return Model(flat(_trained(module)), flat(_buffers(module)))


def initial_model(make: Callable[[], nn.Module], seed: int) -> Model:
    """The flat vectors of a fresh module whose initial values are drawn for a seed."""
    with drawing_from(seed):
        return flatten(make())


@contextmanager
def drawing_from(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Within this context, torch's draws on the CPU and on a device follow from a seed."""
    gpus = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        seed_generators(seed, device)
        yield


@contextmanager
def generators_restored(device: torch.device | str = "cpu") -> Iterator[None]:
    """After this context, the global generators of Python, NumPy and torch have the states that they had before it."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    gpus = [device] if torch.device(device).type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def seed_generators(seed: int, device: torch.device | str) -> None:
    """Seed only the generators from which a module on this device may draw; seeding all would take 0.4
    ms."""
    torch.default_generator.manual_seed(seed)
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed_all(seed)


def generator_states(device: torch.device | str) -> list[Tensor]:
    """The states of the generators from which a module on this device may draw."""
    on_device = [torch.cuda.get_rng_state(device)] if torch.device(device).type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def bare_module(make: Callable[[], nn.Module], device: torch.device | str = "cpu") -> nn.Module:
    """A module whose initial values are not used. Creating it does not change the state of torch's
    generator."""
    with torch.random.fork_rng(devices=[]):
        return make().to(device)


def named_parameters(
    v: Float[Tensor, "*nodes params"], fields: Iterable[Field]
) -> dict[str, Float[Tensor, "..."]]:
    """Fields of a vector, or of each row of a stack of vectors, by name, as views."""
    return {field.name: field.of(v) for field in fields}


class FlatModule:
    """A module whose trained parameters are views of one vector, ``parameters`` [P]."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.layout = module, Layout.of(module)
        self.laid_out = channels_last if _begins_with_convolution(module) else lambda inputs: inputs
        self._trained = [parameter for _, parameter in _trained(module)]
        self.parameters = torch.empty(self.layout.size, dtype=torch.float32, device=self._trained[0].device)
        for field, parameter in zip(self.layout.parameters, self._trained, strict=True):
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise BadInput(
                    f"task.model: {field.name!r} has a hook on its accumulated gradient, which no trainer calls; accepted:"
                    " a hook on the gradient (register_hook)"
                )
            parameter.data = field.of(self.parameters)
        paths = (field.name.rpartition(".") for field in self.layout.buffers)
        self._places = [(module.get_submodule(path), leaf) for path, _, leaf in paths]

    def load(self, model: Model) -> None:
        """Write a model's values into the module."""
        self.parameters.copy_(model.parameters)
        with torch.no_grad():
            for field, buffer in zip(self.layout.buffers, self._buffers(), strict=True):
                value = field.of(model.buffers)
                buffer.copy_(value if buffer.is_floating_point() else value.round())

    def buffers(self) -> Float[Tensor, " buffers"]:
        """The values of the buffers, which a forward pass may have modified or assigned."""
        return torch.cat([buffer.detach().reshape(-1).float() for buffer in self._buffers()])

    def _buffers(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self._places]

    def gradient(self, loss: Tensor) -> Float[Tensor, " params"]:
        """The gradient of a loss, with zeros for parameters that it does not use. Buffers assigned in the
        forward pass are detached, so that the next step does not backpropagate into this one."""
        gradients = torch.autograd.grad(loss, self._trained, materialize_grads=True)
        for module, name in self._places:
            if (buffer := getattr(module, name)).requires_grad:
                setattr(module, name, buffer.detach())
        return torch.cat([gradient.reshape(-1) for gradient in gradients])


def packed(inputs: Any) -> tuple[Tensor, ...]:
    """Inputs as tensors in order."""
    return tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)


def unpacked(tensors: Sequence[Tensor], like: Any) -> Any:
    """The inverse of :func:`packed`: tensors as inputs with the names in ``like``."""
    return dict(zip(like, tensors, strict=True)) if isinstance(like, dict) else tensors[0]


def scores(call: Callable[..., Any], inputs: Any) -> Any:
    """The outputs of a module for some inputs: a tensor, or what loss and metrics take; a dict holds its arguments by name.
    Modules of transformers return an object with ``logits``."""
    outputs = call(**inputs) if isinstance(inputs, dict) else call(inputs)
    return getattr(outputs, "logits", outputs)


def one_value(field: str, value: object, accepted: str) -> Tensor:
    """The value returned by a loss or a metric, without axes. TypeError unless it is a tensor of one
    value."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value if value.dim() == 0 else value.reshape(())
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"{field}: returns {kind}; accepted: the mean over the samples, {accepted}")


def loss_of(task: Task, outputs: Any, targets: Tensor) -> Tensor:
    """The task's loss. TypeError unless it is one value."""
    return one_value("task.loss", task.loss(outputs, targets), "a tensor of one value")


def _begins_with_convolution(module: nn.Module) -> bool:
    """Whether a trained convolution precedes all group norms. (Torch crashes in the backward pass of a
    group norm whose input is ``channels_last`` and needs no gradient.)"""
    kinds = (layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.GroupNorm))
    first = next(kinds, None)
    return isinstance(first, nn.Conv2d) and first.weight.requires_grad


def channels_last(inputs: Tensor) -> Tensor:
    """Images in the memory layout that is fastest for small convolutions on a CPU."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs


_SEEN = "_gossamer_finite"  # attribute of tensors known to be finite: their version at the check


def is_finite(vector: Tensor) -> bool:
    """Whether all values of a tensor are finite; integers are. It takes one pass for each version of a
    tensor."""
    if getattr(vector, _SEEN, None) == vector._version:
        return True
    if not vector.dtype.is_floating_point or vector.layout is not torch.strided or vector.is_meta:
        return True  # the last two can't be sent
    # If a sum is finite, so are its terms; the converse does not hold.
    total = vector.sum() if vector.dtype is torch.float32 else vector.sum(dtype=_wide(vector))
    if not (math.isfinite(total.item()) or vector.isfinite().all().item()):
        return False
    setattr(vector, _SEEN, vector._version)
    return True


def note_finite(vectors: Iterable[Tensor], finite: Iterable[bool]) -> None:
    """Note which tensors are known to be finite, so that :func:`is_finite` needs no pass over them. (On a GPU it would
    wait for all earlier work, once for each tensor.)"""
    for vector, known in zip(vectors, finite, strict=True):
        if known:
            setattr(vector, _SEEN, vector._version)


def _wide(vector: Tensor) -> torch.dtype:
    return torch.float64 if vector.dtype is torch.float64 else torch.float32
