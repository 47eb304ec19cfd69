"""The command line: parse, call the API, print. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""

from __future__ import annotations

import json
import logging
import re
import resource
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer import __version__
from gossamer.deploy import commands as deployment
from gossamer.errors import BadInput, GossamerError, RunFailed, listed, suggest

if TYPE_CHECKING:
    from gossamer.experiment import Experiment
    from gossamer.progress import Watcher
    from gossamer.results.frames import Final
    from gossamer.results.groups import Group
    from gossamer.results.run import Run
    from gossamer.results.time_to import TimeTo
    from gossamer.topology import TopologySchedule

# What needs torch is imported inside the commands: help must not wait for it.

EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted (Ctrl-C)."
INTERRUPTED = 130

_WITHOUT_TOPOLOGY = frozenset(
    ("all-reduce", "centralized", "epidemic-local", "epidemic-oracle", "fedavg", "local")
)
"""The algorithms that ask nothing of the experiment's topology."""
_LOOKED_AT = 1000
"""In so many rounds a change of the graph is looked for."""

app = typer.Typer(
    help="Decentralized learning: simulate an algorithm in virtual time, or run it over TCP.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Override a field; the value is YAML. May be repeated."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file (YAML).")]


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


@app.command(epilog=EXIT_CODES)
def run(
    file: File,
    overrides: Overrides = None,
    engine: Annotated[str | None, typer.Option(help="simulate or processes, instead of the file's.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of all runs.")] = Path("runs"),
    report: Annotated[bool, typer.Option(help="Write report.html into the run's folder.")] = True,
    profile: Annotated[
        bool, typer.Option("--profile", help="Say where the time went, and the peak of memory.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the newest unfinished run of this very experiment, if it has a checkpoint.",
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run an experiment and record it. Ctrl-C ends it in order, with its record; a second one at once."""
    _log_errors_only(quiet)
    from gossamer.experiment import Experiment

    experiment = Experiment.load(file, overrides or (), engine)
    from gossamer.api import resume as resume_run
    from gossamer.api import run as run_experiment
    from gossamer.api import unfinished

    left = unfinished(experiment, out) if resume else None

    def carry_out(watcher: Watcher) -> Run:
        if left is not None:
            return resume_run(left, observer=watcher)
        return run_experiment(experiment, out, observer=watcher)

    _watch(experiment, carry_out, report, profile, quiet, as_json)


@app.command("resume", epilog=EXIT_CODES)
def resume_(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=VALUE", help="Override a field of stop or checkpoint. May be repeated."
        ),
    ] = None,
    report: Annotated[bool, typer.Option(help="Write report.html into the run's folder.")] = True,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run from its newest checkpoint: one that was killed or stopped, that failed, or that gets another end."""
    _log_errors_only(quiet)
    from gossamer.api import resume as resume_run
    from gossamer.experiment import Experiment
    from gossamer.results.folder import RunFolder

    experiment = Experiment.load(RunFolder.open(folder).path / "experiment.yaml", overrides or ())
    _watch(
        experiment,
        lambda watcher: resume_run(folder, overrides or (), observer=watcher),
        report,
        False,
        quiet,
        as_json,
    )


def _watch(
    experiment: Experiment,
    carry_out: Callable[[Watcher], Run],
    report: bool,
    profile: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Carry a run out, with a display, and say what came of it."""
    from gossamer.progress import watching

    with watching(experiment, quiet=quiet or as_json) as watcher:
        try:
            done = carry_out(watcher)
        except KeyboardInterrupt:
            typer.echo("error: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
    page = _page([done], done.path / "report.html") if report else None
    if as_json:
        typer.echo(json.dumps(_summary(done, page), default=str))
    elif not quiet:
        _print_summary(done, page, watcher.round)
    if profile and not as_json:
        _print_profile(done)
    if done.status == "stopped":
        raise typer.Exit(INTERRUPTED)


@app.command(epilog=EXIT_CODES)
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=VALUE", help="Override a field of the base. May be repeated."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CELL", help="Run this cell alone. May be repeated.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: as many as the cores carry.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Begin failed runs again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells, and run nothing.")] = False,
    out: Annotated[Path, typer.Option(help="The folder of all runs.")] = Path("runs"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run many experiments: cells times seeds over a base. A second call goes on where the first one ended."""
    _log_errors_only(quiet)
    from gossamer.sweep.sweep import Sweep

    loaded = Sweep.load(file, overrides or (), out)
    chosen = loaded.chosen(only or ())
    from gossamer.sweep.display import as_data, print_plan, print_summary, watching_sweep

    if dry_run:
        print_plan(loaded, chosen)
        return
    from gossamer.sweep.execute import run_sweep

    with watching_sweep(loaded.name, quiet=quiet or as_json) as watcher:
        try:
            outcome = run_sweep(
                loaded, jobs=jobs, only=only or (), retry_failed=retry_failed, observer=watcher
            )
        except KeyboardInterrupt:
            typer.echo("error: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(as_data(loaded, outcome)))
    elif not quiet:
        print_summary(loaded, loaded.results(), outcome)
    if outcome.stopped:
        raise typer.Exit(INTERRUPTED)
    if outcome.failed or outcome.counts.left:
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, or of sweeps: what is in them is compared."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write; default: report.html in the run's folder, or for several runs in the"
            " working directory."
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="A folder for the charts as PNG files.")] = None,
    csv: Annotated[Path | None, typer.Option(help="A folder for curves and metrics as CSV files.")] = None,
    time_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC=LEVEL[,LEVEL...]",
            help="Compare how long the runs take to these levels, over their seeds; also written as a CSV file"
            " beside the page. May be repeated.",
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="The group that others are compared with (--time-to).")
    ] = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD", help="Put runs together by this field, not by all but the seed. May be repeated."
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw when the nodes computed and sent into this SVG or PNG file.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a report page of one or several runs: one HTML file that needs no network."""
    _log_errors_only(quiet)
    from gossamer.results.frames import finite
    from gossamer.results.groups import find_group, groups
    from gossamer.results.report import write_report, write_time_to
    from gossamer.results.run import load_runs
    from gossamer.results.time_to import parse_levels, time_to_frame
    from gossamer.results.time_to import time_to as compare

    if baseline is not None and not time_to:
        raise BadInput("--baseline: accepted together with --time-to")
    levels = parse_levels(time_to or ())
    loaded = list(dict.fromkeys(run for path in runs for run in load_runs(path)))
    grouped = groups(loaded, group_by or ())
    loaded = [run for group in grouped for run in group.runs]
    against = None if baseline is None else find_group(baseline, grouped)
    rows = compare(grouped, levels, against)
    # A page of several runs is none of theirs: it must not take the place of one.
    place = loaded[0].path if len(loaded) == 1 else Path()
    if timeline is not None:
        from gossamer.results.timeline import write_timeline

        write_timeline(loaded, timeline)
    page = write_report(
        loaded,
        out or place / "report.html",
        png=png,
        csv=csv,
        groups=grouped,
        time_to=rows,
        baseline=None if against is None else against.label,
    )
    table = write_time_to(rows, page) if rows else None
    written = {"report": page, "png": png, "csv": csv, "time_to": table, "timeline": timeline}
    if as_json:
        said: dict[str, Any] = {key: value for key, value in written.items() if value is not None}
        if rows:
            said["table"] = finite(time_to_frame(rows)).to_dicts()
        typer.echo(json.dumps(said, default=str))
    elif not quiet:
        if rows:
            _print_time_to(rows, against)
        for path in written.values():
            if path is not None:
                typer.echo(path)


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help="algorithm, topology, partition, task, ...")] = None,
    as_json: Json = False,
) -> None:
    """List what an experiment can name, with parameters and their defaults."""
    from gossamer.registry import KINDS, names

    if kind is not None and kind not in KINDS:
        raise BadInput(f"kind: got {kind!r}{suggest(kind, KINDS)}; accepted: {listed(list(KINDS))}")
    found = {each: names(each) for each in ([kind] if kind else sorted(KINDS))}
    if as_json:
        table = {
            each: {name: _parameters(cls) for name, cls in sorted(classes.items())}
            for each, classes in found.items()
        }
        typer.echo(json.dumps(table))
        return
    from rich.console import Console
    from rich.table import Table

    table_ = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("kind", "name", "parameters", "what it is"):
        table_.add_column(heading, overflow="fold")
    for each, classes in found.items():
        for name, cls in sorted(classes.items()):
            parameters = "\n".join(f"{key}: {value}" for key, value in _parameters(cls).items())
            table_.add_row(each, name, parameters, _first_paragraph(cls.__doc__ or ""))
        if not classes:
            table_.add_row(each, "(none)", "", "")
    Console(markup=False).print(table_)


@app.command()
def topology(
    file: File,
    overrides: Overrides = None,
    round_: Annotated[int, typer.Option("--round", help="Which round's graph.", min=0)] = 0,
    png: Annotated[Path | None, typer.Option(help="Draw the graph into this PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure an experiment's graph and mixing matrix: spectral gap, diameter, effective neighbours."""
    from gossamer.experiment import Experiment

    experiment = Experiment.load(file, overrides or ())
    from gossamer.topology import TopologySchedule, describe

    schedule = TopologySchedule(experiment.topology, experiment.nodes, experiment.seed)
    schedule.check()
    if schedule.sampled and round_ > 0:
        raise BadInput(
            f"--round: {round_} of {experiment.topology.name_of()}, whose nodes find their neighbours themselves; accepted:"
            " 0, what they start with"
        )
    measures = describe(schedule, round_)
    if png is not None:
        from gossamer.results.plots import draw_graph

        graph = schedule.graph(round_)
        draw_graph(graph.nodes, list(graph.edges()), png, directed=graph.directed, seed=experiment.seed)
    if as_json:
        typer.echo(json.dumps(measures))
        return
    for name, value in measures.items():
        typer.echo(f"{name.replace('_', ' '):24} {'–' if value is None else f'{value:.6g}'}")
    for note in _notes(experiment, schedule, round_):
        typer.echo(f"{'note':24} {note}")
    if png is not None:
        typer.echo(f"{'picture':24} {png}")


@app.command(epilog=EXIT_CODES)
def keys(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to; made for its owner alone if it is not there.")
    ],
    nodes: Annotated[int | None, typer.Option(min=1, help="Make keys for ranks 0 to N - 1.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Make the key of this rank alone.")] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the nodes listen, in the order of their ranks; HOST:9000-9003 is four of them. May be"
            " repeated. With it, a peers file is written.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The peers file; default: peers.yaml in the folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace keys that are there.")] = False,
    quiet: Quiet = False,
) -> None:
    """Make keys: for each node an Ed25519 key and a certificate that it signed itself. Prints the fingerprints."""
    from gossamer.engines.processes.security.keys import expand_addresses, make_keys
    from gossamer.engines.processes.security.peers import Peer, fingerprint, write_rows

    if (nodes is None) == (rank is None):
        raise BadInput("--nodes, --rank: accepted: one of them")
    ranks = list(range(nodes or 0)) if rank is None else [rank]
    addresses = expand_addresses(address or ())
    if addresses and len(addresses) != len(ranks):
        raise BadInput(f"--address: got {len(addresses)}; accepted: {len(ranks)}, one a node")
    if len(set(addresses)) < len(addresses):
        raise BadInput("--address: the same twice; accepted: one a node")
    if output is not None and not addresses:
        raise BadInput("--output: accepted together with --address")
    made = make_keys(folder, ranks, force=force)
    if addresses:
        rows = [Peer.of(rank, at, made[rank]) for rank, at in zip(ranks, addresses, strict=True)]
        write_rows(output or folder / "peers.yaml", rows)
    for each, certificate in made.items() if not quiet else ():
        typer.echo(f"{each:5} {fingerprint(certificate)}")


