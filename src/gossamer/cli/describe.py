"""``gossamer report``, ``verify`` and ``topology``: report pages, the integrity of records, and the graph of
an experiment."""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import File, Json, Overrides, Quiet, argument, option, print_json
from gossamer.errors import BadInput

if TYPE_CHECKING:
    from gossamer.topology import TopologySchedule

_ROUNDS = 1000  # rounds in which to look for a change of the graph


def topology(
    file: File,
    overrides: Overrides = None,
    round_: Annotated[int, option("The round whose graph is measured.", "--round", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Measure the graph and the matrix with which an experiment mixes: spectral gap, diameter, influence of nodes."""
    from gossamer.config import Experiment

    experiment = Experiment.load(file, overrides or ())
    from gossamer.node.setup import mixing_of
    from gossamer.topology import BY_TOPOLOGY, DataSize, TopologySchedule
    from gossamer.topology.mixing_matrix import describe

    if isinstance(getattr(experiment.topology, "weights", None), DataSize):
        from gossamer.runtime.setup import prepare

        schedule = prepare(experiment).topology  # needs the partition of the task's data
    else:
        schedule = TopologySchedule(experiment.topology, experiment.nodes, experiment.seed)
    schedule.check()
    if schedule.sampled and round_ > 0:
        raise BadInput(
            f"--round: {round_} of {experiment.topology.name_of()}, whose nodes choose their neighbours during the run;"
            " accepted: 0, the views that they start with"
        )
    mixing = mixing_of(experiment)
    measures = describe(schedule, round_, mixing or BY_TOPOLOGY)
    if as_json:
        print_json(measures | {"mixing": None if mixing is None else mixing.description()})
        return
    algorithm, topology = experiment.algorithm.name_of(), experiment.topology.name_of()
    influence = measures.pop("influence", None) or []
    words = {} if mixing is None else {"graph": mixing.graph, "weights": mixing.weights}
    figures = {name: "–" if value is None else f"{value:.6g}" for name, value in measures.items()}
    for name, text in ({"algorithm": algorithm} | words | figures).items():
        typer.echo(f"{_title(name):24} {text}")
    notes = []
    if mixing is None:
        problem = f"{algorithm} does not declare what it mixes with (Algorithm.mixing)"
        notes.append(f"{problem}: the figures describe the topology's weights, which it may not use")
    elif mixing.links is None:
        notes.append(
            f"{algorithm} does not use the topology, so the figures of {topology} say nothing about the run"
        )
    elif mixing.row is None:
        notes.append("no fixed matrix describes these weights, so they have no spectral gap")
    elif mixing.note:
        notes.append(mixing.note)
    if experiment.codec is not None and influence:
        notes.append("the figures describe whole models; what the codec loses makes mixing slower")
    if influence and max(influence) - min(influence) > 1e-6 / len(influence):
        ranks = sorted(range(len(influence)), key=lambda rank: -round(influence[rank], 12))
        top = ", ".join(f"{influence[rank]:.3g} (node {rank})" for rank in ranks[:4])
        typer.echo(f"{'influence':24} highest {top}; lowest {influence[ranks[-1]]:.3g} (node {ranks[-1]})")
        notes.append("the weights move the consensus away from the mean, to the mean weighted by influence")
    if mixing is None or mixing.links is not None:
        notes += _changes(schedule, round_, min(experiment.stop.rounds or _ROUNDS, _ROUNDS))
    for note in notes:
        typer.echo(f"{'note':24} {note}")


def _title(name: str) -> str:
    return name.replace("in_degree", "in-degree").replace("out_degree", "out-degree").replace("_", " ")


def _changes(schedule: TopologySchedule, round_: int, rounds: int) -> list[str]:
    """Notes on what changes during a run of this many rounds."""
    graph = schedule.graph(round_)
    if schedule.sampled:
        return ["the figures describe the views that the nodes start with; later views are recorded"]
    if any(schedule.graph(r) is not graph for r in range(rounds)):
        return [f"the graph changes during the run: the figures describe round {round_} only"]
    if not schedule.static_weights:
        return [f"the weights change during the run: the figures describe round {round_} only"]
    return []


def report(
    runs: Annotated[list[Path], argument("Folders of runs or sweeps to compare.", metavar="RUN...")],
    out: Annotated[
        Path | None, option("The page; default: report.html in the run's folder, or here.")
    ] = None,
    figures: Annotated[Path | None, option("Write figures of the metrics to this folder.")] = None,
    format_: Annotated[
        str | None,
        option("Format of the figures: pdf (default), svg or png.", "--format"),
    ] = None,
    width: Annotated[
        str, option("Width of the figures, e.g. 3.3in (a column of a paper) or 84mm.")
    ] = "3.3in",
    axis: Annotated[
        list[str] | None,
        option(
            "Axis of the figures: round, time_s, wall_s or bytes; default: that of the page.", metavar="AXIS"
        ),
    ] = None,
    baseline: Annotated[
        str | None, option("Compare in pairs of equal seeds with this cell or group.", metavar="NAME")
    ] = None,
    metrics: Annotated[
        str | None,
        option(
            "Compare and draw these metrics; default: those of evaluation sets.", metavar="NAME[,NAME...]"
        ),
    ] = None,
    time_to: Annotated[
        list[str] | None,
        option("Compare the time and bytes to these levels.", metavar="METRIC=LEVEL[,LEVEL...]"),
    ] = None,
    budget: Annotated[
        list[str] | None,
        option("Compare the metrics at a budget.", metavar="bytes=N[,N...]|time_s=SECONDS[,...]"),
    ] = None,
    area: Annotated[
        str | None, option("Compare this metric's mean over the rounds.", metavar="METRIC")
    ] = None,
    relative_to: Annotated[
        str | None, option("With --area: the difference from another metric's mean, in %.", metavar="METRIC")
    ] = None,
    per: Annotated[
        list[str] | None,
        option(
            "Print a line for each cell and value of this axis, over the rest of the grid.", metavar="AXIS"
        ),
    ] = None,
    unit: Annotated[
        str,
        option("Intervals are over the values of this axis, such as files of graphs.", metavar="AXIS"),
    ] = "seed",
    unfinished: Annotated[
        bool, option("Count runs that failed, were stopped or killed.", "--unfinished")
    ] = False,
    by_hops: Annotated[
        str | None,
        option("Print a table of this metric by distance from the poisoned nodes.", metavar="METRIC"),
    ] = None,
    animate: Annotated[
        Path | None,
        option("Animate the graph, coloured by the first of --metrics, as a GIF or PNG.", metavar="FILE"),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a report page about one or several runs, and compare them. It is one HTML file that needs no
    network."""
    from gossamer.results import comparison, spread
    from gossamer.results.formatting import print_table
    from gossamer.results.groups import default_baseline, find_baseline
    from gossamer.results.groups import groups as group_runs
    from gossamer.results.plots import parse_width, write_figures
    from gossamer.results.report import write_comparison, write_report
    from gossamer.results.run import load_runs
    from gossamer.results.tidy import class_columns, comparison_metrics, default_axis, finite, main_metric

    for name, given in {"--format": format_, "--axis": axis}.items():
        if given and figures is None:
            raise BadInput(f"{name}: got no --figures; accepted: with --figures FOLDER")
    found = list(dict.fromkeys(run for path in runs for run in load_runs(path, unfinished=True)))
    # A single run shows what is on record, whatever its status.
    groups = group_runs(found, unfinished=unfinished or len(found) == 1)
    loaded = [run for group in groups for run in group.runs]
    counted = [run for group in groups for run in group.samples] or loaded
    named = metrics.split(",") if metrics else []
    quantities = comparison.quantities(loaded, named, time_to or (), budget or (), area, relative_to)
    against = default_baseline(groups) if baseline is None else find_baseline(baseline, groups)
    compared = None
    if len(groups) > 1 or metrics or time_to or budget or area or per or unit != "seed":
        compared = comparison.compare(groups, quantities, against, per or (), unit)
    distances = None if by_hops is None else spread.spread(groups, by_hops)
    # A page about several runs must not replace the page of a run.
    folder = loaded[0].path if len(loaded) == 1 else Path()
    if figures is not None:
        drawn: Any = {"metrics": named or comparison_metrics(loaded), "axes": axis or [default_axis(loaded)]}
        write_figures(counted, groups, figures, format=format_ or "pdf", width=parse_width(width), **drawn)
    if animate is not None:
        from gossamer.results.animation import write_animation

        write_animation(counted, str(named[0] if named else main_metric(loaded[0])), animate)
    page = write_report(loaded, out or folder / "report.html", groups=groups, compared=compared)
    table = None if compared is None else write_comparison(compared, page)
    written = {"report": page, "figures": figures, "animation": animate, "comparison": table}
    output: dict[str, Any] = {key: value for key, value in written.items() if value is not None}
    if as_json:
        tables = {"table": None if compared is None else compared.rows, "by_hops": distances}
        data: dict[str, Any] = {
            name: finite(rows).to_dicts() for name, rows in tables.items() if rows is not None
        }
        print_json(output | data | ({} if compared is None else {"notes": compared.notes}))
    elif not quiet:
        shown = [] if compared is None else compared.tables()
        if by_hops is not None and distances is not None:
            shown.append(spread.table(distances, by_hops, class_columns(loaded)))
        for heading, head, lines in shown:
            print_table(head, lines, title=heading)
            print()
        if compared is not None:
            print(*compared.notes, sep="\n")
        typer.echo("\n".join(map(str, output.values())))


def verify(
    runs: Annotated[list[Path], argument("Folders of runs or sweeps.", metavar="RUN...")],
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check that records and checkpoints are complete and belong to their run. Prints one line for each
    problem."""
    logging.getLogger("gossamer").setLevel(logging.CRITICAL)  # problems are printed below
    from gossamer.results.verify import problems_of, runs_in

    folders = dict.fromkeys(folder for path in runs for folder in runs_in(path))
    by_folder = {str(folder): problems_of(folder) for folder in folders}
    problems = list(chain.from_iterable(by_folder.values()))
    if as_json:
        print_json({"runs": by_folder})
    else:
        checked = [folder for folder in folders if (folder / "experiment.yaml").exists()]
        unfinished = sum(not (folder / "status.json").exists() for folder in checked)
        note = f" ({unfinished} unfinished: running or killed)" if unfinished else ""
        intact = [] if quiet else [f"intact: {len(checked)} run{'s' * (len(checked) > 1)}{note}"]
        for line in problems or intact:
            typer.echo(line)
    if problems:
        raise typer.Exit(1)
