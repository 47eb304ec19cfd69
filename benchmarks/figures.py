"""Output of benchmarks: a line for each row on standard output, and optionally all rows in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from machine import describe

Row = dict[str, Any]


def report(rows: Iterable[Row], path: Path | None) -> None:
    """Show rows as they are measured, then the machine, and write everything to a file if one is given."""
    measured = []
    for row in rows:
        measured.append(row)
        _show(row)
    machine = describe()
    _show(machine)
    if path is not None:
        path.write_text(json.dumps({"rows": measured, "machine": machine}, indent=1) + "\n")


def _show(row: Mapping[str, Any]) -> None:
    texts = (
        f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}" for key, value in row.items()
    )
    print("  ".join(texts), flush=True)
