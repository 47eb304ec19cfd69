"""One process of a real deployment: it has nobody over it, and its own record."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from gossamer.api import Silent
from gossamer.config import Experiment, Processes
from gossamer.deploy.record import FILE, NodeRecord
from gossamer.errors import BadInput, RunFailed
from gossamer.learning.memory import keep_freed_memory
from gossamer.messages.tags import Traffic
from gossamer.node import checkpoint
from gossamer.results.closing import close_after, close_record, status_of
from gossamer.results.folder import RunFolder, environment
from gossamer.results.recorder import read_metrics
from gossamer.results.run import Run, load_run
from gossamer.runtime.processes.node_process.environment import Place
from gossamer.runtime.processes.node_process.process import NodeProcess
from gossamer.runtime.processes.node_process.warmup import Stage
from gossamer.runtime.processes.security.peers import Peers
from gossamer.runtime.processes.security.trust import Security, key_file
from gossamer.runtime.processes.standalone.agreement import digest
from gossamer.runtime.processes.standalone.roster import Roster
from gossamer.runtime.processes.standalone.standalone import Past, Standalone
from gossamer.runtime.processes.system.descriptors import raise_descriptor_limit
from gossamer.runtime.processes.system.memory import FINAL, SharedModels
from gossamer.runtime.processes.system.shared_file import shared_file
from gossamer.runtime.processes.transport.transport import listen
from gossamer.runtime.processes.transport.wire import TOKEN_BYTES
from gossamer.runtime.recording import Observer, stopwatch
from gossamer.runtime.setup import Setup, prepare

log = logging.getLogger(__name__)


def run_node(
    experiment: Experiment,
    rank: int,
    peers: Peers,
    keys: str | Path | None,
    out: str | Path = "runs",
    *,
    listen_at: tuple[str, int] | None = None,
    shape: bool = False,
    attached: bool = False,
    run: str = "",
    resume: bool = False,
    down_since: float | None = None,
    observer: Observer | None = None,
) -> Run:
    """Be one node of a run, to its end, and record it.

    Args:
        experiment: what is run, the same at all nodes; under the engine processes, whatever it names.
        rank: which node this is.
        peers: where all nodes are.
        keys: the folder with this node's key, as ``gossamer keys`` makes it; None is no TLS: anybody on the way can read
            and change what the nodes send.
        out: the folder of all runs; this node's record goes to ``<out>/<name>/<id>-node-<rank>/``.
        listen_at: host and port to listen at, where it is not the address that the others dial.
        shape: have the experiment's network delay and limit what is sent, on top of what the real one does.
        attached: end, as if stopped, when standard input ends: whoever started this node is gone.
        run: what this run is called among those of the same experiment and peers, the same at all of its nodes: nodes of
            others are refused.
        resume: go on with this node's newest record of this run in ``out`` that is not done and has a checkpoint, in its
            folder; begin one where there is none.
        down_since: since when no node of the run has lived, seconds since 1970: what has passed since then is none of the
            run's time. The same for all nodes, which are all started again. None: the others may live, and time goes on.
        observer: told of what happens.

    Returns:
        This node's part of the run; :func:`gossamer.deploy.collect.collect` puts the parts together.

    Raises:
        BadInput: if something can't be used; before any work starts.
        RunFailed: if the node failed, lost a peer that the experiment does not do without, or the others were not up in time;
            what was recorded is kept.
    """
    observer = observer or Silent()
    experiment = as_deployed(experiment, peers, shape=shape)
    if not 0 <= rank < experiment.nodes:
        raise BadInput(f"--rank: got {rank}; accepted: 0 to {experiment.nodes - 1}")
    security = None if keys is None else Security(key_file(keys, rank), peers, rank)
    torch.set_num_threads(1)
    keep_freed_memory()
    setup = replace(prepare(experiment), hospitable=True)
    raise_descriptor_limit(setup)
    try:
        listener = listen(*(listen_at or peers.addresses[rank]))
    except OSError as error:
        where = ":".join(map(str, listen_at or peers.addresses[rank]))
        raise BadInput(
            f"node {rank}: {where}: {error.strerror or error}; accepted: an address of this machine that is free"
            " (--listen, where it is not the one that the others dial)"
        ) from None
    said = digest(experiment)
    record = NodeRecord(
        rank=rank, nodes=experiment.nodes, incarnation=int(time.time()), digest=said.hex(), run=run
    )
    with ExitStack() as locks:
        folder = unfinished(record, Path(out) / experiment.name) if resume else None
        past = None
        if folder is not None:
            locks.enter_context(folder.locked())
            record, past = reopen(folder, record, down_since)
        else:
            folder = RunFolder.create(
                Path(out),
                experiment.name,
                experiment=experiment.to_yaml(),
                environment=environment(sys.argv),
                of=f"node-{rank}",
            )
            locks.enter_context(folder.locked())
            folder.write_setup(setup.description())
        record.write(folder)

        def began() -> None:
            record.started(None if past is None else past.time_s).write(folder)
            observer.start(setup.description())

        standalone = Standalone(
            rank,
            setup,
            Roster(rank, experiment.nodes, record.incarnation, said),
            folder,
            observer,
            began=began,
            past=past,
            security=security,
            insecure=security is None,
        )
        token = token_of(peers, said, run)
        process = _Process(rank, setup, standalone, folder, listener, peers, token, attached)
        return _record(process, folder, 0.0 if past is None else past.spent_s())


def unfinished(record: NodeRecord, folder: Path) -> RunFolder | None:
    """The newest record of a node that is not done and has a checkpoint; None where there is none.

    Args:
        record: of that node, in that run.
        folder: where its records are.
    """
    for file in sorted(folder.glob(f"*-node-{record.rank}/{FILE}"), reverse=True):
        found = RunFolder(file.parent)
        try:
            if _goes_on(found, record):
                return found
        except BadInput as error:
            log.warning("a record that can't be gone on with: %s", error)
    return None


def _goes_on(folder: RunFolder, record: NodeRecord) -> bool:
    """Whether a node can go on with a record."""
    before = NodeRecord.read(folder.path)
    return (
        before.same_node(record)
        and before.start_unix_s is not None
        and folder.restart(record.rank).exists()
        and load_run(folder.path).status != "done"
    )


def reopen(folder: RunFolder, record: NodeRecord, down_since: float | None = None) -> tuple[NodeRecord, Past]:
    """The record of a node that goes on in its folder, and what is to be known of what was before. Where the run was down,
    its time goes on from when that began, or from its last row, as soon as all nodes are up: at the same second on all,
    however long each took to start.

    Raises:
        BadInput: for a checkpoint that is damaged; before anything is changed.
    """
    checkpoint.read(folder.restart(record.rank))
    before = NodeRecord.read(folder.path)
    assert before.start_unix_s is not None
    rows = read_metrics(folder.path)
    counters = [field.name for field in fields(Traffic)]
    traffic = rows.select(counters).tail(1).to_dicts()[0] if len(rows) else {}
    for name in ("status.json", "models.safetensors"):
        (folder.path / name).unlink(missing_ok=True)
    start_unix_s, time_s = before.start_unix_s, None
    if down_since is not None:
        now = time.time()
        time_s = max(down_since - start_unix_s, max(rows["time_s"], default=0.0))
        time_s = min(time_s, max(now - start_unix_s, 0.0))
        start_unix_s = now - time_s  # (for now: if not all nodes come up, the next attempt counts from here)
    incarnation = max(record.incarnation, before.incarnation + 1)
    record = record.model_copy(update={"incarnation": incarnation, "start_unix_s": start_unix_s})
    return record, Past(start_unix_s, traffic, time_s)


def token_of(peers: Peers, said: bytes, run: str = "") -> bytes:
    """What the nodes of one run say, and those of others don't; no secret, but for who knows none of its parts.

    Args:
        peers: all nodes; what the file says counts, not how it is written.
        said: the digest of the experiment.
        run: what tells runs of both apart.
    """
    rows = [(row.rank, row.address, row.fingerprint) for row in peers.rows]
    text = json.dumps(["gossamer node", rows, said.hex(), run])
    return hashlib.sha256(text.encode()).digest()[:TOKEN_BYTES]


def as_deployed(experiment: Experiment, peers: Peers | None = None, *, shape: bool = False) -> Experiment:
    """An experiment as the nodes of a deployment carry it out.

    Raises:
        BadInput: for one that needs somebody who sees all nodes, or other nodes than the peers file has.
    """
    changes: dict[str, Any] = {}
    if not isinstance(experiment.engine, Processes):
        changes["engine"] = "processes"
    if not shape:
        changes["network"] = "uniform"  # the real one is what there is
    experiment = experiment.override(**changes) if changes else experiment
    problems = []
    if experiment.stop.target is not None:
        problems.append(
            "stop.target: nobody sees all nodes' metrics here; accepted: stop.rounds or stop.time_s"
        )
    if experiment.evaluation.nodes == "average":
        problems.append("evaluation.nodes: nobody sees all models here; accepted: all, a number, or ranks")
    if experiment.faults:
        problems.append("faults: nobody brings them about here; accepted: none")
    if isinstance(experiment.engine, Processes) and experiment.engine.restart != "never":
        problems.append("engine.restart: nobody starts a node again here; accepted: never")
    if peers is not None and len(peers) != experiment.nodes:
        problems.append(f"nodes: {experiment.nodes}, but the peers file has {len(peers)}; accepted: as many")
    if problems:
        raise BadInput(*problems)
    return experiment


class _Process:
    """The node's process, as it is carried out."""

    def __init__(
        self,
        rank: int,
        setup: Setup,
        standalone: Standalone,
        folder: RunFolder,
        listener: Any,
        peers: Peers,
        token: bytes,
        attached: bool,
    ) -> None:
        self.rank, self.setup, self.standalone, self.folder = rank, setup, standalone, folder
        self._attached = attached
        layout = setup.layout
        memory = shared_file()
        self._models = SharedModels(memory, setup.experiment.nodes, layout.size, layout.buffer_size)
        self._place = Place(
            listener,
            None,
            peers.addresses,
            token,
            memory,
            at_once=1,
            trims=False,
            life=standalone.incarnation,
            oversee=standalone.oversee,
            connect=standalone.connect,
            progress_s=0.0,
        )

    def run(self) -> None:
        """To the end."""
        asyncio.run(self._live())

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        life = asyncio.ensure_future(
            NodeProcess(self.rank, self.setup, self._place, Stage(self.setup), self.folder).live()
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, loop)
        if self._attached:
            loop.add_reader(sys.stdin, self._look_at_input, loop)
        await life

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)  # the second one ends the process at once
        self.standalone.stop()

    def _look_at_input(self, loop: asyncio.AbstractEventLoop) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin)
            self._stop(loop)

    def write_model(self) -> None:
        """This node's model, as it is now in memory: one row."""
        model = self._models.read(FINAL, self.rank)
        self.folder.write_models(model.parameters[None], model.buffers[None] if len(model.buffers) else None)


def _record(process: _Process, folder: RunFolder, before_s: float) -> Run:
    """Be the node, and close its record: its wall time counts from when it first went, ``before_s`` seconds ago."""
    wall = stopwatch(before_s)
    standalone = process.standalone
    try:
        process.run()
    except BaseException as error:
        standalone.close()
        close_after(error, folder, wall_s=wall())
        raise
    standalone.close()
    failure = standalone.failure
    unwritten = close_record(
        folder,
        status_of(standalone.reason),
        None if failure is None else str(failure),
        process.write_model if failure is None else None,
        wall_s=wall(),
    )
    if unwritten is not None:
        failure = failure or RunFailed(f"node {process.rank}: {unwritten}")
    if failure is not None:
        failure.folder = folder.path
        raise failure
    return load_run(folder.path)
