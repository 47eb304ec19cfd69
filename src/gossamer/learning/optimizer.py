"""Optimizers on flat vectors: torch.optim's functions, applied to one node's vector [P] or to a stack [nodes,
P].

The state is a dict of tensors, so that it can be stored like the parameters, stacked over nodes and
checkpointed. All elementwise optimizers of torch are included, with their defaults and the names of their
settings. (``betas`` are ``beta1`` and ``beta2``; Rprop's ``etas`` and ``step_sizes`` are ``eta_minus``,
``eta_plus``, ``min_step`` and ``max_step``.) LBFGS and Muon use a parameter as a whole, Adafactor uses its
rows and columns, and SparseAdam needs sparse gradients, so a flat vector does not suit them.
"""

from __future__ import annotations

import inspect
import reprlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, final

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.adamw import adamw
from torch.optim.asgd import asgd
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.rprop import rprop
from torch.optim.sgd import sgd

from gossamer.config.ranges import (
    LARGEST_FLOAT32,
    Decay,
    NonNegativeFloat32,
    PositiveDecay,
    PositiveFloat32,
    ShareFloat32,
)
from gossamer.config.registry import Component, ComponentField, register
from gossamer.errors import BadInput
from gossamer.learning.guard import kind, refusing
from gossamer.learning.learning_rate import LearningRateSchedule

if TYPE_CHECKING:
    from gossamer.learning.parameters import Layout

List = list[Tensor]
State = dict[str, Tensor]
"""Optimizer state: name -> tensor [P], or a counter [1] on the CPU (stacked: [nodes, P], [nodes, 1])."""


_GROUPS = frozenset({"groups", "param_groups", "parameter_groups", "params", "no_decay", "no_weight_decay"})
"""Names under which other frameworks take groups of parameters."""


class Optimizer(Component):
    """Base class of optimizers. It holds the settings; the caller holds the state. A subclass implements
    :meth:`init` and :meth:`update`."""

    lr: PositiveFloat32
    # Multiplies the learning rate, round by round; None keeps it constant.
    schedule: Annotated[
        LearningRateSchedule | None, ComponentField("schedule", "optimizer.schedule", optional=True)
    ] = None
    # Clips each element of the gradient to plus or minus this value, as torch.nn.utils.clip_grad_value_ does.
    clip_value: PositiveFloat32 | None = None
    # Scales a node's gradient down to this Euclidean norm, after clip_value, as torch.nn.utils.clip_grad_norm_ does
    # (Pascanu et al., 2013).
    clip_norm: PositiveFloat32 | None = None
    # Starts each round with a new state (momentum and so on), as DecentralizePy does.
    reset_every_round: bool = False

    @model_validator(mode="before")
    @classmethod
    def _has_one_group(cls, given: Any) -> Any:
        """Refuse settings for groups of parameters, which torch.optim has, with the way to have them."""
        if isinstance(given, Mapping):
            for name, value in given.items():
                strange = str(name) in _GROUPS and name not in cls.model_fields
                if strange or (name in ("lr", "weight_decay") and isinstance(value, Mapping | list | tuple)):
                    raise BadInput(
                        f"optimizer.{name}: got {reprlib.repr(value)}, but a setting holds for all parameters; accepted: an"
                        " optimizer of your own with groups, in a few lines (docs/extending.md#groups-of-parameters)"
                    )
        return given

    def lr_at(self, round: int) -> float:
        """The learning rate of a round, from 0. BadInput if the schedule takes it beyond float32."""
        if self.schedule is None:
            return self.lr
        lr = self.lr * self.schedule.factor_at(round)
        if not abs(lr) <= LARGEST_FLOAT32:
            problem = f"{self.schedule.name_of()} makes the learning rate {lr} in round {round}"
            raise BadInput(f"optimizer.schedule: {problem}; accepted: finite numbers of float32")
        return lr

    @abstractmethod
    def init(self, parameters: Tensor) -> State:
        """The state before the first step, for a node's parameters [P]."""

    @cached_property
    def asks(self) -> frozenset[str]:
        """What :meth:`update` asks for by further parameters: ``layout``, ``rng``."""
        return frozenset({"layout", "rng"} & inspect.signature(self.update).parameters.keys())

    @final
    def step(
        self,
        parameters: Tensor,
        gradient: Tensor,
        state: State,
        lr: float,
        layout: Layout | None = None,
        rng: Callable[[], np.random.Generator] | None = None,
    ) -> None:
        """Clip the gradient and take one step. Parameters [..., P] and state are modified in place, and the
        gradient may be overwritten; its memory belongs to the caller. BadInput if :meth:`update` returns
        something, which would be lost. ``layout`` and the generator that ``rng`` makes are for updates that ask for them."""
        if self.clip_value is not None:
            gradient.clamp_(-self.clip_value, self.clip_value)
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((self.clip_norm / norm.add_(1e-6)).clamp_(max=1.0))  # as clip_grad_norm_ does
        extra: dict[str, Any] = {}
        if "layout" in self.asks:
            extra["layout"] = layout
        if "rng" in self.asks and rng is not None:
            extra["rng"] = rng()
        returned: object = self.update(parameters, gradient, state, lr, **extra)
        if returned is not None:
            raise BadInput(
                f"optimizer: {self.name_of()}.update returns {type(returned).__name__}; accepted: None, from an update that"
                " writes into the parameters and the state that it is given"
            )

    @abstractmethod
    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """Take one step with a clipped gradient, in place. Arguments are as in :meth:`step`. Torch's random
        generator is seeded for each node's steps.

        A subclass may ask for more by further parameters of these names, and then gets them: ``layout``, the fields of the
        flat vector (:class:`~gossamer.learning.parameters.Layout`), and ``rng``, a NumPy generator keyed by this node's step
        (such an optimizer is never given a stack of nodes)."""


