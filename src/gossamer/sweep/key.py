"""What tells the runs of a sweep apart: all that an experiment says, and the files that it names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gossamer.config import Experiment


class Keys:
    """Keys of experiments. Each file that they name is read once, so that a sweep is over one state of it."""

    def __init__(self) -> None:
        self._digests: dict[Path, str | None] = {}

    def of(self, experiment: Experiment) -> str:
        """The same for experiments of the same results: what they are called and how many threads compute changes none.
        Data in the data root is taken for what it is called."""
        said = experiment.model_dump(
            mode="json", exclude={"name": True, "checkpoint": True, "trackers": True, "engine": {"workers"}}
        )
        values = (
            getattr(experiment, name)
            for name in type(experiment).model_fields
            if name not in ("data_root", "trackers")
        )
        files = {str(path): self._digest(path) for value in values for path in _paths(value)}
        if files:
            said["files"] = files
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def _digest(self, path: Path) -> str | None:
        """Of a file's bytes; None where there are none to read, which the run will say."""
        if path not in self._digests:
            try:
                with path.open("rb") as file:
                    self._digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError:
                self._digests[path] = None
        return self._digests[path]


def _paths(value: Any) -> Iterator[Path]:
    """Every path in a component's parameters, and in those of its components."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _paths(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _paths(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _paths(item)