@app.command(epilog=EXIT_CODES)
def peers(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Peers files, or parts of one.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write one peers file of all.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Check peers files, put them together, and show who is in them."""
    from gossamer.engines.processes.security.peers import Peers

    merged = Peers.merged(files)
    if output is not None:
        merged.save(output)
    for row in merged.rows if not quiet else ():
        typer.echo(f"{row.rank:5} {row.address:24} {row.fingerprint}")


deployment.add_to(app)


def main() -> None:
    """The program ``gossamer``."""
    logging.basicConfig(level=logging.WARNING, format="gossamer: %(message)s")
    logging.getLogger("gossamer").setLevel(logging.INFO)
    with _exit_codes():
        app()


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
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


def _log_errors_only(quiet: bool) -> None:
    if quiet:
        logging.getLogger("gossamer").setLevel(logging.ERROR)


def _page(runs: list[Run], out: Path) -> Path | None:
    from gossamer.results.report import write_report

    try:
        return write_report(runs, out)
    except BadInput as error:  # the run is done, whatever is missing for the page
        typer.echo(f"no report: {error}", err=True)
        return None


def _summary(done: Run, page: Path | None) -> dict[str, Any]:
    from gossamer.results.frames import final_summary

    return {"run": done.path, "report": page, **asdict(final_summary(done))}


def _print_summary(done: Run, page: Path | None, round_: int) -> None:
    from gossamer.progress import megabytes
    from gossamer.results.frames import ASYNCHRONY, final_summary

    summary = final_summary(done)
    lines = {}
    if done.status == "stopped":
        of = f" of {rounds}" if (rounds := done.experiment["stop"]["rounds"]) else ""
        at = max(round_, summary.rounds or 0)
        lines["STOPPED"] = f"at round {at}{of}, before the end; what follows is what was recorded until then"
    if done.lost:
        lines["status"] = done.outcome
    lines |= {
        name.replace("_", " "): _spread(final)
        for name, final in summary.metrics.items()
        if name not in ASYNCHRONY
    }
    clock = "virtual time" if done.experiment["engine"]["name"] == "simulate" else "time"
    lines |= {
        clock: f"{summary.time_s or 0:.4g} s",
        "wall time": f"{summary.wall_s or 0:.1f} s",
        "sent": megabytes(summary.bytes_sent or 0),
    }
    if done.private_bytes is not None:
        mean, most = (done.private_bytes[name] / 2**20 for name in ("mean", "max"))
        lines["private memory"] = f"{mean:.1f} MiB a node, {most:.1f} at most"
    lines["run"] = str(done.path)
    if page is not None:
        lines["report"] = str(page)
    for name, text in lines.items():
        typer.echo(f"{name:20} {text}")


def _spread(final: Final) -> str:
    from gossamer.progress import numerals

    mean, std = numerals(final.mean, final.std)
    return f"{mean} ± {std} over {final.count} nodes" if final.count > 1 else mean


def _print_time_to(rows: list[TimeTo], baseline: Group | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from gossamer.results.time_to_text import note, tables

    console, name = Console(markup=False, highlight=False), None if baseline is None else baseline.label
    for title, head, lines in tables(rows, name):
        table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
        for column, heading in enumerate(head):
            table.add_column(heading, overflow="fold", justify="right" if column else "left")
        for line in lines:
            table.add_row(*line)
        console.print(table)
        console.print()
    console.print(note(name))


def _print_profile(done: Run) -> None:
    wall_s = done.wall_s or 0.0
    parts = done.profile
    if parts:
        parts["events"] = wall_s - sum(parts.values())
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        typer.echo(f"{name:20} {seconds:.2f} s ({100 * seconds / max(wall_s, 1e-9):.0f} %)")
    if done.peak_vectors is not None:
        share = done.peak_vectors / done.nodes
        typer.echo(f"{'vectors at the peak':20} {done.peak_vectors} ({share:.1f} a node)")
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    # Linux counts in KiB, macOS in bytes.
    typer.echo(f"{'peak memory':20} {peak / (2**20 if sys.platform != 'darwin' else 2**30):.2f} GiB")


def _notes(experiment: Experiment, schedule: TopologySchedule, round_: int) -> Iterator[str]:
    """What the figures of a topology do not say."""
    name = experiment.algorithm.name_of()
    if name in _WITHOUT_TOPOLOGY:
        yield f"{name} does not use the topology: the figures say nothing about this experiment's run"
    if schedule.sampled:
        yield (
            "the figures are of the views that the nodes start with; later ones depend on who hears from whom and when, and"
            " are recorded with the run"
        )
    graph, rounds = schedule.graph(round_), min(experiment.stop.rounds or _LOOKED_AT, _LOOKED_AT)
    if any(schedule.graph(r) is not graph for r in range(rounds)):
        yield f"the graph changes during the run: the figures are of round {round_} alone"


def _first_paragraph(docstring: str) -> str:
    """In one line, without the marks of reStructuredText."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.sub(r":\w+:(?=`)|`", "", paragraph)


def _parameters(cls: Any) -> dict[str, str]:
    """Field name -> its default, or its type where a value is required."""
    shown = {}
    for name, field in cls.model_fields.items():
        required = getattr(field.annotation, "__name__", str(field.annotation))
        shown[name] = (
            f"({required})" if field.is_required() else str(field.get_default(call_default_factory=True))
        )
    return shown


if __name__ == "__main__":
    main()
