"""The program ``gossamer``: its commands, and what becomes of errors."""

from __future__ import annotations

import atexit
import gc
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from gossamer import __version__
from gossamer.cli.listing import listing
from gossamer.cli.options import EXIT_CODES, INTERRUPTED
from gossamer.cli.report import report
from gossamer.cli.run import resume, run
from gossamer.cli.sweep import sweep
from gossamer.cli.topology import topology
from gossamer.cli.usage import readable_usage
from gossamer.cli.worker import worker
from gossamer.errors import BadInput, GossamerError, RunFailed

app = typer.Typer(
    help="Decentralized learning: simulate an algorithm in virtual time, or run it over TCP.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"gossamer {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of the program itself."""


# In the order in which help lists them.
app.command(epilog=EXIT_CODES)(run)
app.command(epilog=EXIT_CODES)(resume)
app.command(epilog=EXIT_CODES)(sweep)
app.command()(report)
app.command("list")(listing)
app.command()(topology)
app.command(epilog=EXIT_CODES)(worker)


def main() -> None:
    """The program ``gossamer``."""
    logging.basicConfig(level=logging.WARNING, format="gossamer: %(message)s")
    logging.getLogger("gossamer").setLevel(logging.INFO)
    atexit.register(gc.freeze)  # at its end Python looks for garbage among all of torch, for half a second
    with _exit_codes(), readable_usage():
        # (Not standalone: what the parser refuses is said as all other bad input is.)
        sys.exit(app(prog_name="gossamer", standalone_mode=False) or 0)


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except typer.Abort:
        typer.echo("error: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except BadInput as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        sys.exit(2)
    except RunFailed as error:
        if error.traceback:
            typer.echo(error.traceback.rstrip(), err=True)
        typer.echo(f"error: {error}", err=True)
        if error.folder is not None:
            typer.echo(f"what was recorded is kept in {error.folder}", err=True)
            typer.echo(f"a page of it: gossamer report {shlex.quote(str(error.folder))}", err=True)
        sys.exit(1)
    except GossamerError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
