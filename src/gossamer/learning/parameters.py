"""Flat vector <-> module: parameters (and, beside them, buffers) as one float32 vector each.

The order is that of ``module.named_parameters()``. Integer buffers (a batch counter) are kept in the buffer
vector as whole numbers, so that a whole model is two float32 vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gossamer.errors import BadInput
from gossamer.messages import Model


@dataclass(frozen=True)
class Field:
    """Where one named tensor lies in a flat vector."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The first coordinate after this field."""
        return self.start + prod(self.shape)

    def of(self, v: Float[Tensor, "*nodes params"]) -> Float[Tensor, "..."]:
        """The field as a view of a vector, or of each row of a stack of vectors."""
        return v[..., self.start : self.stop].view((*v.shape[:-1], *self.shape))


@dataclass(frozen=True)
class Layout:
    """The shapes behind the flat vectors: a field a parameter, a field a buffer."""

    parameters: tuple[Field, ...]
    buffers: tuple[Field, ...]

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return self.parameters[-1].stop if self.parameters else 0

    @property
    def buffer_size(self) -> int:
        """B, the number of values in buffers."""
        return self.buffers[-1].stop if self.buffers else 0

    @staticmethod
    def of(module: nn.Module) -> Layout:
        """The layout of a module.

        Raises:
            BadInput: if a parameter is not float32, or there is none.
        """
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32:
                raise BadInput(
                    f"task.model: parameter {name!r} is {parameter.dtype}; accepted: torch.float32"
                )
        layout = Layout(_fields(list(module.named_parameters())), _fields(list(module.named_buffers())))
        if layout.size == 0:
            raise BadInput("task.model: the module has no parameters; accepted: at least one")
        return layout


def _fields(named: list[tuple[str, Tensor]]) -> tuple[Field, ...]:
    fields, start = [], 0
    for name, tensor in named:
        fields.append(Field(name, start, tuple(tensor.shape)))
        start += tensor.numel()
    return tuple(fields)


def flatten(module: nn.Module, layout: Layout) -> Model:
    """A module's parameters [P] and buffers [B] as new flat vectors on the CPU."""
    parameters = torch.empty(layout.size)
    buffers = torch.empty(layout.buffer_size)
    with torch.no_grad():
        for field, tensor in zip(layout.parameters, module.parameters(), strict=True):
            field.of(parameters).copy_(tensor)
        for field, buffer in zip(layout.buffers, module.buffers(), strict=True):
            field.of(buffers).copy_(buffer)
    return Model(parameters, buffers)


def initial_model(make: Callable[[], nn.Module], seed: int) -> Model:
    """The flat vectors of a fresh module whose initial values are drawn for a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make()
    return flatten(module, Layout.of(module))


class FlatModule:
    """A module whose parameters, and their gradients, are views of two flat vectors.

    Args:
        make: makes the module.
        device: where it computes.

    Attributes:
        parameters: the parameter vector, float32 [P]; writing it changes the module.
        gradient: the gradient vector, float32 [P]; ``loss.backward()`` adds to it.
        frozen: the fields of parameters that don't require a gradient: no step moves them.
    """

    def __init__(self, make: Callable[[], nn.Module], device: torch.device | str = "cpu") -> None:
        # Its own initial values are never used, so drawing them must not disturb anyone's generator.
        with torch.random.fork_rng(devices=[]):
            self.module = make().to(device)
        self.layout = Layout.of(self.module)
        self.parameters = torch.empty(self.layout.size, device=device)
        self.gradient = torch.zeros(self.layout.size, device=device)
        for field, parameter in zip(self.layout.parameters, self.module.parameters(), strict=True):
            parameter.data = field.of(self.parameters)
            if parameter.requires_grad:
                parameter.grad = field.of(self.gradient)
        self.frozen = tuple(
            field
            for field, parameter in zip(self.layout.parameters, self.module.parameters(), strict=True)
            if not parameter.requires_grad
        )
        self._buffers = list(self.module.buffers())

    def load(self, model: Model) -> None:
        """Copy a model in."""
        self.parameters.copy_(model.parameters)
        self._load_buffers(model.buffers)

    def _load_buffers(self, flat: Tensor) -> None:
        for field, buffer in zip(self.layout.buffers, self._buffers, strict=True):
            value = field.of(flat)
            buffer.copy_(value if buffer.is_floating_point() else value.round())

    def buffers(self) -> Float[Tensor, " buffers"]:
        """The module's buffers now, as a new vector [B]."""
        flat = torch.empty(self.layout.buffer_size, device=self.parameters.device)
        for field, buffer in zip(self.layout.buffers, self._buffers, strict=True):
            field.of(flat).copy_(buffer)
        return flat
