"""Optimizers that work elementwise on flat vectors: one node's vector [P], or a stack of them [nodes, P].

They give torch.optim's results (tested against it); their state is a dict of tensors, so that it can lie
beside the parameters, batch over nodes and be checkpointed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gossamer.errors import BadInput
from gossamer.registry import Component, register

State = dict[str, Tensor]
"""Optimizer state: name -> tensor of shape [P], or [1] for counters (stacked: [nodes, P], [nodes, 1])."""


class Optimizer(Component):
    """Base of optimizers: pure data, the state is the caller's.

    Args:
        lr: learning rate.
    """

    lr: float = Field(gt=0)
    by_coordinate: ClassVar[bool] = False
    """Whether a coordinate's step depends on its own parameter, gradient and state alone, all of its state being of
    shape [P]: the step may then be taken for any part of the coordinates."""

    @abstractmethod
    def init(self, parameters: Tensor) -> State:
        """The state before the first step, for parameters [..., P]."""

    @abstractmethod
    def step(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """One step: writes parameters [..., P] and state in place; the gradient may be overwritten."""


@register("optimizer", "sgd")
class SGD(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD without dampening.

    Args:
        momentum: factor of the velocity.
        nesterov: look ahead along the velocity.
        weight_decay: L2 penalty added to the gradient.
    """

    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    by_coordinate: ClassVar[bool] = True

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise BadInput(
                "optimizer.nesterov: got True with momentum 0; accepted: True with a momentum above 0"
            )
        return self

    def init(self, parameters: Tensor) -> State:
        return {"velocity": torch.zeros_like(parameters)} if self.momentum else {}

    def step(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        if self.weight_decay:
            gradient.add_(parameters, alpha=self.weight_decay)
        if self.momentum:
            velocity = state["velocity"].mul_(self.momentum).add_(gradient)
            gradient = gradient.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        parameters.add_(gradient, alpha=-lr)


@register("optimizer", "adam")
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), as torch.optim.Adam.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: L2 penalty added to the gradient.
    """

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)

    def init(self, parameters: Tensor) -> State:
        return {
            "first": torch.zeros_like(parameters),
            "second": torch.zeros_like(parameters),
            "steps": parameters.new_zeros((*parameters.shape[:-1], 1)),
        }

    def step(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        self._decay(parameters, gradient, lr)
        steps = state["steps"].add_(1)
        first = state["first"].lerp_(gradient, 1 - self.beta1)
        second = state["second"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        # Bias corrections in double precision, as torch.optim computes them in Python floats.
        step_size = lr / (1 - self.beta1 ** steps.double())
        root = (1 - self.beta2 ** steps.double()).sqrt()
        denominator = (second.sqrt() / root.to(second.dtype)).add_(self.eps)
        parameters.sub_(first / denominator * step_size.to(first.dtype))

    def _decay(self, parameters: Tensor, gradient: Tensor, lr: float) -> None:
        if self.weight_decay:
            gradient.add_(parameters, alpha=self.weight_decay)


@register("optimizer", "adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch.optim.AdamW."""

    weight_decay: float = Field(default=0.01, ge=0)

    def _decay(self, parameters: Tensor, gradient: Tensor, lr: float) -> None:
        parameters.mul_(1 - lr * self.weight_decay)
