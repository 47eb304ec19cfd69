"""The tables of docs/experiments.md name every field of an experiment, with its default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gossamer.config.experiment import Experiment, Processes, Section, Simulate
from gossamer.config.registry import find, names

DOCUMENT = Path(__file__).parents[2] / "docs" / "experiments.md"
UNDOCUMENTED = {"name", "threads"}
"""Fields of the engine processes without a choice: its own name, and one thread."""


def rows(heading: str, column: str) -> dict[str, str]:
    """The defaults of the fields in the first table below a heading whose first column has this title."""
    text = DOCUMENT.read_text().split(f"{heading}\n", 1)[1].split(f"| {column} |", 1)[1]
    table = text.split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    return {name: default for first, _, default in cells for name in re.findall(r"`([^`]+)`", first)}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a model. Those of a section with defaults are given one by one, with the section's name."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


TABLES: list[tuple[str, str, Any]] = [
    ("# Experiments and runs", "field", Experiment),
    ("## Engines", "`simulate`", Simulate),
    ("## Engines", "`processes`", Processes),
    ("## Sampled neighbours", "field", ("topology", "cyclon")),
    ("### Any data set", "field of `task`", ("task", "hub")),
]


@pytest.mark.parametrize(("heading", "column", "model"), TABLES)
def test_every_field_is_documented_with_its_default(heading: str, column: str, model: Any) -> None:
    documented = rows(heading, column)
    described = dict(fields(find(*model) if isinstance(model, tuple) else model))
    if model in (Simulate, Processes):
        described = {name: field for name, field in described.items() if name not in UNDOCUMENTED - set(documented)}
    assert set(documented) == set(described)
    for name, text in documented.items():
        default = yaml.safe_load(text.split(";")[0]) if text else None
        if isinstance(default, bool | int | float):
            assert described[name].default == default, name


def test_options_of_all_optimizers_are_documented() -> None:
    common = set.intersection(*(set(optimizer.model_fields) for optimizer in names("optimizer").values()))
    assert set(rows("## Optimizers", "field")) == (common - {"lr"}) | {"schedule"}  # rprop has no schedule
