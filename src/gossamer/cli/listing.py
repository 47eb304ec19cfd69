"""``gossamer list`` and ``gossamer schema``: the names that an experiment can use, and the JSON Schema of its
file."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
import yaml

from gossamer.cli import completion
from gossamer.cli.options import Json, argument
from gossamer.errors import BadInput, listed, suggest
from gossamer.results.formatting import ANY_WIDTH

_MAX_WIDTH = 100
_EXAMPLES = ("experiment", "sweep")


def listing(
    kind: Annotated[
        str | None, argument("algorithm, topology, task, ..., or experiment.", None, completion.kinds)
    ] = None,
    name: Annotated[str | None, argument("One name of the kind.", None, completion.names)] = None,
    as_json: Json = False,
) -> None:
    """List the names that an experiment can use, describe those of a KIND, or list the parameters of one
    NAME."""
    from gossamer.config import examples
    from gossamer.config.registry import KINDS
    from gossamer.config.schema import components, json_schema

    schema = json_schema()
    catalog = {key: components(schema, key) for key in sorted(KINDS)}
    for key in _EXAMPLES:
        files = examples.names(sweeps=key == "sweep")
        catalog[key] = {file: {"description": examples.summary(file), "properties": {}} for file in files}
    if kind is not None:
        catalog = {kind: _chosen("kind", kind, catalog)}
        if name is not None:
            catalog = {kind: {name: _chosen(kind, name, catalog[kind])}}
    if as_json:
        table = {
            key: {
                name: {field: _default(definition, field) for field in _parameters(definition)}
                for name, definition in definitions.items()
            }
            for key, definitions in catalog.items()
        }
        typer.echo(json.dumps(table))
    elif kind is None:
        _print({key: ", ".join(definitions) or "(none)" for key, definitions in catalog.items()})
        typer.echo("\nmore: gossamer list KIND [NAME]; in an experiment, any name can also be module:Class")
    elif name is None:
        _print({key: node["description"] for key, node in catalog[kind].items()}, wrap=False)
    else:
        definition = catalog[kind][name]
        _console().print(f"{kind} {name}\n{definition['description']}\n")
        _print({key: _described(definition, key) for key in _parameters(definition)})


def schema() -> None:
    """Print the JSON Schema of an experiment file with every component's parameters, for editors of YAML."""
    from gossamer.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


def _chosen(field: str, name: str, accepted: Mapping[str, Any]) -> Any:
    if name not in accepted:
        raise BadInput(
            f"{field}: unknown name {name!r}{suggest(name, accepted)}; accepted: {listed(accepted)}"
        )
    return accepted[name]


def _console() -> Any:
    """A console of the terminal's width, up to :data:`_MAX_WIDTH`. In a file or a pipe, no line is cut."""
    from rich.console import Console

    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH) if sys.stdout.isatty() else ANY_WIDTH
    return Console(markup=False, highlight=False, width=width)


def _print(texts: Mapping[str, str], *, wrap: bool = True) -> None:
    """Print names with a text next to each. A terminal shows the text wrapped or truncated."""
    from rich.table import Table

    longest = max(map(len, texts), default=0)
    if not sys.stdout.isatty():
        typer.echo("\n".join(f"{name:{longest}}  {text}" for name, text in texts.items()))
        return
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, min_width=longest)
    table.add_column(no_wrap=not wrap, overflow="fold" if wrap else "ellipsis", ratio=1)
    for row in texts.items():
        table.add_row(*row)
    _console().print(table)


def _parameters(definition: dict[str, Any]) -> dict[str, Any]:
    return {key: node for key, node in definition["properties"].items() if "const" not in node}


def _node(definition: dict[str, Any], key: str) -> dict[str, Any]:
    """A parameter's schema, with the short forms of a mapping that has some."""
    node: dict[str, Any] = definition["properties"][key]
    inner = definition.get("$defs", {}).get(str(node.get("$ref")).rpartition("/")[2], {})
    return {"default": node.get("default"), "anyOf": inner["anyOf"]} if "anyOf" in inner else node


def _default(definition: dict[str, Any], key: str) -> str:
    """A parameter's default in YAML, or its type if a value is required."""
    node = _node(definition, key)
    return f"({type_text(node)})" if key in definition["required"] else _yaml(node.get("default"))


def _described(definition: dict[str, Any], key: str) -> str:
    """A parameter's type, default and meaning."""
    node = _node(definition, key)
    default = "required" if key in definition["required"] else f"default {_default(definition, key)}"
    text = f": {node['description']}" if "description" in node else ""
    return f"{type_text(node)}; {default}{text}"


def type_text(node: dict[str, Any]) -> str:
    """The values accepted by a schema, as text."""
    if "$ref" in node:
        last = str(node["$ref"]).rpartition("/")[2]
        return last if last.islower() else "mapping"
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(map(type_text, node["anyOf"])))
    if "const" in node or "enum" in node:
        return " or ".join(_yaml(value) for value in node.get("enum", [node.get("const")]))
    kind = node.get("format") or node.get("type", "any value")
    if kind == "array":
        return f"list of {type_text(node['items'])}" if node.get("items") else "list"
    if kind not in ("integer", "number"):
        return {"string": "text", "boolean": "true or false", "object": "mapping"}.get(kind, str(kind))
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {_yaml(node[key])}" for key, sign in bounds.items() if key in node]
    return " ".join([kind, ", ".join(limits)]).strip()


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return str(text).removesuffix("...\n").strip()
