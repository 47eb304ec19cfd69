"""``gossamer run`` and ``gossamer resume``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from gossamer.cli.summary import as_data, print_profile, print_summary, write_page

if TYPE_CHECKING:
    from gossamer.config import Experiment
    from gossamer.progress import Watcher
    from gossamer.results.run import Run
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


def run(
    file: File,
    overrides: Overrides = None,
    engine: Annotated[str | None, typer.Option(help="simulate or processes, instead of the file's.")] = None,
    out: Out = Path("runs"),
    report: Report = True,
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
    listen: ListenAt = None,
    token: Token = None,
    min_workers: MinWorkers = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run an experiment and record it. Ctrl-C ends it in order, with its record; a second one at once."""
    log_errors_only(quiet)
    from gossamer.config import Experiment, engine_name

    where = _listen(listen, token, min_workers)

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
                watcher.say("begins anew: a run with faults or engine.restart can't be resumed")
            return run_experiment(experiment, out, observer=watcher, server=server, listen=where)

        _watch(experiment, carry_out, report, profile, quiet, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    overrides: Annotated[list[str] | None, overriding("a field of stop or checkpoint")] = None,
    report: Report = True,
    listen: ListenAt = None,
    token: Token = None,
    min_workers: MinWorkers = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run from its newest checkpoint: one that was killed or stopped, that failed, or that gets another end."""
    log_errors_only(quiet)
    from gossamer.config import Experiment, engine_name

    where = _listen(listen, token, min_workers)

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


def _listen(address: str | None, token: str | None, min_workers: int) -> Listen | None:
    """Where workers join, as the options say."""
    from gossamer.runtime.processes.fork_server import Listen
    from gossamer.runtime.processes.security.join import check_token, new_token

    if address is None:
        return None
    return Listen(address, new_token() if token is None else check_token(token), min_workers)


@contextmanager
def _server(engine: Any) -> Iterator[ForkServer | None]:
    """The fork server, where real processes are asked for: it imports torch while this process does."""
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
    """Carry a run out, with a display, and say what came of it."""
    from gossamer.progress import watching

    with watching(experiment, quiet=quiet or as_json) as watcher, interruptible():
        done = carry_out(watcher)
    page = write_page(done) if report else None
    if as_json:
        typer.echo(json.dumps(as_data(done, page), default=str))
    elif not quiet:
        print_summary(done, page, watcher.round)
    if profile and not as_json:
        print_profile(done)
    if done.status == "stopped":
        raise typer.Exit(INTERRUPTED)
