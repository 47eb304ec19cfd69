"""How the gradient of a batch is computed: the experiment's ``gradient``."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gossamer.config.registry import Component, register
from gossamer.learning.parameters import FlatModule, loss_of, scores
from gossamer.tasks.task import Task, for_each


class BatchLoss:
    """The task's mean loss of a module on some samples, and gradients of it."""

    def __init__(self, task: Task, flat: FlatModule) -> None:
        self._task, self._flat = task, flat

    def __call__(self, inputs: Any, targets: Tensor) -> Tensor:
        """The mean loss on some samples, a tensor without axes, which knows its gradient."""
        outputs = scores(self._flat.module, for_each(self._flat.laid_out, inputs))
        return loss_of(self._task, outputs, targets)

    def gradient(self, loss: Tensor) -> Float[Tensor, " params"]:
        """The gradient of such a loss, a flat vector [P], with zeros for parameters that it does not use."""
        return self._flat.gradient(loss)


class Gradient(Component):
    """Base class of rules by which the gradient of a batch is computed, such as with clipping by sample and noise.

    ``node.train`` and ``node.gradient`` use the experiment's rule under every trainer that knows it: ``fused`` and
    ``batched`` know the mean only."""

    @abstractmethod
    def compute(
        self, loss: BatchLoss, module: nn.Module, batch: tuple[Any, Tensor], rng: np.random.Generator
    ) -> tuple[Tensor, Float[Tensor, " params"]]:
        """Compute the gradient of one batch. It may be called in any thread, but the module is used by one at a time.

        Args:
            loss: the mean loss of some samples, and the gradient of a loss as a flat vector.
            module: the task's module with the node's model, in training mode, for rules that need more than the loss.
            batch: the inputs (augmented, if the task says so) and the targets of the batch, on the trainer's device.
            rng: a generator of this step's own: equal steps draw equal numbers under every engine.

        Returns:
            The loss to record, one value, and the gradient, float32 [P]."""


@register("gradient", "mean")
class MeanGradient(Gradient):
    """The gradient of the mean loss over the batch, by autograd or the kernels of a trainer."""

    def compute(
        self, loss: BatchLoss, module: nn.Module, batch: tuple[Any, Tensor], rng: np.random.Generator
    ) -> tuple[Tensor, Float[Tensor, " params"]]:
        mean = loss(*batch)
        return mean.detach(), loss.gradient(mean)


def computed(
    rule: Gradient,
    loss: BatchLoss,
    flat: FlatModule,
    batch: tuple[Any, Tensor],
    rng: np.random.Generator,
) -> tuple[Tensor, Float[Tensor, " params"]]:
    """What a rule computes. TypeError for anything but a loss of one value and a gradient float32 [P]."""
    with torch.enable_grad():
        result = rule.compute(loss, flat.module, batch, rng)
    match result:
        case (Tensor() as value, Tensor() as gradient) if value.numel() == 1:
            if gradient.shape == flat.parameters.shape and gradient.dtype is torch.float32:
                return value.detach().reshape(()), gradient.detach()
    given = [f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in result]
    raise TypeError(
        f"gradient: {rule.name_of()} returns {', '.join(given)}; accepted: a loss of one value, and a gradient"
        f" torch.float32 ({len(flat.parameters)},)"
    )
