"""The forms of payloads that a node expects from its peers, and the faults in those that arrive.

A node expects what it sends itself: all payloads under one tag have the same form. An algorithm that receives
something else, or receives before it has sent anything, declares the form (:meth:`gossamer.Node.expect`). The
form of a payload consists of the kind of each item, the dtypes and shapes of tensors, and the keys of dicts.
Floating-point values always have to be finite.

In a simulation, all receivers of a broadcast share one message. Its form is computed once, and the values of
each tensor are checked once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.learning.parameters import is_finite
from gossamer.messages.tags import Coded, Message, Model, Part, Payload, Tag, given_tag

Form = tuple[Any, ...]
"""The kind of a payload and the forms of its items. Its repr is readable."""
Prefix = tuple[str | int, ...]
MAX_SHAPES, MAX_FORMS = 1024, 16
"""Limits: the number of tag patterns (in which any number stands for all numbers) that a node remembers, and
the number of forms under one pattern, above which the node accepts any form."""


@dataclass(frozen=True)
class Undecodable:
    """Replaces a payload that the codec can't decode."""

    reason: str


@dataclass(frozen=True, eq=False)
class Declared:
    """An algorithm's declaration for a tag: the accepted forms (empty: any form), and a function that checks
    values."""

    forms: tuple[Form, ...]
    check: Callable[[Message], Any] | None
    parts: bool  # whether a part may stand for a whole vector


class Expectations:
    """The expectations of one node. ``size`` is the number of parameters. ``encoded`` tells whether a codec
    encodes models, so that a part may replace a whole vector."""

    __slots__ = ("_declared", "_encoded", "_sent", "_size")

    def __init__(self, size: int, *, encoded: bool) -> None:
        self._size, self._encoded = size, encoded
        self._declared: dict[Prefix, Declared] | None = None
        self._sent: dict[tuple[Any, ...], tuple[Form, ...]] = {}  # by the shape of the tag

    def declare(
        self, tag: Tag, like: tuple[Payload, ...], check: Callable[[Message], Any] | None, *, exact: bool
    ) -> None:
        """See :meth:`gossamer.Node.expect`."""
        forms = tuple(self._form(payload) for payload in like)
        self._declared = self._declared or {}
        self._declared[_shape(given_tag(tag))] = Declared(forms, check, self._encoded and not exact)

    def sent(self, tag: Prefix, payload: Payload) -> Form | None:
        """Learn from a payload that the node sends, before it is encoded. Returns its form; None, without learning
        anything, if it has non-finite values or kinds that can't be sent."""
        try:
            form = self._form(payload)
        except ValueError:
            return None
        if tag[0] == "answer":  # answers to several kinds of questions share one tag
            return form
        shape = _shape(tag)
        known = self._sent.get(shape, ())
        if form not in known and form not in _UNINFORMATIVE:
            self._sent[shape] = _with(known, form)
            if len(self._sent) > MAX_SHAPES:
                del self._sent[next(iter(self._sent))]
        return form

    def accepted(self, tag: Prefix) -> tuple[Form, ...] | None:
        """Forms under a tag in which nothing is wrong, if their values are finite. None if the algorithm declares what it
        expects."""
        return None if self._declared else self._sent.get(_shape(tag), ())

    def fault(self, message: Message) -> str | None:
        """A description of what is wrong with a decoded message; None if it is as expected."""
        shape = _shape(message.tag)
        known = self._sent.get(shape)
        if message.form and known and not self._declared and message.form[0] in known:
            return None  # the most frequent case
        if not message.form:
            try:
                message.form.append(self._form(message.payload))
            except ValueError as error:
                return str(error)
        form = message.form[0]
        if self._declared:
            for length in range(len(shape), -1, -1):
                if (declared := self._declared.get(shape[:length])) is not None:
                    return _declared_fault(declared, message, form)
        if not known or len(known) > MAX_FORMS:
            return None
        return _mismatch(form, known, parts=self._encoded)

    def know(self, tag: Prefix) -> bool:
        """Whether the node knows, or can check, the form of messages under a tag."""
        shape = _shape(tag)
        return bool(self._sent.get(shape)) or any(
            shape[:length] in (self._declared or ()) for length in range(len(shape) + 1)
        )

    def misfit(self, payload: Payload, own: Model | Tensor | None) -> str | None:
        """Why a payload can't be combined with a vector or model (None: the node's own); None if it can."""
        vector = own.parameters if isinstance(own, Model) else own
        size, dtype = (self._size, torch.float32) if vector is None else (len(vector), vector.dtype)
        form = self._form(payload)
        fits = form[0] in ("model", "part", "tensor") and form[2] in (size, (size,))
        if fits and (form[1] == dtype or (form[1].is_floating_point and dtype.is_floating_point)):
            return None
        return f"{_described(form)}; accepted: a vector of {size} values ({dtype}), or a Part or Model of one"

    def _form(self, payload: Payload) -> Form:
        """The form of a payload. ValueError for non-finite values, or kinds that can't be sent."""
        kind = type(payload)
        if kind is Tensor and is_finite(payload):  # (the most frequent kind)
            return _form_of_tensor(payload.dtype, payload.shape)
        if kind is Model:
            parameters, buffers = payload
            if type(parameters) is Coded and self._encoded:  # the node's own, encoded by node.compress
                return "model", torch.float32, self._size, _checked(buffers).numel(), "part"
            if type(parameters) is Part:
                vector = _checked(parameters.values)
                return "model", vector.dtype, parameters.size, _checked(buffers).numel(), "part"
            vector = _checked(parameters)
            return "model", vector.dtype, vector.numel(), _checked(buffers).numel(), "whole"
        if kind is float and not math.isfinite(payload):
            raise ValueError(f"the value {payload!r}; accepted: finite ones")
        if kind in _SCALARS:
            return (_SCALARS[kind],)
        if kind is dict:
            items = {key: self._form(item) for key, item in payload.items()}
            if all(type(key) is str for key in items):
                return "dict", tuple(sorted(items.items()))
            return "numbered", tuple(dict.fromkeys(items.values()))
        if isinstance(payload, Tensor):
            return _form_of_tensor(_checked(payload).dtype, payload.shape)
        if isinstance(payload, list | tuple):
            forms = tuple(self._form(item) for item in payload)
            return "list", forms[:1] if len(set(forms)) == 1 else forms
        if isinstance(payload, Part):
            return "part", _checked(payload.values).dtype, payload.size
        if isinstance(payload, Undecodable):
            raise ValueError(payload.reason)
        for base, name in _SCALARS.items():
            if isinstance(payload, base):  # such as an enumeration's member, sent as its base type
                return (name,)
        raise ValueError(f"a {kind.__name__}, which no codec of this experiment produces")


