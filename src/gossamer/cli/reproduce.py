"""The command that runs the reproduction of a paper and reports the verdicts on its claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.cli import completion
from gossamer.cli.options import (
    INTERRUPTED,
    Again,
    CellOverrides,
    ExecutorName,
    Jobs,
    Json,
    Keep,
    Out,
    Quiet,
    argument,
    option,
    print_json,
)
from gossamer.errors import BadInput


def reproduce(
    name: Annotated[
        str | None,
        argument("A reproduction, a sweep file with that section, or all.", "NAME", completion.reproductions),
    ] = None,
    small: Annotated[bool, option("A check in minutes that needs no downloaded data.", "--small")] = False,
    full: Annotated[
        bool, option("The published size, after an estimate of its time and memory.", "--full")
    ] = False,
    overrides: CellOverrides = None,
    jobs: Jobs = None,
    again: Again = False,
    keep: Keep = False,
    workers: ExecutorName = None,
    out: Out = Path("runs"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run those experiments behind a paper's claims that have not been run yet, and write a page with the
    verdicts. Without a NAME, list the reproductions."""
    from gossamer.reproduce import load, names
    from gossamer.results.formatting import print_table

    if small and full:
        raise BadInput("--small: got --full too; accepted: one of them, or neither for the size in the file")
    if name is None:
        print_table(("name", "claims"), [(key, load(key)[0].title) for key in names()], labels=2)
        return
    size: Any = "small" if small else "full" if full else None
    loaded = [load(key, size, overrides or (), out) for key in (names() if name == "all" else [name])]
    from gossamer.reproduce import write_page
    from gossamer.sweep.display import watching_sweep
    from gossamer.sweep.execute import run_sweep
    from gossamer.sweep.plan import plan, print_plan

    silent = quiet or as_json
    if full and not silent:
        for _, sweep in loaded:
            print_plan(plan(sweep, sweep.planned, jobs=jobs, workers=workers, again=again, keep=keep))
    verdicts: list[dict[str, str]] = []
    stopped = failed = False
    for described, sweep in loaded:
        if not silent:
            typer.echo(f"{sweep.name}: {described.title}", err=True)
        with watching_sweep(sweep, quiet=silent) as watcher:
            outcome = run_sweep(sweep, workers, observer=watcher, jobs=jobs, again=again, keep=keep)
        claims = write_page(described, sweep)
        page = str(sweep.folder / "reproduction.md")
        verdicts += [{"claim": text, "verdict": verdict, "page": page} for text, verdict, _ in claims]
        if not silent:
            print_table(("claim", "verdict"), [(text, verdict) for text, verdict, _ in claims], labels=2)
            typer.echo(page)
        stopped, failed = outcome.stopped, failed or bool(outcome.failed or outcome.counts.left)
        if stopped:
            break
    if as_json:
        print_json({"verdicts": verdicts})
    if stopped or failed:
        raise typer.Exit(INTERRUPTED if stopped else 1)
