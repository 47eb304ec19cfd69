"""Optimizers that work elementwise on flat vectors: one node's vector [P], or a stack of them [nodes, P].

They give torch.optim's results (tested against it); their state is a dict of tensors, so that it can lie
beside the parameters, batch over nodes and be checkpointed.

Here are what all have in common, SGD and Adam; more are in :mod:`gossamer.learning.adam_variants` and
:mod:`gossamer.learning.adaptive`. torch's other optimizers are not elementwise: LBFGS and Muon see a parameter as a whole,
Adafactor its rows and columns, and SparseAdam is for sparse gradients, which a flat vector does not have.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar, final

import torch
from pydantic import Field, field_serializer, field_validator, model_validator
from torch import Tensor

from gossamer.config.registry import Component, build, register
from gossamer.errors import BadInput
from gossamer.learning.schedule import Schedule

State = dict[str, Tensor]
"""Optimizer state: name -> tensor of shape [P], or [1] for counters (stacked: [nodes, P], [nodes, 1])."""

_NORM_EPS = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by."""


class Optimizer(Component):
    """Base of optimizers: pure data, the state is the caller's. A subclass implements :meth:`init` and :meth:`update`.

    Args:
        lr: learning rate.
        schedule: what multiplies it from round to round; None: nothing does.
        clip_value: the gradient's elements are cut off at plus and minus this, as by torch.nn.utils.clip_grad_value_.
        clip_norm: a node's gradient is shortened to this Euclidean length, as by torch.nn.utils.clip_grad_norm_ (Pascanu
            et al., 2013); after ``clip_value``.
        reset_every_round: begin each round with a new state (momentum and so on), as DecentralizePy does.
    """

    elementwise: ClassVar[bool] = False
    """Whether a coordinate's update depends on its own parameter, gradient and state, and on counters, alone."""

    lr: float = Field(gt=0)
    schedule: Schedule | None = None
    clip_value: float | None = Field(default=None, gt=0)
    clip_norm: float | None = Field(default=None, gt=0)
    reset_every_round: bool = False

    @field_validator("schedule", mode="before")
    @classmethod
    def _build_schedule(cls, value: Any, info: Any) -> Any:  # a ValidationInfo: no run-time checks
        return None if value is None else build("schedule", value, info.context, "optimizer.schedule")

    @field_serializer("schedule")
    def _schedule_spec(self, schedule: Schedule | None) -> dict[str, Any] | None:
        return None if schedule is None else schedule.spec()

    def lr_at(self, round: int) -> float:
        """The learning rate of a round, from 0."""
        return self.lr if self.schedule is None else self.lr * self.schedule.factor_at(round)

    @cached_property
    def by_coordinate(self) -> bool:
        """Whether a coordinate's step depends on its own parameter, gradient and state alone, all of its state being
        of shape [P]: the step may then be taken for any part of the coordinates."""
        shapes = {tuple(value.shape) for value in self.init(torch.zeros(2)).values()}
        return self.elementwise and self.clip_norm is None and shapes <= {(2,)}

    @abstractmethod
    def init(self, parameters: Tensor) -> State:
        """The state before the first step, for parameters [..., P]."""

    @final
    def step(
        self, parameters: Tensor, gradient: Tensor, state: State, lr: float, start: Tensor | None = None
    ) -> None:
        """One step: clips the gradient and updates.

        Writes parameters [..., P] and state in place; the gradient may be overwritten. Where :attr:`by_coordinate` holds,
        parameters, gradient and state may be any part of the coordinates, in any one shape.

        Args:
            start: what the step starts from, and only reads, if not from the parameters; these are then overwritten.
        """
        if self.clip_value is not None:
            gradient.clamp_(-self.clip_value, self.clip_value)
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((self.clip_norm / norm.add_(_NORM_EPS)).clamp_(max=1.0))
        if start is None:
            self.update(parameters, gradient, state, lr)
        else:
            self.update_from(start, parameters, gradient, state, lr)

    def update_from(
        self, start: Tensor, parameters: Tensor, gradient: Tensor, state: State, lr: float
    ) -> None:
        """:meth:`update` of a copy of ``start``, with the same bits. Overridden where that is one sweep over memory."""
        self.update(parameters.copy_(start), gradient, state, lr)

    @abstractmethod
    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """One step with a gradient as it is; shapes and what is written as for :meth:`step`."""


def counter(parameters: Tensor) -> Tensor:
    """Zero steps so far, [..., 1]."""
    return parameters.new_zeros((*parameters.shape[:-1], 1))


def correction(beta: float, steps: Tensor) -> Tensor:
    """1 - beta^steps, of what a moving average from zero is too small by; in double precision, as torch.optim computes it
    in Python floats."""
    return 1 - beta ** steps.double()


def decay(
    parameters: Tensor, gradient: Tensor, lr: float, weight_decay: float, decoupled: bool = False
) -> None:
    """Weight decay: an L2 penalty in the gradient, or decoupled from it (Loshchilov and Hutter, 2019)."""
    if not weight_decay:
        return
    if decoupled:
        parameters.mul_(1 - lr * weight_decay)
    else:
        gradient.add_(parameters, alpha=weight_decay)


