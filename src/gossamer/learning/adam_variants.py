"""Adam's descendants: Adamax, NAdam, RAdam. Elementwise, with torch.optim's results; see
:mod:`gossamer.learning.optimizer`."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from gossamer.config.registry import register
from gossamer.learning.optimizer import Moments, State, correction, counter, decay


@register("optimizer", "adamax")
class Adamax(Moments):
    """Adam with the infinity norm in the place of the second moment (Kingma and Ba, 2015, section 7.1), as
    torch.optim.Adamax.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the norm.
        eps: added to a gradient's magnitude.
        weight_decay: L2 penalty added to the gradient.
    """

    def init(self, parameters: Tensor) -> State:
        return {
            "first": torch.zeros_like(parameters),
            "norm": torch.zeros_like(parameters),
            "steps": counter(parameters),
        }

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        decay(parameters, gradient, lr, self.weight_decay)
        steps = state["steps"].add_(1)
        first = state["first"].lerp_(gradient, 1 - self.beta1)
        norm = state["norm"].mul_(self.beta2)
        torch.maximum(norm, gradient.abs_().add_(self.eps), out=norm)
        step_size = lr / correction(self.beta1, steps)
        parameters.sub_(torch.div(first, norm, out=gradient).mul_(step_size.to(first.dtype)))


@register("optimizer", "nadam")
class NAdam(Moments):
    """Adam with Nesterov's momentum (Dozat, 2016), as torch.optim.NAdam.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: L2 penalty added to the gradient.
        momentum_decay: how fast the momentum rises to ``beta1``.
        decoupled_weight_decay: decay the parameters instead, as AdamW does.
    """

    momentum_decay: float = Field(default=0.004, ge=0)
    decoupled_weight_decay: bool = False

    def init(self, parameters: Tensor) -> State:
        return {
            "first": torch.zeros_like(parameters),
            "second": torch.zeros_like(parameters),
            "steps": counter(parameters),
            "product": counter(parameters).fill_(1),  # of the momenta so far
        }

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        decay(parameters, gradient, lr, self.weight_decay, self.decoupled_weight_decay)
        steps = state["steps"].add_(1)
        momentum, following = self._momentum(steps), self._momentum(steps + 1)
        product = state["product"].mul_(momentum).double()
        first = state["first"].lerp_(gradient, 1 - self.beta1)
        second = state["second"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        denominator = (second / correction(self.beta2, steps).to(second.dtype)).sqrt_().add_(self.eps)
        of_gradient = lr * (1 - momentum) / (1 - product)
        of_first = lr * following / (1 - product * following)
        gradient.mul_(of_gradient.to(first.dtype)).addcmul_(first, of_first.to(first.dtype))
        parameters.sub_(gradient.div_(denominator))

    def _momentum(self, steps: Tensor) -> Tensor:
        return self.beta1 * (1 - 0.5 * 0.96 ** (steps.double() * self.momentum_decay))


@register("optimizer", "radam")
class RAdam(Moments):
    """Rectified Adam (Liu et al., 2020), as torch.optim.RAdam: momentum alone, until there are steps enough to know the
    second moment by.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: L2 penalty added to the gradient.
        decoupled_weight_decay: decay the parameters instead, as AdamW does.
    """

    decoupled_weight_decay: bool = False

    def init(self, parameters: Tensor) -> State:
        return {
            "first": torch.zeros_like(parameters),
            "second": torch.zeros_like(parameters),
            "steps": counter(parameters),
        }

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        decay(parameters, gradient, lr, self.weight_decay, self.decoupled_weight_decay)
        steps = state["steps"].add_(1)
        first = state["first"].lerp_(gradient, 1 - self.beta1)
        second = state["second"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        corrected = correction(self.beta2, steps)
        # Length of the simple moving average that the second moment is worth (section 3.2), now and in the end.
        last = 2 / (1 - self.beta2) - 1
        length = last - 2 * steps.double() * (1 - corrected) / corrected
        rectified = length > 5
        variance = (length - 4) * (length - 2) * last / ((last - 4) * (last - 2) * length)
        # Rows that are not rectified are not divided: they have a factor and a denominator of 1.
        factor = (
            torch.where(rectified, (variance * corrected).sqrt(), 1.0) * lr / correction(self.beta1, steps)
        )
        denominator = torch.sqrt(second, out=gradient).add_(self.eps).masked_fill_(~rectified, 1.0)
        parameters.sub_(torch.div(first, denominator, out=gradient).mul_(factor.to(first.dtype)))
