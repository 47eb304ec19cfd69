"""The tables of docs/experiments.md name every field of an experiment. Defaults that are numbers or flags are compared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gossamer.config.experiment import (
    Checkpoints,
    Evaluation,
    Experiment,
    Failures,
    Gather,
    Processes,
    Simulate,
    Stop,
)
from gossamer.config.registry import find, names
from gossamer.tasks.tables import CSV

DOCUMENT = Path(__file__).parents[2] / "docs" / "experiments.md"


def rows(heading: str, column: str) -> dict[str, str]:
    """The defaults of the fields in the first table below a heading whose first column has this title."""
    text = DOCUMENT.read_text().split(f"{heading}\n", 1)[1].split(f"| {column} |", 1)[1]
    table = text.split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    return {name: default for first, _, default in cells for name in re.findall(r"`([^`]+)`", first)}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a model. Those of a section of an experiment are given one by one, as ``section.field``."""
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        if annotation in SECTIONS:
            yield from fields(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


SECTIONS = (Gather, Failures, Evaluation, Checkpoints, Stop)
TABLES: list[tuple[str, str, type[BaseModel], set[str]]] = [
    ("# Experiments and runs", "field", Experiment, set()),
    ("## Engines", "`simulate`", Simulate, {"name"}),
    ("## Engines", "`processes`", Processes, {"name", "threads"}),
    ("## Sampled neighbours", "field", find("topology", "cyclon"), {"weights", "allow_disconnected"}),
    ("### Any data set", "field of `task`", find("task", "hub"), set()),
    ("### CSV files", "field of `task.csv`", CSV, set()),
]
"""The headings and first columns of tables, with their models and the fields without a choice."""


@pytest.mark.parametrize(("heading", "column", "model", "fixed"), TABLES)
def test_every_field_is_documented_with_its_default(
    heading: str, column: str, model: type[BaseModel], fixed: set[str]
) -> None:
    documented, described = rows(heading, column), dict(fields(model))
    assert set(documented) == set(described) - fixed
    for name, text in documented.items():
        if match := re.match(r"(true|false|[\d.]+)(;|$)", text):
            assert described[name].default == yaml.safe_load(match[1]), name


def test_options_of_all_optimizers_are_documented() -> None:
    common = set.intersection(*(set(optimizer.model_fields) for optimizer in names("optimizer").values()))
    assert set(rows("## Optimizers", "field")) == (common - {"lr"}) | {"schedule"}  # rprop has no schedule
