"""``gossamer sweep``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.options import INTERRUPTED, Json, Out, Quiet, interruptible, log_errors_only, overriding


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file (YAML).")],
    overrides: Annotated[list[str] | None, overriding("a field of all cells")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CELL", help="Run this cell alone. May be repeated.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: as many as the cores carry.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Begin failed runs again.")] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Begin done runs again; the newest counts, and the older ones stay."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells, and run nothing.")] = False,
    out: Out = Path("runs"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run many experiments: cells times seeds over a base. A second call goes on where the first one ended."""
    log_errors_only(quiet)
    from gossamer.sweep.sweep import Sweep

    loaded = Sweep.load(file, overrides or (), out)
    chosen = loaded.chosen(only or ())
    from gossamer.sweep.display import as_data, print_plan, print_summary, watching_sweep

    if dry_run:
        print_plan(loaded, chosen)
        return
    from gossamer.sweep.execute import run_sweep

    with watching_sweep(loaded.name, quiet=quiet or as_json) as watcher, interruptible():
        outcome = run_sweep(
            loaded, jobs=jobs, only=only or (), retry_failed=retry_failed, again=again, observer=watcher
        )
    if as_json:
        typer.echo(json.dumps(as_data(loaded, outcome)))
    elif not quiet:
        print_summary(loaded, loaded.results(), outcome)
    if outcome.stopped:
        raise typer.Exit(INTERRUPTED)
    if outcome.failed or outcome.counts.left:
        raise typer.Exit(1)