@register("optimizer", "sgd")
class SGD(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD; momentum: Polyak (1964), Nesterov (1983).

    Args:
        momentum: factor of the velocity.
        dampening: what is taken off the weight of a gradient in the velocity, from the second step on.
        nesterov: look ahead along the velocity.
        weight_decay: L2 penalty added to the gradient.
    """

    elementwise: ClassVar[bool] = True

    momentum: float = Field(default=0.0, ge=0, lt=1)
    dampening: float = Field(default=0.0, ge=0, le=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise BadInput(
                "optimizer.nesterov: got True with momentum 0; accepted: True with a momentum above 0"
            )
        if self.nesterov and self.dampening:
            raise BadInput(
                f"optimizer.nesterov: got True with dampening {self.dampening:g}; accepted: True with dampening 0"
            )
        return self

    def init(self, parameters: Tensor) -> State:
        if not self.momentum:
            return {}
        state = {"velocity": torch.zeros_like(parameters)}
        return state | {"steps": counter(parameters)} if self.dampening else state

    def update_from(
        self, start: Tensor, parameters: Tensor, gradient: Tensor, state: State, lr: float
    ) -> None:
        if self.momentum or type(self).update is not SGD.update:  # a subclass may do otherwise
            super().update_from(start, parameters, gradient, state, lr)
        else:
            decay(start, gradient, lr, self.weight_decay)
            torch.add(start, gradient, alpha=-lr, out=parameters)

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        decay(parameters, gradient, lr, self.weight_decay)
        if not self.momentum:
            parameters.add_(gradient, alpha=-lr)
            return
        velocity = state["velocity"].mul_(self.momentum)
        if self.dampening:
            # torch's velocity begins as the first gradient, whole.
            weight = torch.where(state["steps"] == 0, 1.0, 1 - self.dampening)
            velocity.addcmul_(gradient, weight.to(gradient.dtype))
            state["steps"].add_(1)
        else:
            velocity.add_(gradient)
        if self.nesterov:
            parameters.add_(gradient, alpha=-lr).add_(velocity, alpha=-lr * self.momentum)
        else:
            parameters.add_(velocity, alpha=-lr)


@register("optimizer", "asgd")
class ASGD(Optimizer):
    """Averaged stochastic gradient descent (Polyak and Juditsky, 1992), as torch.optim.ASGD: the average lies in the
    state, the parameters are the last iterate. A step's size follows from that step's learning rate; torch's is a step late.

    Args:
        lambd: decay of the parameters, and of the step size.
        alpha: power of the step size's decay.
        t0: step after which the average begins; until then it is the iterate.
        weight_decay: L2 penalty added to the gradient.
    """

    elementwise: ClassVar[bool] = True

    lambd: float = Field(default=1e-4, ge=0)
    alpha: float = Field(default=0.75, ge=0)
    t0: float = Field(default=1e6, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)

    def init(self, parameters: Tensor) -> State:
        return {"average": torch.zeros_like(parameters), "steps": counter(parameters)}

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        decay(parameters, gradient, lr, self.weight_decay)
        before = state["steps"].double()
        state["steps"].add_(1)
        size = lr / (1 + self.lambd * lr * before) ** self.alpha
        parameters.mul_((1 - self.lambd * size).to(parameters.dtype))
        parameters.sub_(gradient.mul_(size.to(gradient.dtype)))
        state["average"].lerp_(parameters, (1 / (before - self.t0).clamp_(min=1)).to(parameters.dtype))


class Moments(Optimizer):
    """Base of Adam and its descendants: moving averages of the gradient and of its size, with their usual defaults."""

    elementwise: ClassVar[bool] = True

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)


@register("optimizer", "adam")
class Adam(Moments):
    """Adam (Kingma and Ba, 2015), as torch.optim.Adam.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: L2 penalty added to the gradient.
        amsgrad: divide by the largest second moment so far (Reddi, Kale and Kumar, 2018).
    """

    decoupled: ClassVar[bool] = False

    amsgrad: bool = False

    def init(self, parameters: Tensor) -> State:
        names = ["first", "second", "largest"] if self.amsgrad else ["first", "second"]
        return {name: torch.zeros_like(parameters) for name in names} | {"steps": counter(parameters)}

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        decay(parameters, gradient, lr, self.weight_decay, self.decoupled)
        steps = state["steps"].add_(1)
        first = state["first"].lerp_(gradient, 1 - self.beta1)
        second = state["second"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        if self.amsgrad:
            second = torch.maximum(state["largest"], second, out=state["largest"])
        root = correction(self.beta2, steps).sqrt_()
        # The gradient is done with: its memory takes what is left to compute.
        denominator = torch.sqrt(second, out=gradient).div_(root.to(second.dtype)).add_(self.eps)
        step_size = lr / correction(self.beta1, steps)
        parameters.sub_(torch.div(first, denominator, out=gradient).mul_(step_size.to(first.dtype)))


@register("optimizer", "adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch.optim.AdamW.

    Args:
        weight_decay: what a step of learning rate 1 takes off the parameters, as a fraction.
    """

    decoupled: ClassVar[bool] = True

    weight_decay: float = Field(default=0.01, ge=0)
