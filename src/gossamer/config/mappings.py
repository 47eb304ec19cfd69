"""The mapping in a YAML file, before it is validated: reading it, and assignments to its fields."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from gossamer.config.registry import FromCommandLine
from gossamer.errors import BadInput, shown


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: YAML itself would silently keep the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                twice = f"{key.value!r} a second time"
                raise yaml.constructor.ConstructorError(None, None, twice, key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


def read_mapping(path: str | Path, accepted: str, fields: str = "a mapping of fields") -> dict[str, Any]:
    """The mapping in a YAML file; a missing file, broken YAML, or anything but a mapping is bad input. ``accepted`` and
    ``fields`` say in messages which file and which fields are expected."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"{path}: {reason}; accepted: {accepted}") from None
    return parse_mapping(text, str(path), fields)


def parse_mapping(text: str, source: str, fields: str = "a mapping of fields") -> dict[str, Any]:
    """The mapping in a YAML text that comes from ``source``; ``fields`` and errors as for :func:`read_mapping`."""
    try:
        raw = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as the date 2026-13-01
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        said = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise BadInput(f"{source}{where}: not YAML: {said}") from None
    if not isinstance(raw, dict):
        found = "empty" if raw is None else f"a {type(raw).__name__}"
        raise BadInput(f"{source}: {found}; accepted: {fields}")
    return raw


_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def assign_all(raw: dict[str, Any], overrides: Iterable[str], model: type[BaseModel]) -> None:
    """Carry out assignments of the command line, ``"a.b=value"`` with a YAML value, in place and whatever their order; one
    that can't be carried out, or a second one to the same field, is bad input."""
    values: dict[str, tuple[Any, str]] = {}
    for override in overrides:
        path, separator, text = override.partition("=")
        said = f"--set {override}"
        if not separator or not _PATH.fullmatch(path):
            raise BadInput(f"{said}: accepted: a.b=value, e.g. optimizer.lr=0.05")
        if path in values:
            raise BadInput(f"{said}: {path} is set already; accepted: every field once")
        try:
            values[path] = _from_command_line(yaml.safe_load(text)), said
        except (yaml.YAMLError, ValueError):
            raise BadInput(
                f"{said}: {text!r} is not YAML; accepted: a YAML value, e.g. 0.05 or '{{name: ring}}'"
            ) from None
    # A component is replaced or named before its parameters are set.
    for path in sorted(values, key=lambda path: (path.count("."), not path.endswith(".name"))):
        assign(raw, path, *values[path], model)


def assign(raw: dict[str, Any], path: str, value: Any, said: str, model: type[BaseModel]) -> None:
    """Set one field of a file's mapping in place: ``"a"`` replaces it, ``"a.b"`` sets one parameter, ``"a.name"`` chooses
    another component. ``said`` is the origin of the assignment, for messages. The defaults of ``model`` stand for
    components that the file leaves out. A path through something that has no fields is bad input."""
    if not _PATH.fullmatch(path):
        raise BadInput(f"{said}: got {path!r}; accepted: names joined by dots, e.g. optimizer.lr")
    *parents, last = path.split(".")
    fields = raw
    for depth, name in enumerate(parents):
        default = model.model_fields[name].default if depth == 0 and name in model.model_fields else None
        inner = fields.get(name, default if isinstance(default, dict | str) else {})
        if isinstance(inner, str) and depth == 0:
            inner = {"name": inner}  # a bare name stands for a component with default parameters
        if not isinstance(inner, dict):
            raise BadInput(f"{said}: {'.'.join(parents[: depth + 1])} is {shown(inner)}, which has no fields")
        fields[name] = inner if name in fields else dict(inner)
        fields = fields[name]
    if parents and last == "name" and fields.get("name", value) != value:
        fields.clear()  # the parameters of the old component do not apply to the new one
    fields[last] = value


def _from_command_line(value: Any) -> Any:
    if isinstance(value, str):
        return FromCommandLine(value)
    if isinstance(value, list):
        return [_from_command_line(item) for item in value]
    if isinstance(value, dict):
        return {key: _from_command_line(item) for key, item in value.items()}
    return value
