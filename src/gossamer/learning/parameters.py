"""Flat vectors and modules: all trained parameters as one float32 vector, all buffers as another, and gradients as functions
of them.

The order is that of ``module.named_parameters()``. Integer buffers (a batch counter) are stored as whole numbers. Frozen
parameters (``requires_grad=False``) and constants (non-persistent buffers) are in no vector: they stay in the modules, see
:class:`SharedConstants`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from gossamer.errors import BadInput
from gossamer.learning.capture import Function, storage_of
from gossamer.messages.tags import Model
from gossamer.randomness import SHARED, torch_seed
from gossamer.tasks.task import Pair, Task, for_each


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
        """The layout of a module; a BadInput if a trained parameter is not float32, or there is none."""
        for name, parameter in _trained(module):
            if parameter.dtype != torch.float32:
                raise BadInput(
                    f"task.model: parameter {name!r} is {parameter.dtype}; accepted: torch.float32"
                )
        layout = Layout(_fields(_trained(module)), _fields(_buffers(module)))
        if layout.size == 0:
            frozen = sum(1 for _ in module.parameters())
            found = f"all {frozen} parameters are frozen" if frozen else "the module has no parameters"
            raise BadInput(f"task.model: {found}; accepted: at least one that is trained")
        return layout


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that change. Those that are not persistent are constants, such as a causal mask."""
    kept = module.state_dict().keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


class SharedConstants:
    """Creates modules that share the frozen parameters and the constants of one of them, drawn for a seed: a run has them
    once in each process, for all nodes, and they are the same in every process. A forward pass must not write them."""

    def __init__(self, make: Callable[[], nn.Module], seed: int) -> None:
        self._make = make
        with drawing_from(seed):
            module = make()
        kept = module.state_dict().keys()
        frozen = [
            each for each in module.named_parameters(remove_duplicate=False) if not each[1].requires_grad
        ]
        buffers = [each for each in module.named_buffers(remove_duplicate=False) if each[0] not in kept]
        self._constants = dict([*frozen, *buffers])

    def __call__(self) -> nn.Module:
        module = self._make()
        for name, tensor in self._constants.items():
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, tensor)
        return module


def sharing_constants(task: Task, seed: int) -> Task:
    """The same task with models that share their constants. Their key is that of the common initial model: all processes have
    the same ones, also with independent models."""
    return replace(task, model=SharedConstants(task.model, torch_seed(seed, "initial", SHARED)))


def _fields(named: Iterable[tuple[str, Tensor]]) -> tuple[Field, ...]:
    fields: list[Field] = []
    for name, tensor in named:
        start, whole = fields[-1].stop if fields else 0, not tensor.is_floating_point()
        fields.append(Field(name, start, tuple(tensor.shape), whole))
    return tuple(fields)


def flatten(module: nn.Module) -> Model:
    """A module's trained parameters [P] and buffers [B] as new flat vectors on the CPU."""

    def flat(named: Iterable[tuple[str, Tensor]]) -> Tensor:
        parts = [tensor.detach().reshape(-1).to("cpu", torch.float32) for _, tensor in named]
        return torch.cat(parts) if parts else torch.empty(0)

    return Model(flat(_trained(module)), flat(_buffers(module)))


