"""What a node expects of the payloads of its peers, and what is wrong with one that came.

A node expects what it sends itself: under one tag, all payloads have one form. An algorithm that waits for something else, or
before it has sent anything, declares it (:meth:`gossamer.Node.expect`). The form of a payload is the kind of each item, the
dtypes and shapes of tensors, and the keys of dicts. Floating-point values have to be finite in any case.

A simulated broadcast has one message for all receivers, whose form is computed once, and values are looked at once for each
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.messages.tags import Coded, Message, Model, Part, Payload, Tag, as_tag

Form = tuple[Any, ...]
"""The kind of a payload, and what is known of its items."""
Prefix = tuple[str | int, ...]
MOST_TAGS, MOST_SHAPES, MOST_FORMS = 64, 1024, 16
"""How many tags, shapes of tags, and forms under one of them are remembered: the newest tags, and the first forms."""
_WIDE = {torch.float32, torch.float64}
_SEEN = "_gossamer_finite"  # an attribute of tensors whose values are finite: their version then


@dataclass(frozen=True)
class Undecodable:
    """Replaces a payload that the codec can't decode."""

    reason: str


@dataclass(frozen=True, eq=False)
class Declared:
    """What an algorithm expects under a tag: one of these forms (any, if there is none), and what a function says."""

    forms: tuple[Form, ...]
    check: Callable[[Message], Any] | None
    parts: bool  # whether a part may stand for a whole vector


class Expectations:
    """What one node expects. ``size`` is the number of parameters; ``encoded`` says whether a codec encodes models, so that a
    part may stand for a whole vector."""

    def __init__(self, size: int, *, encoded: bool) -> None:
        self._size, self._encoded = size, encoded
        self._declared: dict[Prefix, Declared] = {}
        self._sent: dict[Prefix, list[Form]] = {}  # by tag
        self._shapes: dict[tuple[Any, ...], list[Form]] = {}  # by tag, with the type ``int`` for any number

    def declare(
        self, tag: Tag, like: tuple[Payload, ...], check: Callable[[Message], Any] | None, *, exact: bool
    ) -> None:
        """See :meth:`gossamer.Node.expect`."""
        forms = tuple(self._form(each) for each in like)
        self._declared[_shape(as_tag(tag))] = Declared(forms, check, self._encoded and not exact)

    def sent(self, tag: Prefix, payload: Payload) -> bool:
        """The node sends this itself, before it is encoded. False, and nothing is learned from it, if it has values that are
        not finite, or of kinds that can't be sent."""
        try:
            form = self._form(payload)
        except ValueError:
            return False
        known = self._sent.get(tag)
        if known is None:
            known = self._sent[tag] = []
            if len(self._sent) > MOST_TAGS:
                del self._sent[next(iter(self._sent))]
        if form not in known and form not in _SAYS_NOTHING:
            _add(known, form)
            shape = self._shapes.setdefault(_shape(tag), [])
            if len(self._shapes) > MOST_SHAPES:
                del self._shapes[next(iter(self._shapes))]
            if form not in shape:
                _add(shape, form)
        return True

    def fault(self, message: Message) -> str | None:
        """What is wrong with a decoded message, in words; None for a message that is as expected."""
        form = message.form
        if form is not None and not self._declared and form in self._sent.get(message.tag, ()):
            return None
        if form is None:
            try:
                form = self._form(message.payload)
            except ValueError as error:
                return str(error)
            object.__setattr__(message, "form", form)  # (the receivers of a broadcast share the message)
        if self._declared:
            shape = _shape(message.tag)
            for length in range(len(shape), -1, -1):
                if (declared := self._declared.get(shape[:length])) is not None:
                    return _breach(declared, message, form)
        known = self._sent.get(message.tag) or self._shapes.get(_shape(message.tag))
        if not known or form in known or any(_fits(form, each, parts=self._encoded) for each in known):
            return None
        return _unlike(form, known)

    def _form(self, payload: Payload) -> Form:
        """The form of a payload; ValueError for values that are not finite, or of kinds that can't be sent."""
        if type(payload) is Model:
            parameters: Any = payload.parameters
            if type(parameters) is Coded and self._encoded:  # the node's own: it was encoded by node.compress
                return "model", torch.float32, self._size, len(_checked(payload.buffers)), True
            is_part = type(parameters) is Part
            vector = _checked(parameters.values if is_part else parameters)
            length = parameters.size if is_part else vector.numel()
            return "model", vector.dtype, length, len(_checked(payload.buffers)), is_part
        if isinstance(payload, Tensor):
            _checked(payload)
            return "tensor", payload.dtype, tuple(payload.shape)
        if isinstance(payload, float):
            if not math.isfinite(payload):
                raise ValueError(f"the value {payload!r}; accepted: finite ones")
            return ("number",)
        if isinstance(payload, dict):
            items = [(key, self._form(payload[key])) for key in sorted(payload, key=str)]
            named = tuple(item for item in items if isinstance(item[0], str))
            return "dict", named, tuple({form: None for key, form in items if not isinstance(key, str)})
        if isinstance(payload, list | tuple):
            forms = [self._form(item) for item in payload]
            alike = all(form == forms[0] for form in forms)
            return "list", tuple(forms[:1] if alike else forms)
        if isinstance(payload, Part):
            return "part", _checked(payload.values).dtype, payload.size
        if isinstance(payload, Undecodable):
            raise ValueError(payload.reason)
        for kind, name in _KINDS.items():
            if isinstance(payload, kind):
                return (name,)
        raise ValueError(f"a {type(payload).__name__}, which no codec of this experiment has made")


