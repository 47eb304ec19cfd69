"""The JSON Schema of an experiment file, with every component and its parameters, for completion and checks
in editors."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from gossamer.config.experiment import Experiment
from gossamer.config.registry import KINDS, Component, names

_CUSTOM = {"type": "string", "pattern": ":", "description": "a class of your own: package.module:Class"}


def json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12). Its ``$defs`` define the accepted values of each kind and, under
    ``kind.name``, the mapping of each component: ``topology``, ``topology.ring``, ..."""
    definitions: dict[str, Any] = {}
    for kind in sorted(KINDS):
        classes = dict(sorted(names(kind).items()))
        bare = [
            name
            for name, cls in classes.items()
            if not any(field.is_required() for field in cls.model_fields.values())
        ]
        definitions[kind] = {
            "anyOf": [
                {"enum": bare},
                *({"$ref": f"#/$defs/{kind}.{name}"} for name in classes),
                _CUSTOM,
                {"type": "object", "required": ["name"], "properties": {"name": _CUSTOM}},
            ]
        }
        for name, cls in classes.items():
            described = _described(cls, f"{kind}.{name}")
            described["properties"] = {"name": {"const": name}, **described.get("properties", {})}
            described["required"] = ["name", *described.get("required", [])]
            definitions[f"{kind}.{name}"] = described
    experiment = _described(Experiment, None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **experiment,
        "$defs": {**experiment["$defs"], **definitions},
    }


def components(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """The components of a kind in the schema: name -> the schema of its mapping."""
    prefix, definitions = f"{kind}.", schema["$defs"].items()
    return {key.removeprefix(prefix): node for key, node in definitions if key.startswith(prefix)}


def summary(documented: object) -> str:
    """The first paragraph of a docstring in one line, without reStructuredText markup."""
    paragraph = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return re.sub(r":\w+:(?=`)|`", "", paragraph)


def _described(cls: type[BaseModel], home: str | None) -> dict[str, Any]:
    """The schema of a model, whose own definitions go below ``home`` in ``$defs``; None is the root."""
    template = "#/$defs/{model}" if home is None else f"#/$defs/{home}/$defs/{{model}}"
    schema = cls.model_json_schema(ref_template=template, schema_generator=_Generator)
    schema["description"] = summary(cls)
    for name, text in parameters(cls).items():
        if name in schema.get("properties", {}):
            schema["properties"][name]["description"] = text
    # A field that holds components has a placeholder, since a component may hold others of its own kind.
    text = re.sub(r'"component": "(\w+)"', r'"$ref": "#/$defs/\1"', json.dumps(schema))
    return dict(json.loads(text))


def parameters(cls: type[BaseModel]) -> dict[str, str]:
    """The descriptions of fields in the docstrings of a class and its bases, under ``Args`` or ``Attributes``."""
    descriptions: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docstring = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        for section in re.findall(r"^(?:Args|Attributes):\n((?:[ \n].*\n?)+)", docstring, re.MULTILINE):
            for name, text in re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE):
                descriptions[name] = re.sub(r":\w+:(?=`)|`", "", " ".join(text.split()))
    return descriptions


class _Generator(GenerateJsonSchema):
    """Gives any type to a value that a file can't hold, such as a function, and uses a component's entry as
    its default."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        return super().encode_default(dft.spec() if isinstance(dft, Component) else dft)