def initial_model(make: Callable[[], nn.Module], seed: int) -> Model:
    """The flat vectors of a fresh module whose initial values are drawn for a seed."""
    with drawing_from(seed):
        return flatten(make())


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Within this context, what torch draws on the CPU follows from a seed."""
    with torch.random.fork_rng(devices=[]):
        # (torch.manual_seed seeds the generators of all other devices too, which takes 0.4 ms.)
        torch.default_generator.manual_seed(seed)
        yield


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
    named, own = {}, dict(module.named_buffers())
    for field in layout.buffers:
        buffer = own[field.name]
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


def gradient_function(
    task: Task,
    module: nn.Module,
    data: Pair,
    *,
    nodes: bool,
    compiled: bool = False,
) -> Function:
    """``(parameters [P], buffers [B], batch [samples]) -> (loss, buffers after it [B], gradient [P])``.

    After the batch may follow its inputs (each one of them, if there are several), which then take the place of the data's.
    The module is the model in training mode; only its constants are used. With ``nodes``, arguments and results are stacks of
    many nodes, [nodes, P] and so on; the gradients are those of the fields, each in its shape, which saves copying them into
    one vector. With ``compiled``, the forward and backward pass run through torch.compile."""
    inputs, targets = data
    layout = Layout.of(module)

    def node_loss(
        leaves: dict[str, Tensor], buffers: dict[str, Tensor], x: Any, y: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tensors = {**leaves, **buffers}
        with ForMany() if nodes else nullcontext():
            outputs = forward(module, tensors, x)
            loss = one_value("task.loss", task.loss(outputs, y), "a tensor of one value")
        # The forward pass may have changed buffers in place or by assignment.
        return loss, {field.name: tensors[field.name] for field in layout.buffers}

    loss_of: Any = vmap(node_loss) if nodes else torch.compile(node_loss) if compiled else node_loss

    def gradients(parameters: Tensor, buffers: Tensor, batch: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        x = unpacked(given, inputs) if given else for_each(lambda tensor: tensor[batch], inputs)
        y = targets[batch]
        views = named_parameters(parameters, layout.parameters)
        leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
        own = named_buffers(buffers, layout, module)
        with torch.enable_grad():
            losses, after = loss_of(leaves, own, x if nodes else for_each(channels_last, x), y)
            # No node's loss depends on another's parameters, so the gradient of the sum holds all nodes' gradients. A
            # parameter that the loss does not use has a gradient of zeros.
            found = torch.autograd.grad(
                losses.sum() if nodes else losses, list(leaves.values()), materialize_grads=True
            )
        after = flatten_buffers(after, buffers, layout)
        if nodes:
            return losses.detach(), after, *_apart(found)
        return losses.detach(), after, torch.cat([gradient.reshape(-1) for gradient in found])

    return gradients


def packed(inputs: Any) -> tuple[Tensor, ...]:
    """Inputs as tensors in order."""
    return tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)


def unpacked(tensors: Sequence[Tensor], like: Any) -> Any:
    """Inputs again, named like others."""
    return dict(zip(like, tensors, strict=True)) if isinstance(like, dict) else tensors[0]


def forward(module: nn.Module, tensors: dict[str, Tensor], inputs: Any) -> Tensor:
    """A module's outputs for some inputs, with other tensors in place of its own. A dict of inputs has its arguments by name.
    Modules of transformers return ``logits``, along with other things."""
    named = isinstance(inputs, dict)
    outputs = functional_call(module, tensors, () if named else (inputs,), inputs if named else None)
    scores: Tensor = getattr(outputs, "logits", outputs)
    return scores


def one_value(field: str, value: object, accepted: str) -> Tensor:
    """What a loss or a metric returned; a TypeError unless it is a tensor of one value."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"{field}: gives {found}; accepted: the mean over the samples, {accepted}")


class ForMany(TorchFunctionMode):
    """Replaces some functions by forms that are fast under ``vmap``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs:
            return _linear(*args)
        if func is F.cross_entropy and _is_plain_cross_entropy(*args, **kwargs):
            return _cross_entropy(*args)
        if func in (torch.argmax, Tensor.argmax) and kwargs.keys() <= {"input", "dim", "keepdim"}:
            return _argmax(*args, **kwargs)
        plain = (args[3] if len(args) > 3 else kwargs.get("max_norm")) is None  # else it writes the table
        if func is F.embedding and plain and not torch.is_grad_enabled():
            return _embedding(*args, **kwargs)
        return func(*args, **kwargs)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The gradient of the first factor of a batched product has the factor's memory layout, that of the second is
    transposed. So the weight comes first, and a step reads both in one sweep."""
    outputs = (weight @ inputs.mT).mT if inputs.dim() > 1 else weight @ inputs
    return outputs if bias is None else outputs + bias


def _is_plain_cross_entropy(outputs: Tensor, targets: Tensor, **options: Any) -> bool:
    usual = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    plain = all(value == usual.get(name) for name, value in options.items())
    return plain and outputs.dim() == 2 and targets.dim() == 1


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """With class numbers as targets, where -100 is ignored. Under ``vmap``, torch's own form first imports a library for
    symbolic algebra, which takes half a second."""
    counted = targets != -100
    classes = torch.where(counted, targets, 0).unsqueeze(0)
    # Samples are contiguous, as linear layers leave them: with few contiguous classes it takes five times as long.
    chosen = F.log_softmax(outputs.mT, 0).gather(0, classes).squeeze(0)
    return -torch.where(counted, chosen, 0.0).sum() / counted.sum()


def _embedding(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Reads only the rows that are looked up, where torch's own form under ``vmap`` copies the whole table."""
    return weight.index_select(0, input.flatten()).view(*input.shape, weight.shape[1])


def _argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The same indices, in a fifth of the time."""
    # (The mode is off here, so this is torch's own argmax.)
    return torch.argmax(input, dim, keepdim) if dim is None else input.max(dim, keepdim).indices


def _apart(gradients: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients that share no memory, since an optimizer may write them. Autograd returns the same tensor for both terms of a
    sum, slices of one for concatenated tensors, and one repeated value where all are equal."""
    apart: list[Tensor] = []
    seen: set[int] = set()
    for gradient in gradients:
        memory = storage_of(gradient)
        repeated = gradient.numel() > 1 and 0 in gradient.stride()
        apart.append(gradient.clone() if memory in seen or repeated else gradient)
        seen.add(memory)
    return apart


def channels_last(inputs: Tensor) -> Tensor:
    """Images in the memory layout in which small convolutions run fastest on a CPU."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs
