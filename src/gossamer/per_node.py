"""Values of all nodes at once, for an algorithm that runs once for all nodes (:mod:`gossamer.runtime.simulate.cohort`).

An operation on such values is done for each node by itself, so its results have the same bits as if the nodes ran
by themselves. Where nodes would part ways, as at an ``if`` that only some of them enter, :class:`Divergence` is
raised."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

_OF_DICTS = {"keys", "values", "items", "get", "missing"}


class Divergence(BaseException):
    """Not all nodes do the same here, or it is unknown whether they do. Algorithms can't catch it by
    accident."""


class PerNode:
    """One value for each node, in rank order."""

    __slots__ = ("each",)

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = each

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The type of the values, for ``isinstance``."""
        return self._same([type(value) for value in self.each])

    def _same(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if any(value != first for value in values):
            raise Divergence
        return first

    def __bool__(self) -> bool:
        return bool(self._same([bool(value) for value in self.each]))

    def __len__(self) -> int:
        return int(self._same([len(value) for value in self.each]))

    def __int__(self) -> int:
        return int(self._same([int(value) for value in self.each]))

    def __float__(self) -> float:
        return float(self._same([float(value) for value in self.each]))

    def __index__(self) -> int:
        return operator.index(self._same(self.each))

    def __hash__(self) -> int:
        return hash(tuple(self.each))

    def __iter__(self) -> Iterator[PerNode]:
        """Over the first items of all nodes' values, then their second ones, and so on."""
        columns = [list(value) for value in self.each]
        count = self._same([len(column) for column in columns])
        return iter([PerNode([column[k] for column in columns]) for k in range(count)])

    def __contains__(self, item: Any) -> bool:
        return bool(apply(lambda value, item: item in value, self, item))

    def __getitem__(self, key: Any) -> PerNode:
        return apply(operator.getitem, self, key)

    def __getattr__(self, name: str) -> Any:
        first = self.each[0]
        reads = isinstance(first, Tensor) and not name.endswith("_")
        if not (reads or (isinstance(first, dict) and name in _OF_DICTS)):
            raise Divergence
        found = [getattr(value, name) for value in self.each]
        return partial(apply, _call, PerNode(found)) if callable(found[0]) else PerNode(found)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> PerNode:
        kwargs = kwargs or {}
        if function.__name__.endswith("_") or "out" in kwargs:
            raise Divergence
        return apply(function, *args, **kwargs)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Nothing is modified in place or printed, and NumPy does not know such values."""
        raise Divergence

    __setitem__ = __iadd__ = __isub__ = __imul__ = __itruediv__ = __array__ = _refuse
    __array_ufunc__ = __array_function__ = __str__ = __format__ = _refuse


def _operate(operation: Callable[..., Any]) -> tuple[Any, Any]:
    def forward(self: PerNode, other: Any) -> PerNode:
        return apply(operation, self, other)

    def backward(self: PerNode, other: Any) -> PerNode:
        return apply(operation, other, self)

    return forward, backward


def _apply_to(self: PerNode, operation: Callable[..., Any]) -> PerNode:
    return apply(operation, self)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _forward, _backward = _operate(getattr(operator, _name))
    setattr(PerNode, f"__{_name}__", _forward)
    setattr(PerNode, f"__r{_name}__", _backward)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(PerNode, f"__{_name}__", _operate(getattr(operator, _name))[0])
for _name in ("neg", "abs"):
    setattr(PerNode, f"__{_name}__", partialmethod(_apply_to, getattr(operator, _name)))


def apply(function: Callable[..., Any], *args: Any, **named: Any) -> PerNode:
    """The results of a function for each node, with the node's own arguments."""
    if any(isinstance(arg, torch.Generator | np.random.Generator) for arg in (*args, *named.values())):
        raise Divergence  # each node has its own
    count = size_of([args, named])
    if len(args) == 2 and not named and all(isinstance(arg, PerNode | int | float) for arg in args):
        a, b = (arg.each if isinstance(arg, PerNode) else [arg] * count for arg in args)  # the usual case
        return PerNode([function(x, y) for x, y in zip(a, b, strict=True)])
    return PerNode([function(*of(args, k), **of(named, k)) for k in range(count)])


def _call(method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return method(*args, **named)


def of(value: Any, rank: int) -> Any:
    """One node's value. Containers are copied."""
    if isinstance(value, PerNode):
        return value.each[rank]
    if isinstance(value, dict):
        return {of(key, rank): of(item, rank) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [of(item, rank) for item in value]
        named = hasattr(value, "_fields")  # such as a model
        return type(value)(*items) if named else type(value)(items)
    return value


def size_of(value: Any) -> int:
    """The number of nodes that a value is for; 0 if it is the same for all."""
    if isinstance(value, PerNode):
        return len(value.each)
    if isinstance(value, dict):
        return max(map(size_of, [*value.keys(), *value.values()]), default=0)
    return max(map(size_of, value), default=0) if isinstance(value, list | tuple) else 0
