"""The loss of a model and its gradient, as a pure function of flat vectors: of one node, or of many at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from gossamer.learning.capture import Function
from gossamer.learning.parameters import Field, Layout, flatten_buffers, named_buffers, named_parameters
from gossamer.tasks.task import Task


def gradient_function(
    task: Task, module: nn.Module, data: tuple[Tensor, Tensor], trained: tuple[Field, ...], *, nodes: bool
) -> Function:
    """``(parameters [P], buffers [B], batch [samples]) -> (loss, buffers after it [B], *gradients)``, with the gradients
    of the trained fields in their own shapes.

    Args:
        task: gives the loss.
        module: the model, in training mode; the values in it are not used.
        data: the training data that batches index.
        trained: the fields that have a gradient; the others are frozen.
        nodes: stack the arguments and results of many nodes: [nodes, P] and so on.
    """
    inputs, targets = data
    layout = Layout.of(module)
    frozen = [field for field in layout.parameters if field not in trained]

    def node_loss(
        leaves: dict[str, Tensor], fixed: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        outputs: Tensor = functional_call(module, (leaves, fixed, buffers), (x,))
        return task.loss(outputs, y)

    loss_of: Any = vmap(node_loss) if nodes else node_loss

    def gradients(parameters: Tensor, buffers: Tensor, batch: Tensor) -> tuple[Tensor, ...]:
        x, y = inputs[batch], targets[batch]
        views = named_parameters(parameters, trained)
        leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
        fixed = named_parameters(parameters, frozen)
        named = named_buffers(buffers, layout, module)
        with torch.enable_grad():
            losses = loss_of(leaves, fixed, named, x if nodes else channels_last(x), y)
            # No node's loss depends on another's parameters: the gradient of the sum is all of theirs. A
            # parameter that the loss does not use has a gradient of zeros.
            found = torch.autograd.grad(
                losses.sum() if nodes else losses, list(leaves.values()), materialize_grads=True
            )
        return losses.detach(), flatten_buffers(named, buffers, layout), *_apart(found)

    return gradients


def _apart(gradients: tuple[Tensor, ...]) -> list[Tensor]:
    """Each with a memory of its own, since an optimizer may write it: autograd gives the same tensor to both terms of a
    sum, and one value that is repeated where all are equal."""
    apart: list[Tensor] = []
    for gradient in gradients:
        shared = any(gradient.data_ptr() == other.data_ptr() for other in apart)
        repeated = gradient.numel() > 1 and 0 in gradient.stride()
        apart.append(gradient.clone() if shared or repeated else gradient)
    return apart


def channels_last(inputs: Tensor) -> Tensor:
    """Images [batch, channels, height, width] in the memory layout in which small convolutions run fastest on
    a CPU."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs
