"""What the parser of options refuses, as all other bad input is said: one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import typer

from gossamer.errors import BadInput, listed, suggest

# click's, which some versions of typer bring along and others import.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)


@contextmanager
def readable_usage() -> Iterator[None]:
    """Where what the parser refuses becomes :class:`BadInput`; a command without arguments that shows its help ends with
    exit code 2."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            cast(Any, error).show()
            raise SystemExit(2) from None
        raise BadInput(_problem(error)) from None


def _problem(error: Any) -> str:
    match type(error).__name__:
        case "MissingParameter":
            return f"{_name(error.param)}: missing; a value is required"
        case "NoSuchOption":
            accepted = [name for each in error.ctx.command.params for name in _options(each)]
            near = suggest(error.option_name, accepted)
            return f"{error.option_name}: no such option{near}; accepted: {listed(accepted)}"
        case "BadParameter" if error.param is not None:
            return f"{_name(error.param)}: {_refused(error)}"
    help_ = f"; accepted: see {error.ctx.command_path} --help" if error.ctx is not None else ""
    return f"{error.format_message().rstrip('.')}{help_}"


def _refused(error: Any) -> str:
    """A value, and what would be accepted; in the parser's words, where it has checked it without pydantic."""
    from pydantic import ValidationError

    from gossamer.config.validation import accepted

    if not isinstance(error.__cause__, ValidationError):
        return str(error.message).rstrip(".")
    problem = error.__cause__.errors(include_url=False)[0]
    return f"got {problem['input']!r}; accepted: {accepted(problem)}"


def _name(parameter: Any) -> str:
    """An option as it is written out, an argument as help calls it."""
    return max(_options(parameter), key=len, default=parameter.metavar or parameter.name.upper())


def _options(parameter: Any) -> list[str]:
    return [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")]
