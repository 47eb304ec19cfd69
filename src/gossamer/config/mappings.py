"""YAML files that hold a mapping: experiments, sweeps, hosts, peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gossamer.errors import BadInput


class _Once:
    """Takes a key once: of two, YAML itself would keep the last and say nothing."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()  # type: ignore[misc]
        _check_keys(node)
        return node


def _check_keys(root: yaml.Node | None) -> None:
    """Before keys are merged: what is merged may be said again."""
    to_do, seen = [root], set()
    while to_do:
        node = to_do.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            to_do += node.value
        elif isinstance(node, yaml.MappingNode):
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            said = set()
            for key in keys:
                if (key.tag, key.value) in said:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} a second time", key.start_mark
                    )
                said.add((key.tag, key.value))
            to_do += [each for pair in node.value for each in pair]


class _Loader(_Once, yaml.SafeLoader):
    """Says in its errors where they are."""


class _FastLoader(_Once, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """For the certificates of a thousand peers: much text for Python alone."""


def read_mapping(path: str | Path, accepted: str, fields: str = "a mapping of fields") -> dict[str, Any]:
    """What a YAML file says, which must be a mapping.

    Args:
        path: the file.
        accepted: what it should be, for messages.
        fields: what it should hold, for messages.

    Raises:
        BadInput: for a missing file, broken YAML, or anything but a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"{path}: {reason}; accepted: {accepted}") from None
    return parse_mapping(text, str(path), fields)


def parse_mapping(text: str, source: str, fields: str = "a mapping of fields") -> dict[str, Any]:
    """What a YAML text says, which must be a mapping.

    Args:
        text: the text.
        source: where it comes from, for messages.
        fields: what it should hold, for messages.

    Raises:
        BadInput: for broken YAML, or anything but a mapping.
    """
    try:
        raw = _load(text)
    except yaml.YAMLError as error:
        raise BadInput(_broken(error, text, source)) from None
    except ValueError as error:  # a date that there is not, and its like
        raise BadInput(f"{source}: a value that YAML can't read: {error}") from None
    if not isinstance(raw, dict):
        found = "empty" if raw is None else f"a {type(raw).__name__}"
        raise BadInput(f"{source}: {found}; accepted: {fields}")
    return raw


def _broken(error: yaml.YAMLError, text: str, source: str) -> str:
    """A parser's error in one line that begins with where it is."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        since = error.context_mark
        line, column = mark.line + 1, mark.column + 1
        context = f"{error.context}, " if error.context else ""
        if context and since is not None and since.line != mark.line:
            context = f"{error.context} that begins in line {since.line + 1}, "
        said = f"{context}{error.problem}"
    elif isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        said = f"{error.reason}: {chr(error.character)!r}"
    else:
        return f"{source}: not YAML: {' '.join(str(error).split())}"
    return f"{source}, line {line}, column {column}: not YAML: {said}"


def _load(text: str) -> Any:
    try:
        return yaml.load(text, _FastLoader)  # a safe one, either way
    except yaml.YAMLError:
        return yaml.load(text, _Loader)
