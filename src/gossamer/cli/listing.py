"""``gossamer list`` and ``gossamer schema``: what an experiment can name, and the JSON Schema of its file."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from typing import Annotated, Any

import typer
import yaml

from gossamer.cli import completion
from gossamer.cli.options import Json, argument
from gossamer.errors import BadInput, listed, suggest

_WIDEST = 100
_EXAMPLES = ("experiment", "sweep")


def listing(
    kind: Annotated[
        str | None, argument("algorithm, topology, task, ..., or experiment.", None, completion.kinds)
    ] = None,
    name: Annotated[str | None, argument("One name of the kind.", None, completion.names)] = None,
    as_json: Json = False,
) -> None:
    """List the names that an experiment can use; what those of a KIND are; or the parameters of one NAME."""
    from gossamer.config import examples
    from gossamer.config.registry import KINDS
    from gossamer.config.schema import components, json_schema

    accepted = [*sorted(KINDS), *_EXAMPLES]
    plurals = {plural: each for each in accepted for plural in (each, f"{each}s", f"{each[:-1]}ies")}
    if kind is not None and kind not in plurals:
        raise BadInput(f"kind: got {kind!r}{suggest(kind, accepted)}; accepted: {listed(accepted)}")
    schema = json_schema()
    found = {each: components(schema, each) for each in sorted(KINDS)}
    for each in _EXAMPLES:
        files = examples.names(sweeps=each == "sweep")
        found[each] = {name: {"description": examples.summary(name), "properties": {}} for name in files}
    if kind is not None:
        kind = plurals[kind]
        found = {kind: found[kind]}
        if name is not None:
            if name not in found[kind]:
                raise BadInput(
                    f"{kind}: unknown name {name!r}{suggest(name, found[kind])}; accepted: {listed(found[kind])}"
                )
            found = {kind: {name: found[kind][name]}}
    if as_json:
        table = {
            each: {
                name: {key: _default(definition, key) for key in _parameters(definition)}
                for name, definition in definitions.items()
            }
            for each, definitions in found.items()
        }
        typer.echo(json.dumps(table))
    elif kind is None:
        for each, definitions in found.items():
            _print_entry(each, 13, ", ".join(definitions) or "(none)")
        typer.echo("\nmore: gossamer list KIND [NAME]; any name can also be module:Class")
    elif name is None:
        width = max(map(len, found[kind]), default=0) + 2
        for each, definition in found[kind].items():
            text = textwrap.shorten(
                definition["description"],
                max(_width() - width, 20),
                placeholder=" …",
                break_on_hyphens=False,
            )
            _print_entry(each, width, text)
    else:
        _print_component(kind, name, found[kind][name])


def schema() -> None:
    """Print the JSON Schema of an experiment file with every component's parameters, for editors of YAML."""
    from gossamer.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


def _print_component(kind: str, name: str, definition: dict[str, Any]) -> None:
    typer.echo(f"{kind} {name}\n{textwrap.fill(definition['description'], _width())}")
    parameters = _parameters(definition)
    width = max(map(len, parameters), default=0) + 2
    if parameters:
        typer.echo()
    for key, node in parameters.items():
        default = "required" if key in definition["required"] else f"default {_default(definition, key)}"
        text = f": {node['description']}" if "description" in node else ""
        _print_entry(key, width, f"{type_text(node)}; {default}{text}")


def _print_entry(head: str, width: int, text: str) -> None:
    """A line with a head and a text, which is wrapped beside it."""
    lines = textwrap.fill(
        text,
        _width(),
        initial_indent=f"{head:{width}}",
        subsequent_indent=" " * width,
        break_on_hyphens=False,
    )
    typer.echo(lines)


def _width() -> int:
    """Of lines: the terminal's, up to a width that reads well; 80 in a file or a pipe."""
    return min(shutil.get_terminal_size().columns, _WIDEST)


def _parameters(definition: dict[str, Any]) -> dict[str, Any]:
    return {key: node for key, node in definition["properties"].items() if "const" not in node}


def _default(definition: dict[str, Any], key: str) -> str:
    """A parameter's default as a file would have it, or its type where a value is required."""
    node = definition["properties"][key]
    return f"({type_text(node)})" if key in definition["required"] else _yaml(node.get("default"))


def type_text(node: dict[str, Any]) -> str:
    """What a schema accepts, in words."""
    if "$ref" in node:
        last = str(node["$ref"]).rpartition("/")[2]
        return last if last.islower() else "mapping"
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(map(type_text, node["anyOf"])))
    if "const" in node or "enum" in node:
        return " or ".join(_yaml(value) for value in node.get("enum", [node.get("const")]))
    kind = str(node.get("type", "any value"))
    if kind == "array":
        return f"list of {type_text(node['items'])}" if node.get("items") else "list"
    if kind == "object":
        return "mapping"
    if node.get("format") == "path":
        return "path"
    if kind not in ("integer", "number"):
        return {"string": "text", "boolean": "true or false"}.get(kind, kind)
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    said = [f"{sign} {_yaml(node[key])}" for key, sign in bounds.items() if key in node]
    return " ".join([kind, ", ".join(said)]).strip()


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return str(text).removesuffix("...\n").strip()
