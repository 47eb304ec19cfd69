"""``gossamer run``, ``resume``, ``sweep`` and ``worker``, and the summary that they print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gossamer.cli import completion
from gossamer.cli.options import (
    DIVERGED,
    INTERRUPTED,
    Again,
    CellOverrides,
    ExecutorName,
    File,
    Jobs,
    Json,
    Keep,
    Out,
    Overrides,
    Quiet,
    Report,
    argument,
    option,
    overriding,
    print_json,
)
from gossamer.errors import BadInput

if TYPE_CHECKING:
    from gossamer.config import Experiment
    from gossamer.results.observer import Observer
    from gossamer.results.run import Run
    from gossamer.runtime.processes.fork_server import ForkServer, Listen

_EXITS = {"diverged": DIVERGED, "stopped": INTERRUPTED}
ListenAt = Annotated[
    str | None, option("Run the nodes on workers that join here.", "--listen", metavar="HOST:PORT")
]
Token = Annotated[
    str | None, option("The secret that workers must know, at least 16 characters.", envvar="GOSSAMER_TOKEN")
]
MinWorkers = Annotated[int, option("Wait for at least this many workers.", min=1)]
WorkersOption = Annotated[
    str | None, option("Start the workers: ray, or module:factory of an executor.", metavar="NAME")
]
EngineName = Annotated[
    Literal["simulate", "processes"] | None, option("Use this engine instead of the file's.")
]
Profile = Annotated[bool, option("Print the time spent in each part, and the peak memory.", "--profile")]
Unfinished = Annotated[
    bool, option("Continue the newest unfinished run of the same experiment, if possible.", "--resume")
]


def run(
    file: File,
    overrides: Overrides = None,
    engine: EngineName = None,
    out: Out = Path("runs"),
    report: Report = True,
    profile: Profile = False,
    resume: Unfinished = False,
    listen: ListenAt = None,
    token: Token = None,
    min_workers: MinWorkers = 1,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run an experiment and record it. Ctrl-C ends the run cleanly and keeps its record; a second Ctrl-C ends it at once."""
    from gossamer.config import Experiment, examples

    listen_at, file = _listen(listen, token, min_workers, workers), examples.located(file)
    raw = Experiment.read(file, overrides or (), engine)
    with _server(raw, listen_at) as server:
        experiment = Experiment.of(raw, file.resolve().parent)
        from gossamer import api

        unfinished = api.unfinished(experiment, out) if resume else None

        def carry_out(watcher: Observer) -> Run:
            if unfinished is not None:
                return api.resume(unfinished, observer=watcher, server=server, listen=listen_at)
            if resume and experiment.has_faults:
                watcher.say("starts from the beginning: a run with faults or engine.restart can't be resumed")
            return api.run(experiment, out, observer=watcher, server=server, listen=listen_at)

        _watch(experiment, carry_out, report, profile, quiet, as_json)


def resume(
    folder: Annotated[Path, argument("The folder of a run.", metavar="RUN")],
    overrides: Annotated[list[str] | None, overriding("a field of stop or checkpoint")] = None,
    report: Report = True,
    listen: ListenAt = None,
    token: Token = None,
    min_workers: MinWorkers = 1,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue a run from its newest checkpoint, after it was killed, stopped or failed, or with a later
    end."""
    from gossamer.config import Experiment

    listen_at = _listen(listen, token, min_workers, workers)
    file = folder / "experiment.yaml"
    raw = Experiment.read(file, overrides or ()) if file.is_file() else {}
    with _server(raw, listen_at) as server:
        from gossamer import api
        from gossamer.results.folder import RunFolder

        experiment = Experiment.of(raw, RunFolder.open(folder).path.resolve())

        def carry_out(watcher: Observer) -> Run:
            return api.resume(folder, overrides or (), observer=watcher, server=server, listen=listen_at)

        _watch(experiment, carry_out, report, False, quiet, as_json)


def sweep(
    file: Annotated[Path, argument("A sweep file (YAML), or an example's name.", "FILE", completion.sweeps)],
    overrides: CellOverrides = None,
    only: Annotated[
        list[str] | None,
        option("Run only this cell, or axis=value of the grid. May be repeated.", metavar="CELL"),
    ] = None,
    array: Annotated[
        str | None,
        option(
            "Run only the K-th of N shares, as for $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT.",
            metavar="K/N",
        ),
    ] = None,
    jobs: Jobs = None,
    retry_failed: Annotated[bool, option("Start failed runs again.", "--retry-failed")] = False,
    again: Again = False,
    keep: Keep = False,
    dry_run: Annotated[
        bool, option("List the runs; estimate time and memory by short trials.", "--dry-run")
    ] = False,
    baseline: Annotated[
        str | None,
        option("Compare in pairs of equal seeds with this cell; default: the first.", metavar="NAME"),
    ] = None,
    unit: Annotated[
        str,
        option("Intervals are over the values of this axis, such as files of graphs.", metavar="AXIS"),
    ] = "seed",
    workers: ExecutorName = None,
    out: Out = Path("runs"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run many experiments: cells times seeds over a base. A second call continues where the first one ended."""
    from gossamer.sweep.sweep import Sweep

    loaded, share = Sweep.load(file, overrides or (), out), _share(array)
    chosen = loaded.chosen(only or (), share)
    from gossamer.sweep.display import as_data, print_summary, watching_sweep
    from gossamer.sweep.execute import run_sweep
    from gossamer.sweep.table import compared

    options: Any = {"jobs": jobs, "retry_failed": retry_failed, "again": again, "keep": keep}
    if dry_run:
        from gossamer.sweep.plan import plan, print_plan

        if not (quiet or as_json):
            typer.echo("each cell without a finished run is tried for some seconds", err=True)
        made = plan(loaded, chosen, workers=workers, **options)
        if as_json:
            described = {"plan": made.rows, "left": made.left, "notes": made.notes}
            print_json({"sweep": str(loaded.folder), **described})
        else:
            print_plan(made)
        return
    if baseline is not None or unit != "seed":
        compared(loaded, baseline, unit)  # refuses an unknown name before the runs start
    with watching_sweep(loaded, quiet=quiet or as_json) as watcher:
        outcome = run_sweep(loaded, workers, observer=watcher, only=only or (), array=share, **options)
    if as_json:
        print_json(as_data(loaded, compared(loaded, baseline, unit), outcome))
    elif not quiet:
        print_summary(loaded, compared(loaded, baseline, unit), outcome)
    if outcome.stopped:
        raise typer.Exit(INTERRUPTED)
    if outcome.failed or outcome.counts.left:
        raise typer.Exit(1)


def _share(text: str | None) -> tuple[int, int] | None:
    """The numbers of ``--array K/N``."""
    if text is None:
        return None
    share, _, shares = text.partition("/")
    if not (share.isdecimal() and shares.isdecimal()):
        raise BadInput(f"--array {text}: accepted: two whole numbers K/N, such as 3/10")
    return int(share), int(shares)


def worker(
    coordinator: Annotated[str, argument("Where gossamer run --listen waits.", metavar="HOST:PORT")],
    token: Annotated[
        str, option("The token of the run.", "--join", metavar="TOKEN", envvar="GOSSAMER_TOKEN")
    ],
    slots: Annotated[
        int | None, option("Maximum number of nodes to run; default: one per core.", min=1, max=10**6)
    ] = None,
    address: Annotated[
        str | None, option("This machine's address for other nodes; default: the one that reaches HOST.")
    ] = None,
    data_root: Annotated[
        Path | None, option("The data folder on this machine, if not the experiment's.")
    ] = None,
    wait_s: Annotated[float, option("Seconds to wait for the coordinator.", "--wait")] = 60.0,
    quiet: Quiet = False,
) -> None:
    """Join a run and execute some of its nodes until it ends."""
    from gossamer.runtime.processes.channel import parse_address
    from gossamer.runtime.processes.security import check_token

    parse_address(coordinator, "HOST:PORT")
    check_token(token)
    from gossamer.cores import cores
    from gossamer.runtime.processes.worker.worker import run_worker

    root = None if data_root is None else str(data_root)
    run_worker(coordinator, token, slots or cores(), address=address, data_root=root, wait_s=wait_s)


def _listen(address: str | None, token: str | None, min_workers: int, workers: str | None) -> Listen | None:
    """The address at which workers join and the token that they need, from the options; None without workers."""
    from gossamer.runtime.processes.fork_server import Listen
    from gossamer.runtime.processes.security import check_token, new_token

    if address is None and workers is None:
        return None
    secret = new_token() if token is None else check_token(token)
    if token is None and workers is None:
        typer.echo(f"the token of this run: {secret}", err=True)
    return Listen(address or "127.0.0.1:0", secret, min_workers, workers)


@contextmanager
def _server(raw: dict[str, Any], listen: Listen | None) -> Iterator[ForkServer | None]:
    """The fork server, if nodes are processes on this machine. It imports torch while this process does."""
    from gossamer.config import engine_name

    if listen is not None or engine_name(raw.get("engine", {})) != "processes":
        yield None
        return
    from gossamer.runtime.processes.fork_server import ForkServer

    with ForkServer() as server:
        yield server


def _watch(
    experiment: Experiment,
    carry_out: Callable[[Observer], Run],
    report: bool,
    profile: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run an experiment with a progress display, and print its summary."""
    from gossamer.progress import watching
    from gossamer.results.finals import final_summary

    with watching(experiment, quiet=quiet or as_json) as watcher:
        done = carry_out(watcher)
    page = None
    if report:
        from gossamer.results.report import write_report

        try:
            page = write_report([done], done.path / "report.html")
        except BadInput as error:  # e.g. a missing plotting library; the run itself is done
            typer.echo(f"no report: {error}", err=True)
    if as_json:
        output = {"run": done.path, "report": page, **asdict(final_summary(done))}
        print_json({**output, "profile": done.figures.get("profile")} if profile else output)
    elif not quiet:
        lines = done.summary | ({} if page is None else {"report": str(page)})
        _print(list(lines.items()))
    if profile and not as_json:
        _print(_profile(done))
    if done.status in _EXITS:
        raise typer.Exit(_EXITS[done.status])


def _print(lines: list[tuple[str, str]]) -> None:
    for name, text in lines:
        typer.echo(f"{name:20} {text}")


def _profile(done: Run) -> list[tuple[str, str]]:
    """The time spent in each part of a run, and the peak memory."""
    wall_s, parts = done.wall_s or 0.0, dict(done.figures.get("profile") or {})
    if parts:
        parts["events"] = wall_s - sum(parts.values())
    lines = [
        (name, f"{seconds:.2f} s ({100 * seconds / max(wall_s, 1e-9):.0f} %)")
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1])
    ]
    if (vectors := done.figures.get("peak_vectors")) is not None:
        lines.append(("vectors at the peak", f"{vectors} ({vectors / done.nodes:.1f} per node)"))
    try:
        import resource
    except ImportError:  # Windows
        return lines
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    # Linux counts in KiB, macOS in bytes.
    return [*lines, ("peak memory", f"{peak / (2**20 if sys.platform != 'darwin' else 2**30):.2f} GiB")]
