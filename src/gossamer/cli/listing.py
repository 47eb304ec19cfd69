"""``gossamer list``."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from gossamer.cli.options import Json
from gossamer.errors import BadInput, listed, suggest


def listing(
    kind: Annotated[str | None, typer.Argument(help="algorithm, topology, partition, task, ...")] = None,
    as_json: Json = False,
) -> None:
    """List what an experiment can name, with parameters and their defaults."""
    from gossamer.config.registry import KINDS, names

    if kind is not None and kind not in KINDS:
        raise BadInput(f"kind: got {kind!r}{suggest(kind, KINDS)}; accepted: {listed(list(KINDS))}")
    found = {each: names(each) for each in ([kind] if kind else sorted(KINDS))}
    if as_json:
        table = {
            each: {name: _parameters(cls) for name, cls in sorted(classes.items())}
            for each, classes in found.items()
        }
        typer.echo(json.dumps(table))
        return
    from rich.table import Table

    from gossamer.results.formatting import table_console

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("kind", "name", "parameters", "what it is"):
        shown.add_column(heading, overflow="fold")
    for each, classes in found.items():
        for name, cls in sorted(classes.items()):
            parameters = "\n".join(f"{key}: {value}" for key, value in _parameters(cls).items())
            shown.add_row(each, name, parameters, _first_paragraph(cls.__doc__ or ""))
        if not classes:
            shown.add_row(each, "(none)", "", "")
    table_console().print(shown)


def _first_paragraph(docstring: str) -> str:
    """In one line, without the marks of reStructuredText."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.sub(r":\w+:(?=`)|`", "", paragraph)


def _parameters(cls: Any) -> dict[str, str]:
    """Field name -> its default, or its type where a value is required."""
    shown = {}
    for name, field in cls.model_fields.items():
        required = getattr(field.annotation, "__name__", str(field.annotation))
        shown[name] = (
            f"({required})" if field.is_required() else str(field.get_default(call_default_factory=True))
        )
    return shown
