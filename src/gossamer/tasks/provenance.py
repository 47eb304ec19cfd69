"""Where the data of a task come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Provenance:
    """Where the data of a task come from, in words for the user, and the files.

    Attributes:
        source: a name, an id of the hub, or a path.
        test: where the test set comes from.
        files: the files that were read, by split, or by "all" where a split is drawn.
        remarks: what else was decided while reading, such as files that were left aside."""

    source: str
    test: str
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    remarks: Sequence[str] = ()
