"""Changes of what an experiment file says, before it is read: ``a.b=value``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml
from pydantic import BaseModel

from gossamer.config.registry import FromCommandLine
from gossamer.errors import BadInput, shown

_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def assign_all(raw: dict[str, Any], overrides: Iterable[str], model: type[BaseModel]) -> None:
    """Carry out assignments of the command line, ``"a.b=value"``; arguments and errors as for :func:`assign`. One that would
    undo another is refused."""
    done: list[str] = []
    for override in _names_first(list(overrides)):
        path, separator, text = override.partition("=")
        if not separator or not _PATH.fullmatch(path):
            raise BadInput(f"--set {override}: accepted: a.b=value, e.g. optimizer.lr=0.05")
        try:
            value = _from_command_line(yaml.safe_load(text))
        except (yaml.YAMLError, ValueError):
            raise BadInput(f"--set {override}: {text!r} is not a YAML value") from None
        whole = path.removesuffix(".name")  # another name undoes all that was said of a component
        for each in done:
            if each in (path, whole) or each.startswith(f"{whole}."):
                raise BadInput(
                    f"--set {override}: {each} is set already; accepted: every field once, a whole one before its parts"
                )
        done.append(path)
        assign(raw, path, value, f"--set {override}", model)


def _names_first(overrides: list[str]) -> list[str]:
    """Another component is named before its parameters are given, whatever the order of the arguments: outer ones first, but
    none before what it is a part of."""
    paths = [override.partition("=")[0] for override in overrides]

    def place(number: int) -> tuple[int, int]:
        path = paths[number]
        if not path.endswith(".name"):
            return number, 0
        wholes = [before for before in range(number) if path.startswith(f"{paths[before]}.")]
        return max(wholes, default=-1), path.count(".")

    return [overrides[number] for number in sorted(range(len(overrides)), key=place)]


def assign(raw: dict[str, Any], path: str, value: Any, said: str, model: type[BaseModel]) -> None:
    """Set one field in what a file says: ``"a"`` replaces all of it, ``"a.b"`` one parameter.

    Args:
        raw: the file's mapping; changed in place.
        path: names, joined by dots.
        value: the new value.
        said: who asks for it, for messages.
        model: what the mapping describes: its defaults stand for the components that the file leaves out.

    Raises:
        BadInput: for a path through something that has no fields.
    """
    if not _PATH.fullmatch(path):
        raise BadInput(f"{said}: got {path!r}; accepted: names joined by dots, e.g. optimizer.lr")
    *parents, last = path.split(".")
    place = raw
    for depth, name in enumerate(parents):
        inner = place.get(name, _default_spec(name, model) if depth == 0 else {})
        if isinstance(inner, str) and depth == 0:
            inner = {"name": inner}  # a bare name stands for a component with default parameters
        if not isinstance(inner, dict):
            raise BadInput(f"{said}: {'.'.join(parents[: depth + 1])} is {shown(inner)}, which has no fields")
        place[name] = inner
        place = inner
    if parents and last == "name" and "name" in place and place["name"] != value:
        place.clear()  # another component: the old one's parameters are not its own
    place[last] = value


def _default_spec(name: str, model: type[BaseModel]) -> Any:
    """The component that a field stands for when the file leaves it out, as a file would say it."""
    field = model.model_fields.get(name)
    spec = None if field is None else field.default
    return dict(spec) if isinstance(spec, dict) else spec if isinstance(spec, str) else {}


def _from_command_line(value: Any) -> Any:
    if isinstance(value, str):
        return FromCommandLine(value)
    if isinstance(value, list):
        return [_from_command_line(item) for item in value]
    if isinstance(value, dict):
        return {key: _from_command_line(item) for key, item in value.items()}
    return value
