"""Optimizers with a step size for each coordinate: Adagrad, RMSprop, Adadelta, Rprop. Elementwise, with torch.optim's
results; see :mod:`gossamer.learning.optimizer`."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.learning.optimizer import Optimizer, State, counter, decay


@register("optimizer", "adagrad")
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer, 2011), as torch.optim.Adagrad.

    Args:
        lr_decay: the learning rate of the step after s others is lr / (1 + s lr_decay).
        initial_accumulator_value: what the sum of squared gradients begins with.
        eps: added to the denominator.
        weight_decay: L2 penalty added to the gradient.
    """

    elementwise: ClassVar[bool] = True

    lr_decay: float = Field(default=0.0, ge=0)
    initial_accumulator_value: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-10, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)

    def init(self, parameters: Tensor) -> State:
        state = {"sum": torch.full_like(parameters, self.initial_accumulator_value)}
        return state | {"steps": counter(parameters)} if self.lr_decay else state

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        decay(parameters, gradient, lr, self.weight_decay)
        root = state["sum"].addcmul_(gradient, gradient).sqrt().add_(self.eps)
        if not self.lr_decay:
            parameters.addcdiv_(gradient, root, value=-lr)
            return
        size = lr / (1 + state["steps"].double() * self.lr_decay)
        state["steps"].add_(1)
        parameters.sub_(gradient.div_(root).mul_(size.to(gradient.dtype)))


@register("optimizer", "rmsprop")
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton, 2012), as torch.optim.RMSprop.

    Args:
        alpha: decay of the mean square, and of the mean.
        eps: added to the denominator.
        weight_decay: L2 penalty added to the gradient.
        momentum: factor of the velocity.
        centered: divide by the standard deviation in the place of the root mean square (Graves, 2013).
    """

    elementwise: ClassVar[bool] = True

    alpha: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    centered: bool = False

    def init(self, parameters: Tensor) -> State:
        kept = {"square": True, "mean": self.centered, "velocity": self.momentum > 0}
        return {name: torch.zeros_like(parameters) for name, wanted in kept.items() if wanted}

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        decay(parameters, gradient, lr, self.weight_decay)
        square = state["square"].mul_(self.alpha).addcmul_(gradient, gradient, value=1 - self.alpha)
        if self.centered:
            mean = state["mean"].lerp_(gradient, 1 - self.alpha)
            # A variance near zero may come out below it, which would have no root.
            root = square.addcmul(mean, mean, value=-1).clamp_(min=0).sqrt_().add_(self.eps)
        else:
            root = square.sqrt().add_(self.eps)
        if self.momentum:
            velocity = state["velocity"].mul_(self.momentum).addcdiv_(gradient, root)
            parameters.add_(velocity, alpha=-lr)
        else:
            parameters.addcdiv_(gradient, root, value=-lr)


@register("optimizer", "adadelta")
class Adadelta(Optimizer):
    """Adadelta (Zeiler, 2012), as torch.optim.Adadelta, whose learning rate is 1 by default.

    Args:
        rho: decay of the mean squares of gradients and of steps.
        eps: added to both.
        weight_decay: L2 penalty added to the gradient.
    """

    elementwise: ClassVar[bool] = True

    rho: float = Field(default=0.9, ge=0, lt=1)
    eps: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)

    def init(self, parameters: Tensor) -> State:
        return {"square": torch.zeros_like(parameters), "steps_square": torch.zeros_like(parameters)}

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        decay(parameters, gradient, lr, self.weight_decay)
        square = state["square"].mul_(self.rho).addcmul_(gradient, gradient, value=1 - self.rho)
        root = square.add(self.eps).sqrt_()
        step = gradient.div_(root)
        step.mul_(torch.add(state["steps_square"], self.eps, out=root).sqrt_())
        state["steps_square"].mul_(self.rho).addcmul_(step, step, value=1 - self.rho)
        parameters.add_(step, alpha=-lr)


@register("optimizer", "rprop")
class Rprop(Optimizer):
    """Resilient backpropagation (Riedmiller and Braun, 1993), as torch.optim.Rprop; for full batches: it goes by the
    signs of gradients. The learning rate is the first step size and has no effect later.

    Args:
        eta_minus: factor of a step size where the gradient's sign has changed.
        eta_plus: factor of a step size where it has not.
        min_step: smallest step size.
        max_step: largest step size.
    """

    elementwise: ClassVar[bool] = True

    eta_minus: float = Field(default=0.5, gt=0, lt=1)
    eta_plus: float = Field(default=1.2, gt=1)
    min_step: float = Field(default=1e-6, gt=0)
    max_step: float = Field(default=50.0, gt=0)

    @model_validator(mode="after")
    def _can_be(self) -> Rprop:
        if self.min_step > self.max_step:
            raise BadInput(
                f"optimizer.min_step: got {self.min_step:g} with max_step {self.max_step:g};"
                f" accepted: at most {self.max_step:g}"
            )
        if self.schedule is not None:
            raise BadInput(
                f"optimizer.schedule: got {self.schedule.name_of()!r} for rprop, which finds its step sizes itself;"
                " accepted: null"
            )
        return self

    def init(self, parameters: Tensor) -> State:
        return {"previous": torch.zeros_like(parameters), "size": torch.full_like(parameters, self.lr)}

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        product = state["previous"].mul_(gradient)
        turned = product < 0
        factor = torch.where(turned, self.eta_minus, torch.where(product > 0, self.eta_plus, 1.0))
        size = state["size"].mul_(factor).clamp_(self.min_step, self.max_step)
        gradient.masked_fill_(turned, 0)  # no step back where a minimum was passed over
        state["previous"].copy_(gradient)
        parameters.addcmul_(gradient.sign_(), size, value=-1)
