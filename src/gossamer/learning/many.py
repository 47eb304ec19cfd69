"""Many models at once: ``vmap`` of the loss, or of measures, over stacks of parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from gossamer.learning.parameters import Layout, loss_of, named_parameters, scores, unpacked
from gossamer.tasks.task import Pair, Task, for_each

_DENSE = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)


def is_dense(module: nn.Module) -> bool:
    """Whether all layers with parameters are linear or normalisation layers, which are faster for many models
    at once on a CPU."""
    layers = [layer for layer in module.modules() if [*layer.parameters(recurse=False)]]
    return all(isinstance(layer, _DENSE) for layer in layers)


def batching_obstacle(module: nn.Module) -> str | None:
    """The reason why a module can't train for many nodes at once, or None."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            return "separate dropout's draws by node"
        if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
            return "renormalise embeddings in place for many nodes at once"
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:  # vmap drops it
            return "leave out the gradient of an embedding's padding_idx for many nodes at once"
        if layer._backward_hooks or layer._backward_pre_hooks:
            return f"call backward hooks, as {type(layer).__name__} has, for many nodes at once"
        if isinstance(layer, nn.RNNBase):  # its kernels accept the weights of only one model
            return f"take a step of {type(layer).__name__} layers for many nodes at once"
    if any(parameter._backward_hooks for parameter in module.parameters()):
        return "call the hooks of parameters for many nodes at once"
    return None


def gradients_of_many(task: Task, module: nn.Module, data: Pair) -> Callable[..., tuple[Tensor, ...]]:
    """A function from ``(parameters [nodes, P], buffers [nodes, B], batch [nodes, samples])`` to losses
    [nodes], new buffers and gradients.

    Further arguments are the inputs of the batch, which then replace those of the data."""
    inputs, targets = data
    layout = Layout.of(module)

    def node_loss(
        leaves: dict[str, Tensor], buffers: dict[str, Tensor], x: Any, y: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tensors = {**leaves, **buffers}
        with ManyModels():
            loss = loss_of(task, scores(partial(call_with, module, tensors), x), y)
        # The forward pass may have changed buffers in place or by assignment.
        return loss, {field.name: tensors[field.name] for field in layout.buffers}

    def gradients(parameters: Tensor, buffers: Tensor, batch: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        x = unpacked(given, inputs) if given else for_each(lambda tensor: tensor[batch], inputs)
        views = named_parameters(parameters, layout.parameters)
        leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
        named = named_buffers(buffers, layout, module)
        with torch.enable_grad():
            losses, after = vmap(node_loss)(leaves, named, x, targets[batch])
            # No node's loss depends on another's parameters.
            per_tensor = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        return (
            losses.detach(),
            flatten_buffers(after, buffers, layout),
            torch.cat([gradient.reshape(len(gradient), -1) for gradient in per_tensor], dim=1),
        )

    return gradients


def call_with(module: nn.Module, tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """A module's outputs with other tensors in place of its own."""
    return functional_call(module, tensors, args, kwargs)


def named_buffers(
    v: Float[Tensor, "nodes buffers"], layout: Layout, module: nn.Module
) -> dict[str, Float[Tensor, "..."] | Int[Tensor, "..."]]:
    """Buffers by name, each in its dtype, as new tensors that a forward pass may modify."""
    named, originals = {}, dict(module.named_buffers())
    for field in layout.buffers:
        buffer = originals[field.name]
        value = field.of(v) if buffer.is_floating_point() else field.of(v).round()
        named[field.name] = value.to(buffer.dtype, copy=True)
    return named


def flatten_buffers(
    named: dict[str, Tensor], before: Float[Tensor, "nodes buffers"], layout: Layout
) -> Float[Tensor, "nodes buffers"]:
    """The flat form of buffers after a forward pass; ``before`` itself if there are none."""
    if not layout.buffers:
        return before
    return torch.cat(
        [named[field.name].detach().reshape(len(before), -1).to(before.dtype) for field in layout.buffers],
        dim=1,
    )


class ManyModels(TorchFunctionMode):
    """Replaces some functions by implementations that are fast under ``vmap``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs:
            return _linear(*args)
        if func is F.cross_entropy and _is_plain_cross_entropy(*args, **kwargs):
            return _cross_entropy(*args)
        if func in (torch.argmax, Tensor.argmax) and len(args) == 2 and not kwargs:
            return args[0].max(args[1]).indices  # the same indices, in a fifth of the time
        return func(*args, **kwargs)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In a batched product, the gradient of the first factor has the factor's memory layout; that of the
    second is transposed. The weight is therefore first, so that a step reads weight and gradient in one
    sweep."""
    outputs = (weight @ inputs.mT).mT if inputs.dim() > 1 else weight @ inputs
    return outputs if bias is None else outputs + bias


def _is_plain_cross_entropy(outputs: Tensor, targets: Tensor, **options: Any) -> bool:
    usual = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    plain = all(value == usual.get(name) for name, value in options.items())
    return plain and outputs.dim() == 2 and targets.dim() == 1


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with class numbers as targets; -100 is ignored. Under ``vmap``, torch's implementation
    imports a library for symbolic algebra, which takes half a second."""
    counted = targets != -100
    classes = torch.where(counted, targets, 0).unsqueeze(0)
    # Samples are contiguous, as in the output of linear layers. With few contiguous classes it takes five
    # times as long.
    chosen = F.log_softmax(outputs.mT, 0).gather(0, classes).squeeze(0)
    return -torch.where(counted, chosen, 0.0).sum() / counted.sum()