def checked_state(optimizer: Optimizer, parameters: Tensor) -> State:
    """The state before the first step, for parameters [P]. BadInput if ``init`` raises an error, or returns something else
    than tensors by name."""
    field = f"optimizer: {optimizer.name_of()}.init"
    accepted = "a mapping of names to tensors, [P] or, for counters, [1]"
    with refusing(field, f"for the parameters [{len(parameters)}] of a node, {accepted}"):
        state: object = optimizer.init(parameters)
    if not isinstance(state, dict):
        raise BadInput(f"{field} returns {kind(state)}; accepted: {accepted}")
    for name, value in state.items():
        if not (isinstance(name, str) and isinstance(value, Tensor) and value.dim() == 1):
            raise BadInput(f"{field} returns {name!r}: {kind(value)}; accepted: {accepted}")
    return state


def counter(parameters: Tensor) -> Tensor:
    """A step counter of zero, [..., 1], on the CPU, since it is read before each step."""
    return torch.zeros((*parameters.shape[:-1], 1), dtype=torch.float32)


@register("optimizer", "sgd")
class SGD(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD, with momentum (Polyak, 1964; Nesterov, 1983)."""

    momentum: Decay = 0.0
    dampening: ShareFloat32 = 0.0
    nesterov: bool = False
    weight_decay: NonNegativeFloat32 = 0.0

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGD:
        if self.nesterov and (self.dampening or not self.momentum):
            actual = f"True with momentum {self.momentum:g} and dampening {self.dampening:g}"
            accepted = "True with a momentum above 0 and dampening 0"
            raise BadInput(f"optimizer.nesterov: got {actual}; accepted: {accepted}")
        return self

    def init(self, parameters: Tensor) -> State:
        state = {"velocity": torch.zeros_like(parameters)} if self.momentum else {}
        return state | {"steps": counter(parameters)} if self.momentum and self.dampening else state

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        if self.weight_decay:
            gradient.add_(parameters, alpha=self.weight_decay)
        if not self.momentum:
            parameters.add_(gradient, alpha=-lr)
            return
        velocity = state["velocity"]
        if self.dampening:
            # The first velocity is the undampened first gradient: the missing part comes from the initial
            # velocity.
            first = (state["steps"] == 0).to(velocity.device)
            torch.where(first, gradient * (self.dampening / self.momentum), velocity, out=velocity)
            state["steps"].add_(1)
        options: dict[str, Any] = {"momentum": self.momentum, "dampening": self.dampening}
        options |= {"nesterov": self.nesterov, "weight_decay": 0.0, "maximize": False}
        sgd([parameters], [gradient], [velocity], foreach=False, lr=lr, **options)


class TorchOptimizer(Optimizer):
    """Base class of the other optimizers. Each calls one function of torch.optim with lists of tensors: a
    stack of nodes is one tensor if all nodes have taken the same number of steps, and otherwise one tensor
    per node."""

    function: ClassVar[Callable[..., Any]]
    """``(parameters, gradients, *vectors, steps, *, lr, **settings)``: torch's function, or an adapter."""
    vectors: ClassVar[tuple[str, ...]]
    """Names of the state's vectors, without the steps, in the order of the function's arguments."""
    counts: ClassVar[bool] = True
    """Whether a step depends on the number of previous steps."""
    fused: ClassVar[bool] = False
    """Whether to use torch's fused kernel on a CPU, which takes one sweep over memory."""

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The fields that are arguments of the function, by name."""
        arguments = inspect.signature(type(self).function).parameters.keys() - {"lr"}
        return {name: getattr(self, name) for name in type(self).model_fields if name in arguments}

    def init(self, parameters: Tensor) -> State:
        state = {name: torch.zeros_like(parameters) for name in self.vectors}
        return state | {"steps": counter(parameters)} if self.counts else state

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        steps = state.get("steps", torch.zeros(1, dtype=torch.float32))
        fused = self.fused and parameters.device.type == "cpu"
        by_node = len(steps) > 1 and bool(steps.min() < steps.max())
        if fused and not all(stack.is_contiguous() for stack in (parameters, gradient, *state.values())):
            by_node = True  # a fused kernel requires contiguous tensors, and padded rows are contiguous only one by one

        def tensors(stack: Tensor) -> List:
            return list(stack.view(-1, stack.shape[-1]).unbind()) if by_node else [stack]

        vectors = [tensors(state[name]) if name in state else [] for name in self.vectors]
        counts = list(steps.view(-1).clone().unbind()) if by_node else [steps.view(-1)[0].clone()]
        options = {"lr": lr, "foreach": False, "maximize": False, **self._settings}
        if fused:
            options["fused"] = True
        type(self).function(tensors(parameters), tensors(gradient), *vectors, counts, **options)
        if "steps" in state:
            steps.add_(1)


@register("optimizer", "rprop")
class Rprop(TorchOptimizer):
    """Resilient backpropagation (Riedmiller and Braun, 1993), as torch.optim.Rprop, for full batches. It uses
    only the signs of gradients. The learning rate is the initial step size and has no effect later."""

    function: ClassVar[Callable[..., Any]] = staticmethod(
        lambda *tensors, lr, **options: rprop(*tensors, **options)
    )
    vectors: ClassVar[tuple[str, ...]] = ("previous", "size")
    counts: ClassVar[bool] = False
    eta_minus: PositiveDecay = 0.5
    eta_plus: float = Field(default=1.2, gt=1, le=LARGEST_FLOAT32)
    min_step: PositiveFloat32 = 1e-6
    max_step: PositiveFloat32 = 50.0

    @model_validator(mode="after")
    def _check(self) -> Rprop:
        if self.min_step > self.max_step:
            raise BadInput(f"optimizer.min_step: got {self.min_step:g}; accepted: at most {self.max_step:g}")
        if self.schedule is not None:
            raise BadInput("optimizer.schedule: rprop sets its step sizes itself; accepted: null")
        return self

    @cached_property
    def _settings(self) -> dict[str, Any]:
        bounds = {"step_size_min": self.min_step, "step_size_max": self.max_step}
        return {"etaminus": self.eta_minus, "etaplus": self.eta_plus, **bounds}

    def init(self, parameters: Tensor) -> State:
        return super().init(parameters) | {"size": torch.full_like(parameters, self.lr)}


class DecayingOptimizer(TorchOptimizer):
    """Base class of optimizers with weight decay."""

    weight_decay: NonNegativeFloat32 = 0.0


@wraps(asgd)
def _asgd(p: List, g: List, averages: List, steps: List, *, lr: float, **options: Any) -> None:
    weights = [1 / (count.double() - options["t0"]).clamp(min=1) for count in steps]
    sizes = [lr / (1 + options["lambd"] * lr * count.double()) ** options["alpha"] for count in steps]
    asgd(p, g, averages, weights, sizes, steps, lr=lr, **options)


@register("optimizer", "asgd")
class ASGD(DecayingOptimizer):
    """Averaged stochastic gradient descent (Polyak and Juditsky, 1992), as torch.optim.ASGD: the average is
    part of the state, the parameters are the last iterate. A step uses its own learning rate, whereas torch
    uses that of the previous step."""

    function: ClassVar[Callable[..., Any]] = staticmethod(_asgd)
    vectors: ClassVar[tuple[str, ...]] = ("average",)
    lambd: NonNegativeFloat32 = 1e-4
    alpha: float = Field(default=0.75, ge=0, le=3)
    t0: NonNegativeFloat32 = 1e6


class MomentOptimizer(DecayingOptimizer):
    """Base class of Adam and its variants, which keep moving averages of the gradient and its square."""

    vectors: ClassVar[tuple[str, ...]] = ("first", "second")
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: PositiveFloat32 = 1e-8


@register("optimizer", "adam")
class Adam(MomentOptimizer):
    """Adam (Kingma and Ba, 2015), as torch.optim.Adam, with AMSGrad (Reddi, Kale and Kumar, 2018)."""

    function: ClassVar[Callable[..., Any]] = staticmethod(adam)
    vectors: ClassVar[tuple[str, ...]] = ("first", "second", "largest")
    fused: ClassVar[bool] = True
    amsgrad: bool = False

    def init(self, parameters: Tensor) -> State:
        state = super().init(parameters)
        return state if self.amsgrad else {name: state[name] for name in ("first", "second", "steps")}


@register("optimizer", "adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch.optim.AdamW."""

    function: ClassVar[Callable[..., Any]] = staticmethod(adamw)
    weight_decay: NonNegativeFloat32 = 0.01


@register("optimizer", "adamax")
class Adamax(MomentOptimizer):
    """Adam with the infinity norm in place of the second moment (Kingma and Ba, 2015, section 7.1), as
    torch.optim.Adamax."""

    function: ClassVar[Callable[..., Any]] = staticmethod(adamax)
    vectors: ClassVar[tuple[str, ...]] = ("first", "norm")


@wraps(nadam)
def _nadam(p: List, g: List, first: List, second: List, products: List, steps: List, **options: Any) -> None:
    # torch expects one value; nodes with the same number of steps share it.
    scalars = [product.flatten()[0].clone() for product in products]
    nadam(p, g, first, second, scalars, steps, **options)
    for product, new in zip(products, scalars, strict=True):
        product.fill_(new)


@register("optimizer", "nadam")
class NAdam(MomentOptimizer):
    """Adam with Nesterov's momentum (Dozat, 2016), as torch.optim.NAdam."""

    function: ClassVar[Callable[..., Any]] = staticmethod(_nadam)
    vectors: ClassVar[tuple[str, ...]] = ("first", "second", "product")
    momentum_decay: NonNegativeFloat32 = 0.004
    decoupled_weight_decay: bool = False

    def init(self, parameters: Tensor) -> State:
        return super().init(parameters) | {"product": counter(parameters) + 1}


@register("optimizer", "radam")
class RAdam(MomentOptimizer):
    """Rectified Adam (Liu et al., 2020), as torch.optim.RAdam: it uses only the first moment until the
    estimate of the second one is reliable."""

    function: ClassVar[Callable[..., Any]] = staticmethod(radam)
    decoupled_weight_decay: bool = False


@register("optimizer", "adagrad")
class Adagrad(DecayingOptimizer):
    """Adagrad (Duchi, Hazan and Singer, 2011), as torch.optim.Adagrad."""

    function: ClassVar[Callable[..., Any]] = staticmethod(adagrad)
    vectors: ClassVar[tuple[str, ...]] = ("sum",)
    lr_decay: NonNegativeFloat32 = 0.0
    initial_accumulator_value: NonNegativeFloat32 = 0.0
    eps: PositiveFloat32 = 1e-10

    def init(self, parameters: Tensor) -> State:
        state = {"sum": torch.full_like(parameters, self.initial_accumulator_value)}
        return state | {"steps": counter(parameters)} if self.lr_decay else state


@register("optimizer", "rmsprop")
class RMSprop(DecayingOptimizer):
    """RMSprop (Tieleman and Hinton, 2012; centered: Graves, 2013), as torch.optim.RMSprop."""

    function: ClassVar[Callable[..., Any]] = staticmethod(rmsprop)
    vectors: ClassVar[tuple[str, ...]] = ("square", "mean", "velocity")
    counts: ClassVar[bool] = False
    alpha: Decay = 0.99
    eps: PositiveFloat32 = 1e-8
    momentum: Decay = 0.0
    centered: bool = False

    def init(self, parameters: Tensor) -> State:
        used = {"square": True, "mean": self.centered, "velocity": self.momentum > 0}
        return {name: value for name, value in super().init(parameters).items() if used[name]}


@register("optimizer", "adadelta")
class Adadelta(DecayingOptimizer):
    """Adadelta (Zeiler, 2012), as torch.optim.Adadelta, whose learning rate is 1 by default."""

    function: ClassVar[Callable[..., Any]] = staticmethod(adadelta)
    vectors: ClassVar[tuple[str, ...]] = ("square", "steps_square")
    counts: ClassVar[bool] = False
    rho: Decay = 0.9
    eps: PositiveFloat32 = 1e-6
