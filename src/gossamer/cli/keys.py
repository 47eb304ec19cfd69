"""``gossamer keys`` and ``gossamer peers``: who the nodes of a deployment are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.options import Quiet
from gossamer.errors import BadInput


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
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The peers file; default: peers.yaml in the folder. With --rank, others' rows in it stay.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace keys that are there.")] = False,
    quiet: Quiet = False,
) -> None:
    """Make keys: for each node an Ed25519 key and a certificate that it signed itself. Prints the fingerprints."""
    from gossamer.runtime.processes.security.keys import expand_addresses, make_keys
    from gossamer.runtime.processes.security.peers import Peer, fingerprint, read_rows, write_rows

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
    place = output or folder / "peers.yaml"
    adds = bool(addresses) and rank is not None and place.exists()
    others = [row for row in read_rows(place) if row.rank != rank] if adds else []
    made = make_keys(folder, ranks, force=force)
    if addresses:
        rows = [Peer.of(each, at, made[each]) for each, at in zip(ranks, addresses, strict=True)]
        write_rows(place, [*others, *rows])
    for each, certificate in made.items() if not quiet else ():
        typer.echo(f"{each:5} {fingerprint(certificate)}")


def peers(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Peers files, or parts of one.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write one peers file of all.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Check peers files, put them together, and show who is in them."""
    from gossamer.runtime.processes.security.peers import Peers

    merged = Peers.merged(files)
    if output is not None:
        merged.save(output)
    for row in merged.rows if not quiet else ():
        typer.echo(f"{row.rank:5} {row.address:24} {row.fingerprint}")
