"""What the shell offers when a command is completed: examples, names, and the fields of experiments with their values."""

from __future__ import annotations

import json
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from gossamer.errors import GossamerError

Offers = list[tuple[str, str]]
"""Texts, and what they mean."""


def experiments(incomplete: str) -> Offers:
    """Files of the working directory, and the experiments that come with gossamer."""
    return _files(incomplete, sweeps=False)


def sweeps(incomplete: str) -> Offers:
    """Files of the working directory, and the sweeps that come with gossamer."""
    return _files(incomplete, sweeps=True)


def reproductions(incomplete: str) -> Offers:
    """The names of reproductions, and ``all``."""
    from gossamer.reproduce import names

    return [(name, "") for name in [*names(), "all"] if name.startswith(incomplete)]


def kinds(incomplete: str) -> Offers:
    """The kinds of components."""
    from gossamer.config.registry import KINDS

    return [(kind, "") for kind in sorted(KINDS) if kind.startswith(incomplete)]


def names(ctx: typer.Context, incomplete: str) -> Offers:
    """The names of the kind that was given."""
    return _names(str(ctx.params.get("kind")), incomplete)


def algorithms(incomplete: str) -> Offers:
    """The names of algorithms."""
    return _names("algorithm", incomplete)


def engines(incomplete: str) -> Offers:
    """The names of engines."""
    return [(name, "") for name in ("simulate", "processes") if name.startswith(incomplete)]


def assignments(ctx: typer.Context, incomplete: str) -> Offers:
    """The fields of the experiment that was given, and behind "=" the values of a field."""
    from gossamer.config import examples
    from gossamer.config.experiment import read_mapping

    given: dict[str, Any] = {}
    # Where the option still lacks its value, the parser leaves the file with the other arguments.
    file = ctx.params.get("file") or next(iter(ctx.args), "")
    with suppress(GossamerError):  # what is wrong with the file is said when it runs
        given = read_mapping(examples.located(file), "an experiment")
    schema = _schema()
    paths = dict(_paths(schema, schema["properties"], given))
    path, separator, _ = incomplete.partition("=")
    if separator:
        offers = [(f"{path}={text}", "") for text in _values(schema, paths.get(path, {}))]
    else:
        offers = [(name, _short(node.get("description", ""))) for name, node in paths.items()]
    return [offer for offer in offers if offer[0].startswith(incomplete)]


def _files(incomplete: str, *, sweeps: bool) -> Offers:
    from gossamer.config import examples

    patterns = (f"{incomplete}*.yaml", f"{incomplete}*/*.yaml")
    own = (
        []
        if Path(incomplete).is_absolute()
        else [str(file) for each in patterns for file in Path().glob(each)]
    )
    known = [name for name in examples.names(sweeps=sweeps) if name.startswith(incomplete)]
    return [(file, "") for file in sorted(set(own))] + [
        (name, _short(examples.summary(name))) for name in known
    ]


def _names(kind: str, incomplete: str) -> Offers:
    from gossamer.config.schema import components

    found = components(_schema(), kind).items()
    return [(name, _short(each["description"])) for name, each in found if name.startswith(incomplete)]


def _short(text: str) -> str:
    """A text that no shell breaks into lines, since some take each for an offer."""
    return textwrap.shorten(text, 50, placeholder=" …")


def _schema() -> dict[str, Any]:
    """The schema, which takes seconds to make: it is kept in the user's cache folder until a file of gossamer or the set of
    installed packages changes."""
    from gossamer.files import cache_folder

    package = Path(__file__).parents[1]
    file = cache_folder() / f"schema-{zlib.crc32(str(package).encode()):08x}.json"
    sources = [*package.rglob("*.py"), Path(sysconfig.get_path("purelib"))]
    with suppress(OSError, ValueError):  # there is none, or it is damaged: it is made again
        if file.stat().st_mtime > max(source.stat().st_mtime for source in sources):
            kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return kept
    from gossamer.config.schema import json_schema

    schema = json_schema()
    with suppress(OSError):  # a folder that can't be written makes completion slow, no more
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(schema), encoding="utf-8")
    return schema


def _paths(
    schema: dict[str, Any], properties: Mapping[str, Any], given: object, prefix: str = "", whole: Any = None
) -> Iterator[tuple[str, Any]]:
    """The path and the schema of each field, with the parameters of the components that are given or are the default."""
    for name, node in properties.items():
        # What the field "name" of a component may be are the names of its kind.
        yield prefix + name, whole if name == "name" and whole else node
        value = given.get(name, node.get("default")) if isinstance(given, Mapping) else node.get("default")
        for mapping in _mappings(schema, node, value):
            yield from _paths(schema, mapping["properties"], value, f"{prefix}{name}.", node)


def _mappings(schema: dict[str, Any], node: Any, value: object) -> Iterator[Any]:
    """The schemas of mappings that a node accepts; of components the one that the value names."""
    if "$ref" in node:
        yield from _mappings(schema, _found(schema, node), value)
    for each in node.get("anyOf", ()):
        yield from _mappings(schema, each, value)
    if "properties" in node:
        named = node["properties"].get("name", {}).get("const")
        chosen = value.get("name") if isinstance(value, Mapping) else value
        if named == chosen or (named is None and "additionalProperties" in node):
            yield node


def _values(schema: dict[str, Any], node: Any) -> Iterator[str]:
    """The values of a field that can be written out."""
    if "$ref" in node:
        found = _found(schema, node)
        name = found.get("properties", {}).get("name", {})
        yield from _values(schema, name if "const" in name else found if "anyOf" in found else {})
    for each in node.get("anyOf", ()):
        yield from dict.fromkeys(_values(schema, each))
    for value in (*node.get("enum", ()), *([node["const"]] if "const" in node else [])):
        yield str(value)
    if node.get("type") == "boolean":
        yield from ("true", "false")


def _found(schema: dict[str, Any], node: Any) -> Any:
    for key in node["$ref"].removeprefix("#/").split("/"):
        schema = schema[key]
    return schema
