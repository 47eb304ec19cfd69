"""How classes of components are written, and what is said of the usual mistakes in them, in place of pydantic's words."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, dataclass_transform

from pydantic import Field, PrivateAttr, PydanticUserError

# (pydantic has no public name for it, but that of its own.)
from pydantic._internal._model_construction import ModelMetaclass
from pydantic.fields import ModelPrivateAttr

from gossamer.errors import BadInput, own_frame

_PLAIN = (bool, int, float, str, list, tuple, dict)
"""What an experiment file can hold."""


# (Said again for type checkers, which don't inherit it.)
@dataclass_transform(kw_only_default=True, field_specifiers=(Field, PrivateAttr))
class Definition(ModelMetaclass):
    """The type of component classes: it refuses, as one is defined, what would not be a parameter of it.

    Attributes:
        __constants__: private names with a value in the class, other than ``PrivateAttr``: no object has others. (A name
            that no user gives to something of his own.)
    """

    __constants__: frozenset[str]

    def __new__(
        mcs, name: str, bases: tuple[type[Any], ...], namespace: dict[str, Any], **options: Any
    ) -> Definition:
        """The class.

        Raises:
            BadInput: for an attribute without a type, or a field whose name stands for something else.
        """
        private = {key: value for key, value in namespace.items() if key.startswith("_")}
        declared = {key for key, value in private.items() if isinstance(value, ModelPrivateAttr)}
        try:
            cls: Any = super().__new__(mcs, name, bases, namespace, **options)
        except PydanticUserError as error:
            found = _UNTYPED.get(error.code or "")
            match = found.search(str(error)) if found else None
            if match is None or match[1] not in namespace:
                raise
            elsewhere = next((base._state_goes_to for base in bases if hasattr(base, "_state_goes_to")), "")
            raise BadInput(_without_type(name, match[1], namespace[match[1]], elsewhere)) from None
        inherited = frozenset().union(*(getattr(base, "__constants__", ()) for base in bases))
        cls.__constants__ = (inherited | private.keys()) - declared
        for field in getattr(cls, "model_fields", {}):
            _check_name(cls, bases, field)
        made: Definition = cls
        return made


_UNTYPED = {
    "model-field-missing-annotation": re.compile(r"`(\w+) = "),
    "model-field-overridden": re.compile(r"Field '(\w+)'"),
}
"""pydantic's code -> where its message names the attribute."""


def _without_type(cls: str, name: str, value: Any, elsewhere: str) -> str:
    text = repr(value)
    if type(value) not in _PLAIN and value is not None:
        text, accepted = f"a {type(value).__name__}", f"{name}: ClassVar = ..., which is no setting"
    else:
        short = len(text) <= 60
        kind = "float | None" if value is None else type(value).__name__
        accepted = f"{name}: {kind} = {text if short else '...'}, a setting"
        text = text if short else f"a {kind}"
    where = _place(name)
    return f"{cls}.{name}{where}: got {text} without a type; accepted: {accepted} (for what changes: {elsewhere})"


def _place(name: str) -> str:
    """Where the user's file, which is being imported, gives an attribute of a class its value."""
    frame = own_frame()
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    lines = linecache.getlines(file)
    assigns = re.compile(rf"\s+{name}\s*=")
    line = next((k for k in range(line, len(lines) + 1) if assigns.match(lines[k - 1])), line)
    return f" ({Path(file).name}, line {line})"


def _check_name(cls: Definition, bases: tuple[type[Any], ...], field: str) -> None:
    if any(field in getattr(base, "model_fields", {}) for base in bases):
        return
    if field == "name":
        taken = "by which an experiment file names the class"
    elif any(callable(vars(each).get(field)) for base in bases for each in base.__mro__ if _is_ours(each)):
        taken = "a method of its base"
    else:
        return
    raise BadInput(f"{cls.__name__}.{field}: a field of this name, {taken}; accepted: another name")


def _is_ours(cls: type[Any]) -> bool:
    # (Of pydantic's names some are old ones for other things: ``copy``, ``schema``, ``validate``.)
    return cls.__module__.split(".")[0] == "gossamer"


def settable(cls: Definition, name: str) -> bool:
    """Whether an object of a component class takes an assignment: to a property, or to a private attribute that is declared
    as one. (Of ``_count = 0`` in a class pydantic makes one too, which all nodes of a simulation would count with.)"""
    if isinstance(getattr(cls, name, None), property | cached_property):
        return True
    declared = getattr(cls, "__private_attributes__", {})
    return name in declared and name not in cls.__constants__


def not_called_with(function: Callable[..., Any], *arguments: Any) -> str | None:
    """Why a function can't be called with some arguments; None where it can, or does not say."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # no signature, as some that are written in C
        return None
    return None
