"""``gossamer report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.cli.options import Json, Quiet, log_errors_only
from gossamer.errors import BadInput


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or sweeps to compare.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the run's folder, or here.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="A folder for the charts, <metric>-vs-<axis>.png.")] = None,
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
            metavar="FIELD", help="Group runs by this field; default: all but the seed. May be repeated."
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the timeline into this SVG, PNG or PDF file.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="FROM:TO", help="Show these seconds of the timeline, e.g. 10:14.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="RANKS", help="Show the timeline of these nodes, e.g. 0,3,8-12.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a report page of one or several runs: one HTML file that needs no network."""
    log_errors_only(quiet)
    from gossamer.results import comparison
    from gossamer.results.formatting import print_table
    from gossamer.results.plots import choose, write_timeline
    from gossamer.results.report import write_report, write_time_to
    from gossamer.results.run import load_runs
    from gossamer.results.tidy import finite

    if baseline is not None and not time_to:
        raise BadInput("--baseline: accepted together with --time-to")
    levels = comparison.parse_levels(time_to or ())
    loaded = list(dict.fromkeys(run for path in runs for run in load_runs(path)))
    groups = comparison.groups(loaded, group_by or ())
    loaded = [run for group in groups for run in group.runs]
    against = None if baseline is None else comparison.find_baseline(baseline, groups)
    title = None if against is None else against.title
    rows = comparison.time_to(groups, levels, against)
    within = choose(loaded, window, nodes)
    # A page of several runs, or of a part of one, must not replace the page of a run.
    folder = loaded[0].path if len(loaded) == 1 and within is None else Path()
    if timeline is not None:
        write_timeline(loaded, timeline, within)
    page = write_report(
        loaded,
        out or folder / "report.html",
        png=png,
        csv=csv,
        groups=groups,
        time_to=rows,
        baseline=title,
        within=within,
    )
    table = None if rows.is_empty() else write_time_to(rows, page)
    written = {"report": page, "png": png, "csv": csv, "time_to": table, "timeline": timeline}
    said: dict[str, Any] = {key: value for key, value in written.items() if value is not None}
    if as_json:
        if table is not None:
            said["table"] = finite(rows).to_dicts()
        typer.echo(json.dumps(said, default=str))
    elif not quiet:
        for heading, head, lines in comparison.tables(rows, title):
            print_table(head, lines, title=heading)
            print()
        if table is not None:
            print(comparison.note(title))
        typer.echo("\n".join(map(str, said.values())))