_SCALARS: dict[type, str] = {
    bool: "number",
    int: "number",
    float: "number",
    str: "text",
    bytes: "bytes",
    type(None): "nothing",
}
_UNINFORMATIVE: tuple[Form, ...] = (("nothing",), ("list", ()), ("dict", ()))
"""Forms that a node may send in place of any other."""


# Nodes share the forms of what all of them send: they take no memory for each node, and equal ones are found at once.


@lru_cache(maxsize=1024)
def _form_of_tensor(dtype: torch.dtype, shape: torch.Size) -> Form:
    return "tensor", dtype, tuple(shape)


@lru_cache(maxsize=1024)
def _with(forms: tuple[Form, ...], form: Form) -> tuple[Form, ...]:
    return *forms, form


def _checked(vector: Any) -> Tensor:
    if not isinstance(vector, Tensor):
        raise ValueError(f"a {type(vector).__name__} in place of a vector")
    if not is_finite(vector):
        raise ValueError("values that are not finite")
    return vector


@lru_cache(maxsize=64)
def _shape(tag: Prefix) -> tuple[Any, ...]:
    """A tag with the type ``int`` in place of every number."""
    return tuple(int if type(part) is int else part for part in tag)


def _declared_fault(declared: Declared, message: Message, form: Form) -> str | None:
    """The fault found by an algorithm's own check."""
    if declared.forms and (fault := _mismatch(form, declared.forms, parts=declared.parts)) is not None:
        return fault
    try:
        refused = declared.check is not None and declared.check(message) is False
    except Exception as error:  # noqa: BLE001 - of any kind, since the payload is untrusted
        return " ".join(str(error).split()) or type(error).__name__
    return "values that the algorithm does not accept" if refused else None


def _mismatch(form: Form, accepted: Sequence[Form], *, parts: bool) -> str | None:
    """The fault of a form that matches no accepted form."""
    if any(_fits(form, candidate, parts=parts) for candidate in accepted):
        return None
    return f"{_described(form)}; accepted: {', or '.join(map(_described, accepted))}"


def _fits(theirs: Form, own: Form, *, parts: bool) -> bool:
    """Whether a payload of one form can replace one of the other. A whole vector can replace a part, and a
    list of items of one form may have any length."""
    if theirs == own:
        return True
    if theirs[0] != own[0]:
        return False
    match own[0]:
        case "model":
            return theirs[1:-1] == own[1:-1] and (parts or theirs[-1] == "whole" or own[-1] == "part")
        case "list":
            items = own[1] * len(theirs[1]) if len(own[1]) == 1 else own[1]
            return not items or _all_fit(theirs[1], items, parts=parts)
        case "dict":
            forms, expected = dict(theirs[1]), dict(own[1])
            return not expected or (
                forms.keys() == expected.keys()
                and _all_fit([*forms.values()], [*expected.values()], parts=parts)
            )
        case "numbered":
            return all(any(_fits(form, item, parts=parts) for item in own[1]) for form in theirs[1])
    return False


def _all_fit(theirs: Sequence[Form], own: Sequence[Form], *, parts: bool) -> bool:
    return len(theirs) == len(own) and all(
        _fits(form, expected, parts=parts) for form, expected in zip(theirs, own, strict=True)
    )


def _described(form: Form) -> str:
    """A form in words."""
    match form:
        case "model", dtype, length, buffers, kind:
            return f"a model of {length} parameters and {buffers} buffers ({dtype}, {kind})"
        case "list" | "dict" | "numbered" as kind, items:
            return f"a {kind} of {', '.join(map(str, items)) or 'nothing'}"
    return " ".join(map(str, form))
