"""YAML files that hold a mapping: experiments, sweeps, hosts, peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gossamer.errors import BadInput

# (The certificates of a thousand peers are much text for Python alone.)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
        return yaml.load(text, _LOADER)  # a safe one, either way
    except yaml.YAMLError:
        return yaml.safe_load(text)  # whose errors say better where they are
