"""The commands for several machines: ``node``, ``collect``, ``launch`` and ``deploy``."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.options import INTERRUPTED, File, Out, Overrides, Quiet, Report, log_errors_only
from gossamer.errors import BadInput

if TYPE_CHECKING:
    from gossamer.config import Experiment
    from gossamer.deploy.collect import Collected
    from gossamer.runtime.recording import Observer

EXIT_CODES = (
    "Exit codes: 0 done, or stopped in order, 1 failed, 2 bad input, 130 launch was interrupted (Ctrl-C)."
)

Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS: anybody on the way can read and change what nodes send.")
]
Shape = Annotated[
    bool,
    typer.Option("--shape", help="Have the experiment's network delay and limit what is sent, too."),
]


def node(
    file: File,
    rank: Annotated[int, typer.Option(help="Which node this is, from 0.")],
    peers: Annotated[Path, typer.Option(metavar="PEERS", help="The peers file (gossamer keys makes it).")],
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder with this node's key; others' are not needed."),
    ] = None,
    overrides: Overrides = None,
    out: Out = Path("runs"),
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen, if not at the address that the peers file tells the others.",
        ),
    ] = None,
    insecure: Insecure = False,
    shape: Shape = False,
    attached: Annotated[
        bool, typer.Option("--attached", help="Stop when standard input ends: who started it is gone.")
    ] = False,
    run: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="ID",
            help="Any text, the same for all nodes of this run: nodes of another run are refused.",
        ),
    ] = "",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with this node's newest unfinished record that has a checkpoint, if any."
        ),
    ] = False,
    down_since: Annotated[
        float | None,
        typer.Option(
            metavar="UNIX_S",
            help="With --resume, of all nodes: none has lived since then (a job that was in the queue), which is none of the"
            " run's time.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON objects, one a line.")] = False,
) -> None:
    """Be one node of a run on several machines; the others are started in the same way. Ctrl-C or SIGTERM stops it in
    order: its record and its model are complete."""
    log_errors_only(quiet)
    if insecure == (keys is not None):
        raise BadInput("--keys, --insecure: accepted: one of them")
    if down_since is not None and not resume:
        raise BadInput("--down-since: without --resume; accepted: with it")
    if down_since is not None and not 0 <= down_since < math.inf:
        raise BadInput(f"--down-since: got {down_since:g}; accepted: seconds since 1970")
    from gossamer.config import Experiment
    from gossamer.runtime.processes.security.peers import Peers, parse_address

    try:
        listen_at = None if listen is None else parse_address(listen)
    except ValueError as error:
        raise BadInput(f"--listen: got {listen!r}; accepted: {error}") from None
    experiment = Experiment.load(file, overrides or (), "processes")
    known = Peers.load(peers)
    from gossamer.api import Silent
    from gossamer.deploy.node import run_node
    from gossamer.deploy.watch import JsonLines, NodeLines

    observer: Observer = JsonLines() if as_json else Silent() if quiet else NodeLines()
    done = run_node(
        experiment,
        rank,
        known,
        keys,
        out,
        listen_at=listen_at,
        shape=shape,
        attached=attached,
        run=run,
        resume=resume,
        down_since=down_since,
        observer=observer,
    )
    if as_json:
        typer.echo(json.dumps({"run": str(done.path), "status": done.status}))
    elif not quiet:
        typer.echo(f"{done.status}: {done.path}")


def collect(
    records: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Records of nodes, or folders that they are in.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="RUN", help="The run folder to make.")],
    allow_missing: Annotated[
        bool,
        typer.Option("--allow-missing", help="Exit with 0 also where records are missing or files damaged."),
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Which run's records, where there are those of several."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Put the records of a run's nodes together into one run, which ``gossamer report`` shows like any other. What is there
    is put together though records are missing or files damaged; these are named, and the exit code is 1."""
    log_errors_only(quiet)
    from gossamer.deploy.collect import collect as put_together

    collected = put_together(records, out, run=run)
    _print_collected(collected, quiet=quiet)
    if not (collected.whole or allow_missing):
        raise typer.Exit(1)


def launch(
    file: File,
    hosts: Annotated[Path, typer.Option(metavar="HOSTS", help="The hosts file (docs/deployment.md).")],
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="All nodes' keys; without it, keys are made for this run."),
    ] = None,
    overrides: Overrides = None,
    more: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="PATH", help="Copy this to the hosts too (modules). May be repeated."),
    ] = None,
    out: Out = Path("runs"),
    insecure: Insecure = False,
    shape: Shape = False,
    report: Report = True,
    quiet: Quiet = False,
) -> None:
    """Run an experiment on several machines over ssh: copy what the nodes need, start them, bring their records home.
    Ctrl-C stops all of them in order, a second one at once."""
    log_errors_only(quiet)
    from gossamer.config import Experiment
    from gossamer.deploy.hosts import Hosts

    experiment = Experiment.load(file, overrides or (), "processes")
    machines = Hosts.load(hosts)
    from gossamer.api import Silent
    from gossamer.deploy.launch import launch as run_there
    from gossamer.deploy.watch import RunLines

    collected = run_there(
        experiment,
        machines,
        out,
        keys=keys,
        insecure=insecure,
        shape=shape,
        more=more or (),
        observer=Silent() if quiet else RunLines(experiment.nodes),
    )
    if report:
        from gossamer.results.report import write_report

        write_report([collected.run], collected.run.path / "report.html")
    _print_collected(collected, quiet=quiet)
    if collected.run.status == "stopped":
        raise typer.Exit(INTERRUPTED)


