"""Options that several commands share, exit codes, and the handling of Ctrl-C."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted (Ctrl-C)."
INTERRUPTED = 130


def overriding(what: str) -> Any:
    """The option ``--set``, which overrides ``what``."""
    return typer.Option("--set", metavar="A.B=VALUE", help=f"Override {what}. May be repeated.")


File = Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file (YAML).")]
Overrides = Annotated[list[str] | None, overriding("a field; the value is YAML")]
Out = Annotated[Path, typer.Option(help="The folder for all runs.")]
Report = Annotated[bool, typer.Option(help="Write report.html into the run's folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def log_errors_only(quiet: bool) -> None:
    """Log errors only, if the command is quiet."""
    if quiet:
        logging.getLogger("gossamer").setLevel(logging.ERROR)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turns Ctrl-C into one line and an exit code, where the run itself does not handle it."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("error: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
