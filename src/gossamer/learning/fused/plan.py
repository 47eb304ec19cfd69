"""Plans: the operations of a model and its loss as a list of layers that the kernels support.

The model is called once, on a few samples, and each of its calls of a torch function is intercepted. Each
function has to take the result of the previous one, and parameters that no other function takes. How the
model is written does not matter, but a model that does anything else (branches on values, draws random
numbers, has a shortcut) is not recognised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gossamer.errors import GossamerError
from gossamer.learning.fused import kernels as k
from gossamer.learning.parameters import Layout
from gossamer.tasks.task import Task

Shape = tuple[int, ...]
SAMPLES = 3  # number of samples in the call
MAX_WORK = {False: 32_000_000, True: 200_000_000}
"""Largest number of multiplications in a forward pass, without and with convolutions, for which the kernels
were measured to be faster than torch."""


class Unknown(Exception):
    """The reason why there is no plan: a description of what the kernels do not support."""


@dataclass(frozen=True, eq=False)
class FusedPlan:
    """The layers of a model and its loss, in the form for :func:`gossamer.learning.fused.kernels.train`.

    Attributes:
        layers: a row for each layer.
        epsilons: of normalisations, one value for each layer.
        taps: for each weight of a convolution's filter, the offset of its input from that of the first weight.
        loss, factor: the kind of the loss, and its factor.
        spaces: sizes of the parts of the memory for activations.
        spare: size of the temporary memory, in values.
        work: multiplications in a forward pass for one sample."""

    layers: Int[np.ndarray, "layers columns"]
    epsilons: Float[np.ndarray, " layers"]
    taps: Int[np.ndarray, " taps"]
    loss: int
    factor: float
    spaces: Int[np.ndarray, "6"]
    spare: int
    work: int

    def worthwhile(self, batch: int) -> bool:
        """Whether the kernels are faster than torch, which is faster for large products and for partly filled
        vectors."""
        full = -(-batch // k.LANES) * k.LANES
        convolutions = bool((self.layers[:, k.KIND] == k.CONVOLUTION).any())
        return self.work * full * (full / batch) <= MAX_WORK[convolutions]

    def memory(self, batch: int) -> int:
        """The number of values that a step with this batch size needs."""
        ends, _, size, largest, widest, sums = self.spaces.tolist()
        groups = -(-batch // k.LANES)
        return int((groups * (ends + size + widest + 2 * largest) + sums) * k.LANES + self.spare)


def plan_of(task: Task, module: nn.Module) -> FusedPlan:
    """The plan of a task, whose model creates modules like this one; raises :class:`Unknown`."""
    if task.augment is not None:
        raise Unknown("augmented inputs")
    if any(vars(layer).get(hooks) for layer in module.modules() for hooks in _HOOKS) or any(
        parameter._backward_hooks for parameter in module.parameters()
    ):
        raise Unknown("hooks")
    if not isinstance(task.train[0], torch.Tensor):
        raise Unknown("inputs of several tensors")
    inputs, targets = (part[:SAMPLES] for part in task.train)
    reader = _Reader(task, module, inputs, targets)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), reader:
            result = task.loss(module(inputs), targets)
    except (Unknown, GossamerError):
        raise
    except Exception as error:  # any error of the user's code; a step will raise it again
        raise Unknown(f"a model or a loss that raises {type(error).__name__}") from error
    plan = reader.plan(result)
    _check_backward(result)
    return plan


def _check_backward(loss: Tensor) -> None:
    """Refuse a loss whose backward pass is not that of its layers."""
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise Unknown(
                f"functions with a gradient of their own ({type(node).__name__.removesuffix('Backward')})"
            )
        nodes += [] if node is None else [before for before, _ in node.next_functions]


def _names(*names: str, **defaults: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return (*names, *defaults), defaults


_X = _names("x")
_MAX_POOL = _names(
    "x", "kernel_size", stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
)
_AVERAGE_POOL = _names(
    "x", "kernel_size", stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
)
_CONVOLUTION = _names("x", "weight", bias=None, stride=1, padding=0, dilation=1, groups=1)
_LOSS = _names("x", "targets", weight=None, size_average=None, reduce=None, reduction="mean")
_CROSS_ENTROPY = (_LOSS[0], _LOSS[1] | {"ignore_index": -100, "label_smoothing": 0.0})
# Function of torch -> the method that handles it, the kind of layer or loss (or whether to divide), and its parameters.
_KNOWN: dict[Any, tuple[str, int, tuple[tuple[str, ...], dict[str, Any]]]] = {
    F.linear: ("_linear", k.LINEAR, _names("x", "weight", bias=None)),
    F.conv2d: ("_convolution", k.CONVOLUTION, _CONVOLUTION),
    F.group_norm: ("_norm", k.NORM, _names("x", "groups", weight=None, bias=None, eps=1e-5)),
    F.relu: ("_activation", k.RELU, _names("x", inplace=False)),
    **dict.fromkeys((torch.relu, Tensor.relu), ("_activation", k.RELU, _X)),
    **dict.fromkeys((torch.tanh, Tensor.tanh), ("_activation", k.TANH, _X)),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), ("_pool", k.MAX_POOL, _MAX_POOL)),
    F.avg_pool2d: ("_pool", k.AVERAGE_POOL, _AVERAGE_POOL),
    F.cross_entropy: ("_take_loss", k.CROSS_ENTROPY, _CROSS_ENTROPY),
    F.mse_loss: ("_take_loss", k.SQUARED_ERROR, _LOSS),
    **dict.fromkeys((Tensor.mul, torch.mul), ("_scaled", False, _names("x", "factor"))),
    **dict.fromkeys((Tensor.div, torch.div), ("_scaled", True, _names("x", "factor"))),
}
_RESHAPES = (Tensor.flatten, torch.flatten, Tensor.view, Tensor.reshape, torch.reshape)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_QUESTIONS = ("__get__", "__len__", "size", "dim", "numel", "is_floating_point")


class _Reader(TorchFunctionMode):
    """Follows the chain of functions from the inputs to the loss; each becomes a layer."""

    def __init__(self, task: Task, module: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        super().__init__()
        layout = Layout.of(module)
        if layout.buffers:
            raise Unknown("buffers, such as running statistics")
        if inputs.dtype != torch.float32:
            raise Unknown(f"inputs of type {inputs.dtype}")
        starts = {field.name: field.start for field in layout.parameters}
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._starts = starts  # starts of the parameters that no layer has taken yet
        self._all_targets, self._targets = task.train[1], targets
        self._result: Tensor = inputs  # so far
        self._shape: Shape = tuple(inputs.shape[1:])
        self._length = math.prod(self._shape)
        self._layers: list[dict[int, int]] = []
        self._epsilons: list[float] = []
        self._taps: list[int] = []
        self._at, self._end = 0, _padded(self._length)  # start of the result, end of the activations
        self._loss: int | None = None
        self._factor = 1.0
        self._work = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in _QUESTIONS and not isinstance(result, Tensor):
            return result
        if not args or args[0] is not self._result:
            raise Unknown(f"operations that are not a chain ({name})")
        if func in _RESHAPES:
            if self._loss is not None or result.shape != (len(self._result), math.prod(self._shape)):
                raise Unknown(f"{name} to {tuple(result.shape)}")
            self._shape = (math.prod(self._shape),)
        elif func in _KNOWN:
            method, kind, (names, defaults) = _KNOWN[func]
            arguments = defaults | dict(zip(names, args, strict=False)) | kwargs
            if (self._loss is None) == (method == "_scaled"):
                raise Unknown(f"{name} {'before' if self._loss is None else 'after'} the loss")
            getattr(self, method)(kind, arguments, defaults)
        else:
            raise Unknown(f"the operation {name}")
        self._result = result
        return result

    def _start(self, parameter: Tensor | None) -> int:
        if parameter is None:
            return -1
        name = self._names.get(id(parameter), "a tensor that is not a parameter")
        if name not in self._starts:
            raise Unknown(f"a parameter that is frozen or used twice ({name})")
        return self._starts.pop(name)

    def _add(self, kind: int, shape: Shape, result: Shape, **columns: int) -> None:
        """Adds a layer with images [channels, height, width] as input and result; a vector is an image of one pixel."""
        (c, h, w), (oc, oh, ow) = ((*sizes, 1, 1)[:3] for sizes in (shape, result))
        size = _padded(math.prod(result))
        in_place = kind in (k.RELU, k.TANH) and not self._is_needed(kind)
        y = self._at if in_place else self._end
        row = {k.KIND: kind, k.X: self._at, k.X_SIZE: _padded(math.prod(shape)), k.Y: y, k.Y_SIZE: size}
        row |= {k.C: c, k.H: h, k.W: w, k.OC: oc, k.OH: oh, k.OW: ow, k.WEIGHT: -1, k.BIAS: -1}
        self._layers.append(row | {getattr(k, name): value for name, value in columns.items()})
        self._epsilons.append(0.0)
        self._at, self._end, self._shape = y, max(self._end, y + size), result

    def _is_needed(self, kind: int) -> bool:
        """Whether the backward pass needs the input of an activation: it is the model's input, or the result of a layer
        whose gradient is computed from that result and can't be computed from the activation's."""
        kinds = {layer[k.KIND] for layer in self._layers if layer[k.Y] == self._at}
        return not kinds or k.MAX_POOL in kinds or (kind == k.TANH and k.TANH in kinds)

    def _linear(self, kind: int, arguments: dict[str, Any], _: Any) -> None:
        if len(self._shape) != 1:
            raise Unknown(f"linear of {len(self._shape)} dimensions")
        weight, bias = self._start(arguments["weight"]), self._start(arguments["bias"])
        outputs = len(arguments["weight"])
        self._work += self._shape[0] * outputs
        self._add(kind, self._shape, (outputs,), WEIGHT=weight, BIAS=bias)

    def _convolution(self, kind: int, arguments: dict[str, Any], _: Any) -> None:
        padding = 0 if arguments["padding"] == "valid" else arguments["padding"]
        if isinstance(padding, str) or arguments["groups"] != 1 or _pair(arguments["dilation"]) != (1, 1):
            raise Unknown("conv2d with groups, dilation or unusual padding")
        if len(self._shape) != 3:
            raise Unknown(f"conv2d of {len(self._shape)} dimensions")
        weight, bias = self._start(arguments["weight"]), self._start(arguments["bias"])
        (ph, pw), (sh, sw) = _pair(padding), _pair(arguments["stride"])
        c, h, w = self._shape
        if ph or pw:
            self._add(k.PAD, self._shape, (c, h + 2 * ph, w + 2 * pw), KH=ph, KW=pw)
            c, h, w = self._shape
        channels, _, kh, kw = arguments["weight"].shape
        sizes = {"KH": kh, "KW": kw, "SH": sh, "SW": sw, "TAPS": len(self._taps)}
        taps = product(range(c), range(kh), range(kw))
        self._taps += [((channel * h + i) * w + j) * k.LANES for channel, i, j in taps]
        result = channels, (h - kh) // sh + 1, (w - kw) // sw + 1
        self._work += math.prod(result) * c * kh * kw
        self._add(kind, self._shape, result, WEIGHT=weight, BIAS=bias, **sizes)

    def _norm(self, kind: int, arguments: dict[str, Any], _: Any) -> None:
        if arguments["weight"] is None or arguments["bias"] is None:
            raise Unknown("group_norm without weights")
        if len(self._shape) not in (1, 3):
            raise Unknown(f"group_norm of {len(self._shape)} dimensions")
        weight, bias = self._start(arguments["weight"]), self._start(arguments["bias"])
        groups = arguments["groups"]
        statistics, self._end = self._end, self._end + _padded(2 * groups)
        columns = {"WEIGHT": weight, "BIAS": bias, "KH": groups, "STATISTICS": statistics}
        self._add(kind, self._shape, self._shape, **columns)
        self._epsilons[-1] = arguments["eps"]

    def _activation(self, kind: int, *_: Any) -> None:
        self._add(kind, self._shape, self._shape)

    def _pool(self, kind: int, arguments: dict[str, Any], defaults: dict[str, Any]) -> None:
        for option, value in defaults.items():
            if option != "stride" and arguments[option] not in (value, (value, value)):
                raise Unknown(f"pooling with {option}")
        if len(self._shape) != 3:
            raise Unknown(f"pooling of {len(self._shape)} dimensions")
        (c, h, w), (kh, kw) = self._shape, _pair(arguments["kernel_size"])
        sh, sw = _pair(arguments["stride"] or (kh, kw))
        result = c, (h - kh) // sh + 1, (w - kw) // sw + 1
        self._add(kind, self._shape, result, KH=kh, KW=kw, SH=sh, SW=sw)

    def _take_loss(self, kind: int, arguments: dict[str, Any], defaults: dict[str, Any]) -> None:
        if any(arguments[option] != value for option, value in defaults.items()):
            raise Unknown("a loss with other settings than the defaults")
        targets = self._all_targets
        if kind == k.CROSS_ENTROPY:
            fits = targets.dtype == torch.int64 and targets.dim() == 1
            fits = fits and int(targets.min()) >= 0 and int(targets.max()) < self._shape[0]
        else:
            fits = targets.dtype == torch.float32 and tuple(targets.shape[1:]) == self._shape
        if arguments["targets"] is not self._targets or len(self._shape) != 1 or not fits:
            raise Unknown("a loss with targets of this kind")
        self._loss = kind

    def _scaled(self, divided: int, arguments: dict[str, Any], _: Any) -> None:
        factor = arguments["factor"]
        if not isinstance(factor, int | float):
            raise Unknown("a loss that is multiplied by a tensor")
        self._factor *= 1 / factor if divided else factor

    def plan(self, result: object) -> FusedPlan:
        """The plan, when the loss has returned its result."""
        if self._loss is None or result is not self._result:
            raise Unknown("a loss that is not cross-entropy or a squared error")
        if self._starts:
            raise Unknown(f"a parameter that no layer uses ({next(iter(self._starts))})")
        layers = np.zeros((len(self._layers), 20), dtype=np.int64)
        for row, columns in zip(layers, self._layers, strict=True):
            row[list(columns)] = list(columns.values())
        kinds = layers[:, k.KIND]
        first = int(np.flatnonzero(layers[:, k.WEIGHT] >= 0)[0])
        layers[first + 1 :, k.BACK] = 1
        layers[first, k.BACK] = kinds[first] == k.NORM  # its backward pass computes its weights' gradients
        inner = layers[(kinds == k.LINEAR) & (layers[:, k.X] > 0)]
        filters = (layers[:, k.C] * layers[:, k.KH] * layers[:, k.KW])[kinds == k.CONVOLUTION]
        largest = max(filters.max(initial=128), layers[:, [k.C, k.OC]].max())
        spaces = [
            self._end,
            self._length,
            _padded(self._length),
            layers[:, [k.X_SIZE, k.Y_SIZE]].max(),
            inner[:, k.X_SIZE].max(initial=0),
            2 * layers[kinds == k.NORM, k.C].max(initial=0),
        ]
        return FusedPlan(
            layers=layers,
            epsilons=np.array(self._epsilons),
            taps=np.array([*self._taps, 0], dtype=np.int64),
            loss=self._loss,
            factor=float(self._factor),
            spaces=np.array(spaces, dtype=np.int64),
            spare=2 * k.LANES * (int(largest) + k.LANES),
            work=self._work,
        )


def _padded(size: int) -> int:
    return -(-size // k.LANES) * k.LANES


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