files = typer.Typer(
    help="Write what other programs need to run an experiment on several machines.", no_args_is_help=True
)


@files.command(epilog=EXIT_CODES)
def slurm(
    file: File,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The script; default: <name>.slurm.")
    ] = None,
    directives: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="A further #SBATCH line, e.g. --partition=long."),
    ] = None,
    command: Annotated[str, typer.Option(help="How gossamer is called on the machines.")] = "gossamer",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Of the first node on a machine.")] = 29_600,
) -> None:
    """Write a batch script for Slurm: one task is one node. Keys are made when the job starts."""
    experiment = _deployed(file, overrides)
    from gossamer.deploy.slurm import slurm_script

    place = out or Path(f"{experiment.name}.slurm")
    said = slurm_script(
        experiment,
        file.resolve(),
        overrides=overrides or (),
        directives=tuple(directives or ()),
        command=command,
        port=port,
    )
    place.write_text(said, encoding="utf-8")
    typer.echo(f"{place}: sbatch {shlex.quote(str(place))}")


@files.command(epilog=EXIT_CODES)
def compose(
    file: File,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to make.")],
    overrides: Overrides = None,
    more: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="PATH", help="Put this into the nodes' folder too. May be repeated."),
    ] = None,
    subnet: Annotated[str, typer.Option(help="Of the containers, IPv4.")] = "172.28.0.0/16",
    wheel: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What the containers install, a wheel or sources; default: the source tree that gossamer runs from, if it"
            " does, else its version.",
        ),
    ] = None,
) -> None:
    """Make a folder for Docker Compose: one container is one node, its link shaped like the experiment's network."""
    experiment = _deployed(file, overrides)
    from gossamer.deploy.compose import write_compose

    for path in write_compose(experiment, out, subnet=subnet, more=more or (), wheel=wheel):
        typer.echo(path)
    folder = shlex.quote(str(out))
    typer.echo(f"run it: (cd {folder} && docker compose up --build)")
    typer.echo(f"then:   gossamer collect {shlex.quote(str(out / 'records'))} -o RUN")


@files.command(epilog=EXIT_CODES)
def kollaps(
    file: File,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The topology file to write.")],
    overrides: Overrides = None,
    image: Annotated[str, typer.Option(help="Of the services' containers.")] = "gossamer",
) -> None:
    """Write the experiment's network as a topology file of Kollaps."""
    experiment = _deployed(file, overrides)
    from gossamer.deploy.kollaps import kollaps_xml

    out.write_text(kollaps_xml(experiment, image), encoding="utf-8")
    typer.echo(out)


@files.command(epilog=EXIT_CODES)
def tc(
    file: File,
    peers: Annotated[Path, typer.Option(metavar="PEERS", help="The peers file: where the nodes are.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder of the files.")],
    overrides: Overrides = None,
    device: Annotated[str, typer.Option(help="The machines' network device.")] = "eth0",
) -> None:
    """Write the experiment's network for the kernel's traffic control, a file a node: tc -batch node-0.tc, as root."""
    experiment = _deployed(file, overrides)
    from gossamer.deploy.shaping import write_tc
    from gossamer.runtime.processes.security.peers import Peers

    for path in write_tc(experiment, Peers.load(peers), out, device):
        typer.echo(path)


def _deployed(file: Path, overrides: list[str] | None) -> Experiment:
    """The experiment with its network as it stands in the file, and refused where a deployment can't carry it out."""
    from gossamer.config import Experiment

    experiment = Experiment.load(file, overrides or (), "processes")
    from gossamer.deploy.node import as_deployed

    return as_deployed(experiment, shape=True)


def add_to(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (node, collect, launch):
        app.command(epilog=EXIT_CODES)(command)
    app.add_typer(files, name="deploy")


def _print_collected(collected: Collected, *, quiet: bool) -> None:
    run = collected.run
    if not quiet:
        for rank in collected.missing:
            typer.echo(f"node {rank} has left no record", err=True)
        for rank, how in collected.incomplete.items():
            typer.echo(f"node {rank} {how}", err=True)
        models = [f"model of node {rank} left out: {why}" for rank, why in collected.damaged.items()]
        left_out = [
            f"left out: {file}: {why}"
            for file, why in collected.files.items()
            if file.name != "models.safetensors"
        ]
        for line in (*models, *left_out):
            typer.echo(line, err=True)
        typer.echo(f"{run.outcome}: {run.path}")
    if run.status == "failed":
        raise typer.Exit(1)
