"""What several commands share: the shapes of their options, exit codes, and how they are quiet and interrupted."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted (Ctrl-C)."
INTERRUPTED = 130


def overriding(what: str) -> Any:
    """The option ``--set``; ``what`` says what it overrides."""
    return typer.Option("--set", metavar="A.B=VALUE", help=f"Override {what}. May be repeated.")


File = Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file (YAML).")]
Overrides = Annotated[list[str] | None, overriding("a field; the value is YAML")]
Out = Annotated[Path, typer.Option(help="The folder of all runs.")]
Report = Annotated[bool, typer.Option(help="Write report.html into the run's folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def log_errors_only(quiet: bool) -> None:
    """Let the log be as quiet as the command."""
    if quiet:
        logging.getLogger("gossamer").setLevel(logging.ERROR)


@contextmanager
def interruptible() -> Iterator[None]:
    """Where Ctrl-C, if nothing has made an orderly end of it, is one line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("error: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def importing() -> Iterator[None]:
    """Where torch is imported: nothing of it is garbage, and to look for it takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
