"""``gossamer run``, ``resume`` and ``sweep``, and the summary that they print."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import (
    INTERRUPTED,
    File,
    Json,
    Out,
    Overrides,
    Quiet,
    Report,
    importing,
    interruptible,
    log_errors_only,
    overriding,
)
from gossamer.errors import BadInput

if TYPE_CHECKING:
    from gossamer.config import Experiment
    from gossamer.progress import Watcher
    from gossamer.results.run import Run
    from gossamer.results.tidy import Final
    from gossamer.runtime.processes.fork_server import ForkServer, Listen

ListenAt = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Run the nodes on workers that join here (gossamer worker), with the engine processes.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="GOSSAMER_TOKEN",
        help="What workers must know to join: 16 characters or more; default: a new one.",
    ),
]
MinWorkers = Annotated[int, typer.Option(min=1, help="Wait for at least this many workers.")]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Start the workers: ray, or module:factory of an executor. They join here unless --listen says where.",
    ),
]


def run(
    file: File,
    overrides: Overrides = None,
    engine: Annotated[
        str | None, typer.Option(help="simulate or processes, in place of the file's engine.")
    ] = None,
    out: Out = Path("runs"),
    report: Report = True,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print where the time went, and the peak of memory.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the newest unfinished run of the same experiment, if it has a checkpoint.",
        ),
    ] = False,
    listen: ListenAt = None,
    token: Token = None,
    min_workers: MinWorkers = 1,
    workers: Workers = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run an experiment and record it. Ctrl-C ends the run cleanly and keeps its record; a second Ctrl-C ends it at once."""
    log_errors_only(quiet)
    from gossamer.config import Experiment, engine_name

    where = _listen(listen, token, min_workers, workers)

    raw = Experiment.read(file, overrides or (), engine)
    with _server(engine_name(raw.get("engine", {}))) as server:
        with importing():
            experiment = Experiment.of(raw, file.resolve().parent)
            from gossamer.api import resume as resume_run
            from gossamer.api import run as run_experiment
            from gossamer.api import unfinished

        left = unfinished(experiment, out) if resume else None

        def carry_out(watcher: Watcher) -> Run:
            if left is not None:
                return resume_run(left, observer=watcher, server=server, listen=where)
            if resume and experiment.has_faults:
                watcher.say("starts from the beginning: a run with faults or engine.restart can't be resumed")
            return run_experiment(experiment, out, observer=watcher, server=server, listen=where)

        _watch(experiment, carry_out, report, profile, quiet, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    overrides: Annotated[list[str] | None, overriding("a field of stop or checkpoint")] = None,
    report: Report = True,
    listen: ListenAt = None,
    token: Token = None,
    min_workers: MinWorkers = 1,
    workers: Workers = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue a run from its newest checkpoint, after it was killed or stopped, or has failed, or with a later end."""
    log_errors_only(quiet)
    from gossamer.config import Experiment, engine_name

    where = _listen(listen, token, min_workers, workers)

    file = folder / "experiment.yaml"
    raw = Experiment.read(file, overrides or ()) if file.is_file() else {}
    with _server(engine_name(raw.get("engine", {}))) as server:
        with importing():
            from gossamer.api import resume as resume_run
            from gossamer.results.folder import RunFolder

            experiment = Experiment.of(raw, RunFolder.open(folder).path.resolve())

        def carry_out(watcher: Watcher) -> Run:
            return resume_run(folder, overrides or (), observer=watcher, server=server, listen=where)

        _watch(experiment, carry_out, report, False, quiet, as_json)


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file (YAML).")],
    overrides: Annotated[list[str] | None, overriding("a field of all cells, or seeds")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CELL", help="Run only this cell. May be repeated.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="The number of runs at a time; default: by the number of cores.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Start failed runs again.")] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Start finished runs again; the newest run of a cell counts, older ones are kept."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells without running them.")] = False,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Have an executor do the runs: ray, or module:factory of a concurrent.futures executor.",
        ),
    ] = None,
    out: Out = Path("runs"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run many experiments: cells times seeds over a base. A second call continues where the first one ended."""
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
            loaded,
            workers,
            jobs=jobs,
            only=only or (),
            retry_failed=retry_failed,
            again=again,
            observer=watcher,
        )
    if as_json:
        typer.echo(json.dumps(as_data(loaded, outcome)))
    elif not quiet:
        print_summary(loaded, loaded.results(), outcome)
    if outcome.stopped:
        raise typer.Exit(INTERRUPTED)
    if outcome.failed or outcome.counts.left:
        raise typer.Exit(1)


