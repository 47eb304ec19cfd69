"""``gossamer report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import Json, Quiet, log_errors_only
from gossamer.errors import BadInput

if TYPE_CHECKING:
    import polars as pl


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs or sweeps; all runs in them are compared."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write; default: report.html in the run's folder, or in the working directory for"
            " several runs and for a part of a timeline."
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="A folder for the charts as PNG files, <metric>-vs-<axis>.png: every metric against round, time,"
            " wall time and bytes."
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="A folder for curves and metrics as CSV files.")] = None,
    time_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC=LEVEL[,LEVEL...]",
            help="Compare the times that runs take to reach these levels, over their seeds. The table is also"
            " written as a CSV file next to the page. May be repeated.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The group that the others are compared with (--time-to). The name of a sweep's cell stands for"
            " its group at each point of the grid.",
        ),
    ] = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="Group runs by this field; default: by all fields but the seed. May be repeated.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Draw the nodes' computations and messages over time into this SVG, PNG or PDF file."
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="FROM:TO",
            help="Show this part of the timeline, in seconds, e.g. 10:14; default: all of it.",
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS",
            help="Show the timeline of these nodes, e.g. 0,3,8-12; default: all recorded nodes.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a report page of one or several runs: one HTML file that needs no network."""
    log_errors_only(quiet)
    from gossamer.results.comparison import find_baseline, groups, parse_levels
    from gossamer.results.comparison import time_to as compare
    from gossamer.results.plots import choose
    from gossamer.results.report import write_report, write_time_to
    from gossamer.results.run import load_runs
    from gossamer.results.tidy import finite

    if baseline is not None and not time_to:
        raise BadInput("--baseline: accepted together with --time-to")
    levels = parse_levels(time_to or ())
    loaded = list(dict.fromkeys(run for path in runs for run in load_runs(path)))
    grouped = groups(loaded, group_by or ())
    loaded = [run for group in grouped for run in group.runs]
    against = None if baseline is None else find_baseline(baseline, grouped)
    rows = compare(grouped, levels, against)
    within = choose(loaded, window, nodes)
    # A page of several runs, or of a part of one, must not replace the page of a run.
    folder = loaded[0].path if len(loaded) == 1 and within is None else Path()
    if timeline is not None:
        from gossamer.results.plots import write_timeline

        write_timeline(loaded, timeline, within)
    page = write_report(
        loaded,
        out or folder / "report.html",
        png=png,
        csv=csv,
        groups=grouped,
        time_to=rows,
        baseline=None if against is None else against.title,
        within=within,
    )
    table = None if rows.is_empty() else write_time_to(rows, page)
    written = {"report": page, "png": png, "csv": csv, "time_to": table, "timeline": timeline}
    if as_json:
        said: dict[str, Any] = {key: value for key, value in written.items() if value is not None}
        if table is not None:
            said["table"] = finite(rows).to_dicts()
        typer.echo(json.dumps(said, default=str))
    elif not quiet:
        if table is not None:
            _print_time_to(rows, None if against is None else against.title)
        for path in written.values():
            if path is not None:
                typer.echo(path)


def _print_time_to(rows: pl.DataFrame, baseline: str | None) -> None:
    from gossamer.results.comparison import note, tables
    from gossamer.results.formatting import print_table

    for title, head, lines in tables(rows, baseline):
        print_table(head, lines, title=title)
        print()
    print(note(baseline))
