"""Options that several commands share, exit codes, and the handling of Ctrl-C."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.cli import completion

EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 bad input, 3 diverged, 130 interrupted (Ctrl-C)."
DIVERGED = 3
INTERRUPTED = 130


def option(help_: str, *names: str, **more: Any) -> Any:
    """An option of the command line."""
    return typer.Option(*names, help=help_, **more)


def argument(
    help_: str, metavar: str | None = None, offered: Callable[..., completion.Offers] | None = None
) -> Any:
    """An argument of the command line; ``offered`` completes it."""
    return typer.Argument(metavar=metavar, help=help_, autocompletion=offered)


def overriding(fields: str) -> Any:
    """The option ``--set``, which overrides the fields that the text ``fields`` describes."""
    return option(
        f"Override {fields}. May be repeated.",
        "--set",
        metavar="A.B=VALUE",
        autocompletion=completion.assignments,
    )


def _log_errors_only(quiet: bool) -> bool:
    if quiet:
        logging.getLogger("gossamer").setLevel(logging.ERROR)
    return quiet


File = Annotated[
    Path, argument("An experiment file (YAML), or an example's name.", "FILE", completion.experiments)
]
Overrides = Annotated[list[str] | None, overriding("a field; the value is YAML")]
CellOverrides = Annotated[list[str] | None, overriding("a field in all cells, or the list of seeds")]
Jobs = Annotated[
    int | None, option("Number of runs at the same time; default: by the number of cores.", min=1)
]
Again = Annotated[bool, option("Start finished runs again; the newest counts.", "--again")]
Keep = Annotated[bool, option("Count finished runs although their code or data has changed since.", "--keep")]
ExecutorName = Annotated[
    str | None, option("Submit the runs to an executor: ray, or module:factory.", "--workers", metavar="NAME")
]
Out = Annotated[Path, option("The folder for all runs.")]
Report = Annotated[bool, option("Write report.html into the run's folder.")]
Quiet = Annotated[bool, option("Print nothing but errors.", "--quiet", "-q", callback=_log_errors_only)]
Json = Annotated[bool, option("Print one JSON object instead of text.", "--json")]


def print_json(value: Any) -> None:
    """Print a value as one JSON object, with null for non-finite numbers, and text for paths and similar
    objects."""
    typer.echo(json.dumps(_finite(value), default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def interruptible() -> Iterator[None]:
    """Decorator of a command that turns Ctrl-C into one line and an exit code, unless the run handles it."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("error: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
