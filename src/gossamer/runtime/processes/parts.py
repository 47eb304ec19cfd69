"""Files and models on their way between the coordinator and a worker, in parts that fit a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import yaml

from gossamer.config import Experiment
from gossamer.runtime.processes.protocol import PART_BYTES, Part

Kind = Literal["experiment", "manifest", "checkpoint", "restart", "model", "timeline"]


def parts(kind: Kind, rank: int, number: int, data: bytes | memoryview, name: str = "") -> Iterator[Part]:
    """The parts of a file; arguments as for :class:`~gossamer.runtime.processes.protocol.Part`."""
    for start in range(0, max(len(data), 1), PART_BYTES):
        piece = bytes(data[start : start + PART_BYTES])
        yield Part(kind, rank, number, piece, start + PART_BYTES >= len(data), name)


class Assembly:
    """Puts parts together."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int], bytearray] = {}

    def take(self, part: Part) -> bytes | None:
        """Take a part; gives the whole when it is the last one."""
        key = part.kind, part.rank, part.number
        whole = self._open.setdefault(key, bytearray())
        whole += part.data
        if not part.last:
            return None
        del self._open[key]
        return bytes(whole)


def packed(experiment: Experiment) -> tuple[str, list[Part]]:
    """A resolved experiment (YAML) that names files relative to itself, and the parts of these files."""
    said = experiment.model_dump(mode="json")
    data_root = said.pop("data_root", None)
    paths = dict.fromkeys(_files(said))
    names = {path: f"files/{number}-{path.rsplit('/', 1)[1]}" for number, path in enumerate(paths)}
    found: list[Part] = []
    for number, (path, name) in enumerate(names.items()):
        with open(path, "rb") as file:  # noqa: PTH123 - a path of the experiment, as text
            found += parts("experiment", 0, number, file.read(), name)
    renamed = {**_renamed(said, names), "data_root": data_root}
    return yaml.safe_dump(renamed, sort_keys=False, allow_unicode=True), found


def _files(value: Any) -> list[str]:
    """The files that a resolved experiment, or a part of it, names; its paths are absolute."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [path for item in items for path in _files(item)]
    return [value] if _is_file(value) else []


def _is_file(value: Any) -> bool:
    from pathlib import Path

    return isinstance(value, str) and value.startswith("/") and Path(value).is_file()


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value
