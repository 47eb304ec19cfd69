"""Values of all nodes at once, for an algorithm that runs once for all nodes (:mod:`gossamer.runtime.simulate.cohort`).

An operation on such values is done for each node by itself, so its results have the same bits as if the nodes ran
by themselves. Where nodes would part ways, as at an ``if`` that only some of them enter, or where something fails,
:class:`Divergence` is raised."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

_DICT_METHODS = {"keys", "values", "items", "get", "missing"}


class Divergence(BaseException):
    """Nodes do different things here, or it is unknown whether they do. ``count`` is the number of such errors so far:
    even in an algorithm that catches one, the nodes have parted ways."""

    count: ClassVar[int] = 0

    def __init__(self) -> None:
        Divergence.count += 1


class PerNode:
    """One value for each node, in rank order. If ``keys``, they may be keys of dicts, in which only such values are
    looked up."""

    __slots__ = ("each", "keys_of_dicts")

    def __init__(self, each: Sequence[Any], *, keys: bool = False) -> None:
        self.each, self.keys_of_dicts = each, keys

    def _all(self, function: Callable[[Any], Any]) -> Any:
        """The result of a function, if it is the same for all nodes."""
        try:
            results = [function(value) for value in self.each]
        except Exception as error:
            raise Divergence from error
        if any(result != results[0] for result in results):
            raise Divergence
        return results[0]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The type of the values, for ``isinstance``."""
        return self._all(type)

    def __bool__(self) -> bool:
        return bool(self._all(bool))

    def __len__(self) -> int:
        return int(self._all(len))

    def __int__(self) -> int:
        return int(self._all(int))

    def __float__(self) -> float:
        return float(self._all(float))

    def __index__(self) -> int:
        return int(self._all(operator.index))

    def __hash__(self) -> int:
        return hash(tuple(self.each)) if self.keys_of_dicts else int(self._all(hash))

    def __iter__(self) -> Iterator[Any]:
        """Over the first items of all nodes' values, then their second ones, and so on."""
        columns = apply(list, self).each
        count = self._all(len)
        return iter([_joined([column[k] for column in columns], self) for k in range(count)])

    def __contains__(self, item: Any) -> bool:
        return bool(apply(operator.contains, self, item))

    def __getattr__(self, name: str) -> Any:
        first = self.each[0]
        reads = isinstance(first, Tensor) and not name.endswith("_")
        if not (reads or (isinstance(first, dict) and name in _DICT_METHODS)):
            raise Divergence
        attribute = apply(getattr, self, name)
        return partial(apply, operator.call, attribute) if callable(getattr(first, name)) else attribute

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.__name__.endswith("_") or "out" in kwargs or kwargs.get("inplace"):
            raise Divergence
        return apply(function, *args, **kwargs)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Nothing is modified in place or printed, and NumPy does not know such values."""
        raise Divergence

    __setitem__ = __array__ = __array_ufunc__ = __array_function__ = __str__ = __repr__ = __format__ = _refuse


def _method(operation: Callable[..., Any], *, reflected: bool = False) -> Any:
    def method(self: PerNode, *others: Any) -> Any:
        return apply(operation, *others, self) if reflected else apply(operation, self, *others)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    _operation = getattr(operator, f"__{_name}__")
    setattr(PerNode, f"__{_name}__", _method(_operation))
    setattr(PerNode, f"__r{_name}__", _method(_operation, reflected=True))
    setattr(PerNode, f"__i{_name}__", PerNode._refuse)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "getitem"):
    setattr(PerNode, f"__{_name}__", _method(getattr(operator, f"__{_name}__")))


def apply(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The results of a function for each node, with the node's own arguments. A result that is None, True or False
    has to be the same for all nodes."""
    like = _first([args, named])
    if like is None or any(
        isinstance(arg, torch.Generator | np.random.Generator) for arg in _flat([args, named])
    ):
        raise Divergence  # each node would have a generator of its own
    tensors = [arg for arg in args if type(arg) is PerNode and isinstance(arg.each[0], Tensor)]
    versions = [[value._version for value in arg.each] for arg in tensors]
    try:
        results = [function(*of(args, k), **of(named, k)) for k in range(len(like.each))]
    except Exception as error:
        raise Divergence from error
    if versions != [[value._version for value in arg.each] for arg in tensors]:
        raise Divergence
    return _joined(results, like)


def _joined(values: Sequence[Any], like: PerNode) -> Any:
    """The values of all nodes as one. None, True and False stand for themselves, since algorithms ask for their
    identity."""
    if any(value is None or isinstance(value, bool) for value in values):
        if any(value is not values[0] for value in values):
            raise Divergence
        return values[0]
    return PerNode(values, keys=like.keys_of_dicts)


def of(value: Any, rank: int) -> Any:
    """One node's value. Containers are copied."""
    kind = type(value)
    if issubclass(kind, PerNode):
        return value.each[rank]
    if issubclass(kind, dict):
        return {of(key, rank): of(item, rank) for key, item in value.items()}
    if issubclass(kind, list | tuple):
        items = [of(item, rank) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)  # the first: named tuples
    return value


def _flat(value: Any) -> Iterator[Any]:
    """The values in containers."""
    kind = type(value)
    if issubclass(kind, dict):
        yield from _flat([*value.keys(), *value.values()])
    elif issubclass(kind, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _first(value: Any) -> PerNode | None:
    return next((item for item in _flat(value) if issubclass(type(item), PerNode)), None)
