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
        raise BadInput(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise BadInput(f"{source}: a {type(raw).__name__}; accepted: {fields}")
    return raw


def _load(text: str) -> Any:
    try:
        return yaml.load(text, _FastLoader)  # a safe one, either way
    except yaml.YAMLError:
        return yaml.load(text, _Loader)
