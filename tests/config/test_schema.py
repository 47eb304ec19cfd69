"""The JSON Schema accepts every experiment file of the project, and refuses what Experiment refuses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from gossamer import BadInput, Experiment
from gossamer.config.registry import KINDS, names
from gossamer.config.schema import components, json_schema

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def experiments() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every experiment file, and the inline base of every sweep."""
    for file in sorted(EXPERIMENTS.rglob("*.yaml")):
        raw = yaml.safe_load(file.read_text())
        experiment = raw.get("base", raw)
        if isinstance(experiment, dict):
            yield str(file.relative_to(EXPERIMENTS)), experiment


@pytest.mark.parametrize(("name", "raw"), [*experiments()])
def test_experiment_files_are_accepted_as_written_and_as_saved(
    validator: Draft202012Validator, name: str, raw: dict[str, Any]
) -> None:
    validator.validate(raw)
    validator.validate(yaml.safe_load(Experiment.of(raw, (EXPERIMENTS / name).parent).to_yaml()))


QUICKSTART = yaml.safe_load((EXPERIMENTS / "quickstart.yaml").read_text())


@pytest.mark.parametrize(
    "change",
    [
        {
            "topology": {
                "name": "layers",
                "layers": {"near": "ring", "far": {"name": "random-regular", "degree": 4}},
            }
        },
        {"codec": [{"name": "top-k", "fraction": 0.1}, "float16"]},
        {"codec": {"name": "chain", "codecs": ["float16"]}},
        {"engine": "processes"},
        {"initial": {"from": str(EXPERIMENTS)}},
        {"secure_aggregation": {}},
        {"wrappers": []},
        {"optimizer": {"name": "adam", "lr": 0.1, "schedule": {"name": "cosine", "rounds": 9}}},
    ],
)
def test_other_field_forms_are_accepted(validator: Draft202012Validator, change: dict[str, Any]) -> None:
    Experiment.of({**QUICKSTART, **change})
    validator.validate({**QUICKSTART, **change})


def test_user_class_accepts_any_parameters(validator: Draft202012Validator) -> None:
    for algorithm in ("mine:Mine", {"name": "mine:Mine", "rate": 0.5}):
        validator.validate({**QUICKSTART, "algorithm": algorithm})


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 0},
        {"node": 16},
        {"topology": "rign"},
        {"topology": "random-regular"},  # without its degree
        {"topology": {"name": "random-regular", "degree": "four"}},
        {"topology": {"name": "random-regular", "degree": 4, "weights": "metropolis"}},
        {"topology": {"name": "layers", "layers": {"near": "rign"}}},
        {"algorithm": {"name": "d-psgd", "local_step": 5}},
        {"codec": [{"name": "top-k"}, "float61"]},
        {"engine": {"name": "simulate", "trainer": "fast"}},
        {"stop": {"round": 1}},
    ],
)
def test_schema_refuses_what_experiment_refuses(
    validator: Draft202012Validator, change: dict[str, Any]
) -> None:
    with pytest.raises(BadInput):
        Experiment.of({**QUICKSTART, **change})
    assert not validator.is_valid({**QUICKSTART, **change})


@pytest.mark.parametrize("kind", KINDS)
def test_schema_lists_every_component_with_parameters(schema: dict[str, Any], kind: str) -> None:
    listed = components(schema, kind)
    assert set(listed) == set(names(kind))
    for name, cls in names(kind).items():
        fields = {field.alias or key for key, field in cls.model_fields.items()}
        assert set(listed[name]["properties"]) == {"name", *fields}
        assert listed[name]["description"]


def test_abstract_bases_are_not_in_schema(schema: dict[str, Any]) -> None:
    """A field typed as a base class, without a ComponentField, would accept only the fields of the base."""
    bases = {
        cls.__name__
        for kind in KINDS
        for component in names(kind).values()
        for cls in component.__mro__
        if inspect.isabstract(cls)
    }
    inner = {name for definition in schema["$defs"].values() for name in definition.get("$defs", {})}
    assert bases
    assert not bases & inner
