"""``gossamer worker``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.options import Quiet, importing, interruptible, log_errors_only


def worker(
    coordinator: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where gossamer run --listen waits for workers.")
    ],
    token: Annotated[
        str,
        typer.Option("--join", metavar="TOKEN", envvar="GOSSAMER_TOKEN", help="The token of the run."),
    ],
    slots: Annotated[
        int | None, typer.Option(min=1, help="Nodes to take at most; default: as many as there are cores.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="This machine's address for other nodes; default: the one that reaches HOST."),
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Where this machine has the data, if not where the experiment says.")
    ] = None,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Seconds to wait for a coordinator that is not there yet.")
    ] = 60.0,
    quiet: Quiet = False,
) -> None:
    """Join a run and carry out some of its nodes, until it is over."""
    log_errors_only(quiet)
    from gossamer.runtime.processes.channel import parse_address
    from gossamer.runtime.processes.security import check_token

    parse_address(coordinator, "HOST:PORT")
    check_token(token)
    with importing():
        from gossamer.cores import cores
        from gossamer.runtime.processes.worker.worker import run_worker

    with interruptible():
        run_worker(
            coordinator,
            token,
            slots or cores(),
            address=address,
            data_root=None if data_root is None else str(data_root),
            wait_s=wait_s,
            say=logging.getLogger("gossamer").info,
        )
