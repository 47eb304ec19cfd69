"""What all nodes of a run must agree on, in a few bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from gossamer import __version__
from gossamer.config import Experiment
from gossamer.runtime.processes.standalone.roster import DIGEST_BYTES

_OWN = ("data_root", "engine")
"""Fields that each machine has as it likes: where its data is, and how its processes run."""


def digest(experiment: Experiment) -> bytes:
    """The same for nodes that can run together: the same resolved experiment, by the same version of gossamer.

    A file that the experiment names counts by what is in it, wherever it lies. (Classes that it names,
    "package.module:Class", count by their name alone.)
    """
    said = experiment.model_dump(mode="json", exclude=set(_OWN))
    text = json.dumps([__version__, _by_content(said)], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]


def files(value: Any) -> list[Path]:
    """The files that a resolved experiment, or a part of it, names."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [path for item in items for path in files(item)]
    return [Path(value)] if _is_file(value) else []


def _is_file(value: Any) -> bool:
    # (The paths of a resolved experiment are absolute.)
    return isinstance(value, str) and value.startswith("/") and Path(value).is_file()


def _by_content(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _by_content(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_by_content(item) for item in value]
    if _is_file(value):
        return f"sha256:{hashlib.sha256(Path(value).read_bytes()).hexdigest()}"
    return value
