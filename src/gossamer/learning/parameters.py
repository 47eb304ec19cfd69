"""Flat vector <-> module: all parameters as one float32 vector, and all buffers as another.

The order is that of ``module.named_parameters()``. Integer buffers (a batch counter) are stored as whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gossamer.errors import BadInput
from gossamer.messages.tags import Model


@dataclass(frozen=True)
class Field:
    """The position of one named tensor in a flat vector."""

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
    """The shapes behind the flat vectors: one field per parameter and per buffer."""

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
        """The layout of a module; a BadInput if a parameter is not float32, or there is none."""
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32:
                raise BadInput(f"task.model: parameter {name!r} is {parameter.dtype}; accepted: float32")
        layout = Layout(_fields(module.named_parameters()), _fields(module.named_buffers()))
        if layout.size == 0:
            raise BadInput("task.model: the module has no parameters; accepted: at least one")
        return layout


def _fields(named: Iterable[tuple[str, Tensor]]) -> tuple[Field, ...]:
    fields: list[Field] = []
    for name, tensor in named:
        fields.append(Field(name, fields[-1].stop if fields else 0, tuple(tensor.shape)))
    return tuple(fields)


def flatten(module: nn.Module) -> Model:
    """A module's parameters [P] and buffers [B] as new flat vectors on the CPU."""

    def flat(tensors: Iterable[Tensor]) -> Tensor:
        parts = [tensor.detach().reshape(-1).to("cpu", torch.float32) for tensor in tensors]
        return torch.cat(parts) if parts else torch.empty(0)

    return Model(flat(module.parameters()), flat(module.buffers()))


def initial_model(make: Callable[[], nn.Module], seed: int) -> Model:
    """The flat vectors of a fresh module whose initial values are drawn for a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return flatten(make())


def bare_module(make: Callable[[], nn.Module], device: torch.device | str = "cpu") -> nn.Module:
    """A module whose initial values are not used. Drawing them leaves torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        return make().to(device)


def named_parameters(
    v: Float[Tensor, "*nodes params"], fields: Iterable[Field]
) -> dict[str, Float[Tensor, "..."]]:
    """Fields of a vector, or of each row of a stack of vectors, by name: views."""
    return {field.name: field.of(v) for field in fields}


def named_buffers(
    v: Float[Tensor, "*nodes buffers"], layout: Layout, module: nn.Module
) -> dict[str, Float[Tensor, "..."] | Int[Tensor, "..."]]:
    """Buffers by name, each in its dtype, as new tensors that a forward pass may write."""
    named = {}
    for field, buffer in zip(layout.buffers, module.buffers(), strict=True):
        value = field.of(v) if buffer.is_floating_point() else field.of(v).round()
        named[field.name] = value.to(buffer.dtype, copy=True)
    return named


def flatten_buffers(
    named: Mapping[str, Tensor], before: Float[Tensor, "*nodes buffers"], layout: Layout
) -> Float[Tensor, "*nodes buffers"]:
    """The flat form of buffers that a forward pass has written; ``before`` itself where there are none."""
    if not layout.buffers:
        return before
    values = [named[field.name].detach().reshape(*before.shape[:-1], -1) for field in layout.buffers]
    return torch.cat([value.to(before.dtype) for value in values], dim=-1)