_KINDS = {type(None): "nothing", int: "number", str: "text", bytes: "bytes"}
_SAYS_NOTHING: tuple[Form, ...] = (("nothing",), ("list", ()), ("dict", (), ()))
"""Forms of what a node may send in place of anything else."""


def finite(vector: Tensor) -> bool:
    """Whether all values of a tensor are finite; integers are. One pass, once for each version of a tensor."""
    if getattr(vector, _SEEN, None) == vector._version:
        return True
    if vector.dtype not in _WIDE:
        if not (vector.dtype.is_floating_point or vector.dtype.is_complex):
            return True
        wide = torch.complex128 if vector.dtype.is_complex else torch.float32
        return finite(
            torch.view_as_real(vector.to(wide).resolve_conj()) if wide.is_complex else vector.to(wide)
        )
    if vector.layout is not torch.strided or vector.is_meta:
        return True  # it can't be sent
    # A sum is finite only if its terms are; finite terms may have an infinite sum.
    if not (math.isfinite(vector.sum().item()) or vector.isfinite().all().item()):
        return False
    setattr(vector, _SEEN, vector._version)
    return True


def _checked(vector: Any) -> Tensor:
    if not isinstance(vector, Tensor):
        raise ValueError(f"a {type(vector).__name__} in place of a vector")
    if not finite(vector):
        raise ValueError("values that are not finite")
    return vector


def _shape(tag: Prefix) -> tuple[Any, ...]:
    return tuple(int if type(each) is int else each for each in tag)


def _add(forms: list[Form], form: Form) -> None:
    if len(forms) < MOST_FORMS:
        forms.append(form)


def _breach(declared: Declared, message: Message, form: Form) -> str | None:
    """What an algorithm finds wrong with a message."""
    forms = declared.forms
    if forms and not any(_fits(form, each, parts=declared.parts) for each in forms):
        return _unlike(form, forms)
    try:
        refused = declared.check is not None and declared.check(message) is False
    except Exception as error:  # noqa: BLE001 - of any kind: the payload is a stranger's
        return " ".join(str(error).split()) or type(error).__name__
    return "values that the algorithm does not accept" if refused else None


def _fits(theirs: Form, own: Form, *, parts: bool) -> bool:
    """Whether a payload of one form can replace one of the other: a whole vector stands for a part of it, and a list of items
    that are all alike may have any length."""
    if theirs == own:
        return True
    if theirs[0] != own[0]:
        return False
    if own[0] == "model":
        return theirs[1:-1] == own[1:-1] and (parts or own[-1] or not theirs[-1])
    if own[0] == "list":
        items = own[1] * len(theirs[1]) if len(own[1]) == 1 else own[1]
        alike = len(items) == len(theirs[1])
        return not items or (
            alike and all(_fits(*each, parts=parts) for each in zip(theirs[1], items, strict=True))
        )
    if own[0] == "dict":
        named, numbered = dict(own[1]), own[2]
        return own in _SAYS_NOTHING or (
            named.keys() == dict(theirs[1]).keys()
            and all(_fits(form, named[key], parts=parts) for key, form in theirs[1])
            and all(
                not numbered or any(_fits(form, each, parts=parts) for each in numbered) for form in theirs[2]
            )
        )
    return False


def _unlike(form: Form, accepted: Any) -> str:
    return f"{_said(form)}; accepted: {', or '.join(map(_said, accepted))}"


def _said(form: Form) -> str:
    """A form in words."""
    match form:
        case "model", dtype, length, buffers, is_part:
            and_buffers = f" and {buffers} buffers" if buffers else ""
            return f"a model of {length} parameters{and_buffers} ({dtype}{', a part' if is_part else ''})"
        case "tensor", dtype, shape:
            return f"a tensor {dtype} {tuple(shape)}"
        case "part", dtype, size:
            return f"a part of a vector {dtype} ({size},)"
        case "list", forms:
            return f"a list of {', '.join(map(_said, forms)) or 'nothing'}"
        case "dict", named, _:
            return f"a dict of {', '.join(f'{key!r} ({_said(each)})' for key, each in named) or 'numbers'}"
    return str(form[0])