def _listen(address: str | None, token: str | None, least: int, workers: str | None) -> Listen | None:
    """Where workers join, as the options say."""
    from gossamer.runtime.processes.fork_server import Listen
    from gossamer.runtime.processes.security import check_token, new_token

    if address is None and workers is None:
        return None
    known = new_token() if token is None else check_token(token)
    return Listen(address or "127.0.0.1:0", known, least, workers)


@contextmanager
def _server(engine: Any) -> Iterator[ForkServer | None]:
    """The fork server, if the engine is processes: it imports torch while this process does."""
    if engine != "processes":
        yield None
        return
    from gossamer.runtime.processes.fork_server import ForkServer

    with ForkServer() as server:
        yield server


def _watch(
    experiment: Experiment,
    carry_out: Callable[[Watcher], Run],
    report: bool,
    profile: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Carry out a run with a progress display, and print its summary."""
    from gossamer.progress import watching

    with watching(experiment, quiet=quiet or as_json) as watcher, interruptible():
        done = carry_out(watcher)
    page = _write_page(done) if report else None
    if as_json:
        typer.echo(json.dumps(_as_data(done, page), default=str))
    elif not quiet:
        _print_summary(done, page, watcher.round)
    if profile and not as_json:
        _print_profile(done)
    if done.status == "stopped":
        raise typer.Exit(INTERRUPTED)


def _write_page(done: Run) -> Path | None:
    """Write a run's page into its folder. If that is not possible, say why and return None."""
    from gossamer.results.report import write_report

    try:
        return write_report([done], done.path / "report.html")
    except BadInput as error:  # such as a missing library for charts: the run itself is done
        typer.echo(f"no report: {error}", err=True)
        return None


def _as_data(done: Run, page: Path | None) -> dict[str, Any]:
    """The summary of a run for ``--json``."""
    from gossamer.results.tidy import final_summary

    return {"run": done.path, "report": page, **asdict(final_summary(done))}


def _print_summary(done: Run, page: Path | None, round_: int) -> None:
    """Print the summary of a run; ``round_`` is the last round that the progress display has seen."""
    from gossamer.progress import megabytes
    from gossamer.results.checkpoints import newest
    from gossamer.results.tidy import ASYNCHRONY, final_summary

    summary, lines = final_summary(done), {}
    if done.status == "stopped":
        of = f" of {rounds}" if (rounds := done.experiment["stop"]["rounds"]) else ""
        at = f"at round {max(round_, summary.rounds or 0)}{of}"
        lines["STOPPED"] = f"{at}, before its end; the figures below are those recorded until then"
    if done.lost:
        lines["status"] = done.outcome
    for name, final in summary.metrics.items():
        if name not in ASYNCHRONY:
            lines[name.replace("_", " ")] = _spread(final)
    lines["virtual time" if done.virtual else "time"] = f"{summary.time_s or 0:.4g} s"
    lines["wall time"] = f"{summary.wall_s or 0:.1f} s"
    lines["sent"] = megabytes(summary.bytes_sent or 0)
    if done.private_bytes is not None:
        mean, most = (done.private_bytes[name] / 2**20 for name in ("mean", "max"))
        lines["private memory"] = f"{mean:.1f} MiB per node, {most:.1f} at most"
    lines["run"] = str(done.path)
    if page is not None:
        lines["report"] = str(page)
    if done.status == "stopped":
        saved = newest(done.path / "checkpoints") is not None
        to_go_on = f"gossamer resume {done.path}" if saved else "not possible: the run saved no checkpoint"
        lines["to go on"] = to_go_on
    for name, text in lines.items():
        typer.echo(f"{name:20} {text}")


def _print_profile(done: Run) -> None:
    """Print where the time of a run went, and the peak of memory."""
    wall_s, parts = done.wall_s or 0.0, done.profile
    lines = []
    if parts:
        parts["events"] = wall_s - sum(parts.values())
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        lines.append((name, f"{seconds:.2f} s ({100 * seconds / max(wall_s, 1e-9):.0f} %)"))
    for part, forms in done.execution.items():
        unit = "sums" if part == "mix" else "shapes of input"
        lines += [(part, f"{form} ({unit}: {count})") for form, count in forms.items()]
    if done.peak_vectors is not None:
        share = done.peak_vectors / done.nodes
        lines.append(("vectors at the peak", f"{done.peak_vectors} ({share:.1f} per node)"))
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    # Linux counts in KiB, macOS in bytes.
    lines.append(("peak memory", f"{peak / (2**20 if sys.platform != 'darwin' else 2**30):.2f} GiB"))
    for name, text in lines:
        typer.echo(f"{name:20} {text}")


def _spread(final: Final) -> str:
    from gossamer.progress import numerals

    mean, std = numerals(final.mean, final.std)
    return f"{mean}, std {std} over {final.count} nodes" if final.count > 1 else mean
