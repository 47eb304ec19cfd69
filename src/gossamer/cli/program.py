"""The program ``gossamer``: its commands, its exit codes, and its error messages."""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import shlex
import sys
from contextlib import suppress
from typing import Annotated, Any, cast

import typer

from gossamer import __version__
from gossamer.cli.describe import report, topology, verify
from gossamer.cli.listing import listing, schema
from gossamer.cli.options import EXIT_CODES, INTERRUPTED, interruptible
from gossamer.cli.reproduce import reproduce
from gossamer.cli.run import resume, run, sweep, worker
from gossamer.cli.start import demo, new
from gossamer.errors import BadInput, GossamerError, RunFailed
from gossamer.startup import begin

# click's class, which some versions of typer contain and others import.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
"""Errors of the system rather than of this program, such as a full disk, a limit, or a failing disk."""

app = typer.Typer(
    help="Decentralized learning: simulate an algorithm in virtual time, or run it over TCP.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
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


# Help lists the commands in this order.
for _command in (demo, new, run, resume, sweep, reproduce, report, verify, listing, schema, topology, worker):
    _name = "list" if _command is listing else None
    app.command(_name, epilog=EXIT_CODES)(interruptible()(_command))


class _Handler(logging.Handler):
    """Logs to the current standard error, which a live display replaces to make room for lines."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a closed terminal
            print(self.format(record), file=sys.stderr, flush=True)


def main() -> None:
    """The program ``gossamer``."""
    begin()
    handler = _Handler()
    # Libraries that set their own level (Parsl) are also limited to warnings and above.
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith("gossamer"))
    logging.basicConfig(level=logging.WARNING, format="gossamer: %(message)s", handlers=[handler])
    logging.getLogger("gossamer").setLevel(logging.INFO)
    # Otherwise, collecting torch's garbage at exit takes half a second.
    atexit.register(gc.freeze)
    sys.exit(_main())


def _main() -> int:
    """Run the command. Returns the exit code."""
    try:
        # Not standalone, so that parser errors are also one line.
        return app(prog_name="gossamer", standalone_mode=False) or 0
    except typer.Abort:
        return _say(INTERRUPTED, "interrupted")
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            cast(Any, error).show()
            return 2
        return _say(2, cast(Any, error).format_message())
    except BadInput as error:
        return _say(2, *error.problems)
    except RunFailed as error:
        if error.traceback:
            typer.echo(error.traceback.rstrip(), err=True)
        code = _say(1, str(error))
        if error.folder is not None:
            folder = shlex.quote(str(error.folder))
            typer.echo(f"The record so far was kept. To view it: gossamer report {folder}", err=True)
            if any((error.folder / "checkpoints").glob("*/manifest.json")):
                typer.echo(f"To continue: gossamer resume {folder}", err=True)
        return code
    except GossamerError as error:
        return _say(1, str(error))
    except OSError as error:
        if error.errno not in _SYSTEM:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _say(1, f"{where}{error.strerror}")


def _say(exit_code: int, *problems: str) -> int:
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    return exit_code
