"""Shell completion: examples, names, and the fields of experiments with their values."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

Offers = list[tuple[str, str]]
"""Completions and their descriptions."""


def experiments(incomplete: str) -> Offers:
    """Files in the working directory, and the experiments included in gossamer."""
    return _files(incomplete, sweeps=False)


def sweeps(incomplete: str) -> Offers:
    """Files in the working directory, and the sweeps included in gossamer."""
    return _files(incomplete, sweeps=True)


def reproductions(incomplete: str) -> Offers:
    """The names of reproductions, and ``all``."""
    from gossamer.reproduce import names

    return _matching(incomplete, ((name, "") for name in [*names(), "all"]))


def kinds(incomplete: str) -> Offers:
    """The kinds of components."""
    from gossamer.config.registry import KINDS

    return _matching(incomplete, ((kind, "") for kind in sorted(KINDS)))


def names(ctx: typer.Context, incomplete: str) -> Offers:
    """The names of the given kind."""
    return _names(str(ctx.params.get("kind")), incomplete)


def algorithms(incomplete: str) -> Offers:
    """The names of algorithms."""
    return _names("algorithm", incomplete)


def assignments(incomplete: str) -> Offers:
    """The fields of an experiment and of every component that it may name, one level at a time, and the
    values of a field after "="."""
    schema = _schema()
    path, separator, _ = incomplete.partition("=")
    fields = [item for item in _fields(schema, schema) if item[0].count(".") == path.count(".")]
    if separator:
        values = [value for name, node in fields if name == path for value in _values(schema, node)]
        return _matching(incomplete, ((f"{path}={value}", "") for value in dict.fromkeys(values)))
    return _matching(incomplete, {name: node.get("description", "") for name, node in fields}.items())


def _matching(incomplete: str, offers: Iterable[tuple[str, str]]) -> Offers:
    """The completions that begin with the text. Their descriptions are short, since some shells treat each
    line as a completion."""
    return [
        (text, textwrap.shorten(meaning, 50, placeholder=" …"))
        for text, meaning in offers
        if text.startswith(incomplete)
    ]


def _files(incomplete: str, *, sweeps: bool) -> Offers:
    from gossamer.config import examples

    patterns = () if Path(incomplete).is_absolute() else (f"{incomplete}*.yaml", f"{incomplete}*/*.yaml")
    local = {str(file) for pattern in patterns for file in Path().glob(pattern)}
    known = ((name, examples.summary(name)) for name in examples.names(sweeps=sweeps))
    return [(file, "") for file in sorted(local)] + _matching(incomplete, known)


def _names(kind: str, incomplete: str) -> Offers:
    from gossamer.config.schema import components

    nodes = components(_schema(), kind).items()
    return _matching(incomplete, ((name, node["description"]) for name, node in nodes))


def _schema() -> dict[str, Any]:
    """The schema. It takes seconds to build, so it is cached in the user's cache folder until a file of
    gossamer changes."""
    from gossamer.files import cache_folder

    sources = Path(__file__).parents[1].rglob("*.py")
    file = cache_folder() / "schema.json"
    with suppress(OSError, ValueError):  # missing or damaged: it is rebuilt
        if file.stat().st_mtime > max(source.stat().st_mtime for source in sources):
            cached: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return cached
    from gossamer.config.schema import json_schema

    schema = json_schema()
    with suppress(OSError):  # an unwritable folder only makes completion slow
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(schema), encoding="utf-8")
    return schema


def _fields(schema: dict[str, Any], node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The path and the schema of each field that a node may have, three levels deep, since components may hold others."""
    node = _resolved(schema, node)
    for name, field in node.get("properties", {}).items():
        yield prefix + name, field
        if prefix.count(".") < 2:
            yield from _fields(schema, field, f"{prefix}{name}.")
    for branch in node.get("anyOf", ()):
        yield from _fields(schema, branch, prefix)


def _values(schema: dict[str, Any], node: Any) -> Iterator[str]:
    """The values of a field that can be listed; for a component, its name."""
    node = _resolved(schema, node)
    for branch in (*node.get("anyOf", ()), node.get("properties", {}).get("name", {})):
        yield from _values(schema, branch) if branch else ()
    yield from map(str, node.get("enum", [node["const"]] if "const" in node else []))
    if node.get("type") == "boolean":
        yield from ("true", "false")


def _resolved(schema: dict[str, Any], node: Mapping[str, Any]) -> Any:
    """A node of the schema, with its reference resolved."""
    for key in node["$ref"].removeprefix("#/").split("/") if "$ref" in node else ():
        schema, node = schema[key], schema[key]
    return node
