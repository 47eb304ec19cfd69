"""The workers of a run, as the coordinator sees them: its own process, which forks the nodes itself, or workers that join.

A worker takes commands about nodes, and reports what happens to them. Those of the coordinator's own process are calls; a
worker that joins gets them, and the run's files and keys, over a :class:`~gossamer.runtime.processes.channel.Session`.

A worker that is out of reach keeps its nodes going and what they say; both ends go on with the next connection. After
``failures.detection_s`` it is lost, and its nodes are dead. Nodes that are restarted then go to the worker that has room, in
the order of joining.
"""

from __future__ import annotations

import re
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gossamer import files
from gossamer.config import Experiment
from gossamer.errors import RunFailed
from gossamer.results.checkpoints import CheckpointFolder, Cut, highest
from gossamer.results.folder import RunFolder, atomic, run_id
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import ChannelError, Session, keep_alive
from gossamer.runtime.processes.coordinator.door import Door
from gossamer.runtime.processes.protocol import Addresses, File, Fork, FromWorker, Said
from gossamer.runtime.processes.security import issue
from gossamer.runtime.processes.shared_models import SharedModels
from gossamer.runtime.processes.transport.wire import TOKEN_BYTES
from gossamer.runtime.processes.worker.pool import ProcessPool
from gossamer.runtime.setup import Setup

FAREWELL_S = 5.0
"""Seconds that workers have to hear that the run is over."""


class OwnPool:
    """The coordinator's own process, which forks all nodes."""

    def __init__(self, pool: ProcessPool, nodes: int) -> None:
        self._pool, self._nodes = pool, nodes
        self.do = pool.do

    def assemble(self, wait: Callable[[], None]) -> None:
        self._pool.do(protocol.Listen(list(range(self._nodes))))

    def has_room(self, rank: int) -> bool:
        return True

    def look(self) -> None:
        """There is nobody to be given up."""

    def close(self, reason: str) -> None:
        self._pool.close()


@dataclass(eq=False)
class _Worker:
    """A worker that has joined, and has not been lost."""

    number: int  # in the order of joining, from 1
    host: str
    slots: int
    session: Session[FromWorker]
    ready: bool = False
    away: float | None = None  # since when it has been out of reach

    def __str__(self) -> str:
        return f"worker {self.number} ({self.host})"


class JoinedWorkers:
    """The workers that join at a door. The run starts when there are ``least``, and slots for all nodes.

    ``emit`` takes what nodes and their processes say, ``say`` tells the user something, and ``refused`` records a worker
    that does not know the token. Nodes go on from a checkpoint (``cut``) if there is one.
    """

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        models: SharedModels,
        cut: Cut | None,
        selector: selectors.BaseSelector,
        door: Door,
        least: int,
        emit: Callable[[Said], None],
        say: Callable[[str], None],
        refused: Callable[[str], None],
    ) -> None:
        self._folder, self._models, self._cut, self._selector = folder, models, cut, selector
        self._door, self._least, self._emit, self._say = door, least, emit, say
        self._nodes = setup.experiment.nodes
        self._silent_s = setup.experiment.failures.detection_s
        self._workers: dict[str, _Worker] = {}  # by session, in the order of joining
        self._joined = 0  # workers so far
        self._at: dict[int, _Worker] = {}
        self._incarnations: dict[int, int] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._identities = [issue() for _ in range(self._nodes)]
        self._closing = False
        experiment, self._files = packed(setup.experiment)
        if cut is not None:
            self._files.append(self._file(cut.folder / "manifest.json"))
        self._job = protocol.Job(
            experiment,
            run_id(folder.path),
            CheckpointFolder(folder.checkpoints, setup.experiment).digest,
            highest(folder.checkpoints) + 1,
            secrets.token_bytes(TOKEN_BYTES),
            [identity.certificate for identity in self._identities],
            self._silent_s,
        )
        door.open(selector, self._admit, refused)

    def _file(self, path: Path) -> File:
        data = files.read(path, files.MOST_ROWS_BYTES, self._folder.path, "a checkpoint")
        return File(str(path.relative_to(self._folder.path)), data)

    # --- workers that join

    def _admit(self, said: protocol.Join, host: str, release: Callable[[], socket.socket]) -> str | None:
        worker = self._workers.get(said.session)
        if worker is None and said.received:
            return "it belongs to another run, or was out of reach for too long; start it again"
        end = release()
        keep_alive(end, self._silent_s)
        if worker is None:
            worker = self._new(said.session, host, said.slots)
        else:
            self._say(f"{worker} is back")
        worker.away = None
        own = self._door.proof("coordinator", said.nonce)
        welcome = protocol.Welcome(own, worker.session.received, time.monotonic())
        worker.session.attach(end, said.received, welcome)
        return None

    def _new(self, name: str, host: str, slots: int) -> _Worker:
        session = Session[FromWorker](
            FromWorker,
            self._selector,
            lambda message: self._take(worker, message),
            lambda why: self._disconnected(name, why),
        )
        self._joined += 1
        worker = self._workers[name] = _Worker(self._joined, host, slots, session)
        self._say(f"{worker} has joined with {worker.slots} slots")
        for message in (*self._files, self._job):
            session.send(message)
        return worker

    def _disconnected(self, name: str, error: str | None) -> None:
        if self._closing:
            return
        if error is not None:
            self._lose(name, f"it sent {error}")
        else:
            self._workers[name].away = time.monotonic()
            self._say(f"{self._workers[name]} is out of reach")

    def _lose(self, name: str, why: str) -> None:
        """A worker is gone for good, and its nodes with it."""
        worker = self._workers.pop(name)
        worker.session.close()
        self._say(f"{worker} is lost: {why}")
        for rank in sorted(rank for rank, at in self._at.items() if at is worker):
            exited = protocol.Exited(f"{worker} is lost: {why}")
            self._emit(Said(rank, self._incarnations.get(rank, 0), exited))

    # --- what workers say

    def _take(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case _ if self._closing:
                return
            case protocol.Ready():
                worker.ready = True
            case protocol.Refused(problems=problems):
                raise RunFailed(f"{worker} can't run the experiment: {'; '.join(problems)}")
            case Addresses(nodes=nodes):
                self._addresses |= {rank: (host, port) for rank, host, port in nodes}
                if len(self._addresses) == self._nodes:
                    for each in self._workers.values():
                        each.session.send(self._known())
            case Said(rank=rank) if self._at.get(rank) is worker:
                self._keep(message)
                self._emit(message)

    def _keep(self, said: Said) -> None:
        """Write the files and the model of a node, which may have no others than its own."""
        rank, name = said.rank, rf"node-{said.rank}\.safetensors"
        for path, data in said.files.items():
            if not re.fullmatch(
                rf"(checkpoints/\d+|restart)/{name}|segments/timeline-{rank}-\d+\.jsonl", path
            ):
                raise ChannelError(f"the file {path!r} of node {rank}")
            target = self._folder.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic(target) as temporary:
                temporary.write_bytes(data)
        if said.model is not None:
            slot, data = said.model
            try:
                self._models.write_bytes(slot, rank, data)
            except ValueError as error:
                raise ChannelError(str(error)) from None

    def _known(self) -> Addresses:
        return Addresses([(rank, *address) for rank, address in sorted(self._addresses.items())])

    # --- what the coordinator asks for

    def assemble(self, wait: Callable[[], None]) -> None:
        """Give each rank an address, calling ``wait`` while workers are still to come. Each worker gets contiguous ranks, in
        proportion to its slots."""
        told = ""
        while self._slots() < self._nodes or len(self._workers) < self._least or not self._all_ready():
            said = (
                f"{len(self._workers)} workers with {self._slots()} slots are here; awaited: {self._least} or more,"
                f" for {self._nodes} nodes. Join with: gossamer worker {self._door.address} --join TOKEN"
                f" --slots {-(-self._nodes // self._least)}"
            )
            if said != told:
                self._say(said)
                told = said
            wait()
        total, before, first = self._slots(), 0, 0
        for worker in list(self._workers.values()):
            before += worker.slots
            until = -(-self._nodes * before // total)  # rounded up: never more than its slots
            if until > first:
                self._place(worker, range(first, until))
            first = until
        while len(self._addresses) < self._nodes:
            wait()

    def _slots(self) -> int:
        return sum(worker.slots for worker in self._workers.values())

    def _all_ready(self) -> bool:
        return all(worker.ready for worker in self._workers.values())

    def _place(self, worker: _Worker, ranks: Sequence[int]) -> None:
        self._at |= dict.fromkeys(ranks, worker)
        if self._cut is not None:
            for rank in self._cut.rounds.keys() & set(ranks):
                worker.session.send(self._file(self._cut.path(rank)))
        worker.session.send(self._known())
        worker.session.send(protocol.Listen(list(ranks), [self._identities[rank].pem for rank in ranks]))

    def has_room(self, rank: int) -> bool:
        return self._home(rank) is not None

    def _home(self, rank: int) -> _Worker | None:
        workers = self._workers.values()
        if self._at[rank] in workers:
            return self._at[rank]
        taken = Counter(map(id, self._at.values()))
        return next((each for each in workers if each.ready and taken[id(each)] < each.slots), None)

    def do(self, command: Fork | protocol.Tell | protocol.Signal) -> None:
        if isinstance(command, Fork):
            self._fork(command)
        elif (worker := self._at[command.rank]) in self._workers.values():
            worker.session.send(command)

    def _fork(self, fork: Fork) -> None:
        rank, worker = fork.rank, self._home(fork.rank)
        assert worker is not None, "the lifecycle has asked whether there is room"
        self._incarnations[rank] = fork.incarnation
        path = self._folder.restart(rank)
        if fork.incarnation and path.exists():
            worker.session.send(self._file(path))
        if worker is not self._at[rank]:
            self._place(worker, [rank])
        worker.session.send(fork)

    def look(self) -> None:
        """Give up strangers and workers that have been silent for too long."""
        self._door.look()
        for name, worker in list(self._workers.items()):
            if worker.away is not None and time.monotonic() > worker.away + self._silent_s:
                self._lose(name, f"it was out of reach for {self._silent_s:g} s")

    def close(self, reason: str) -> None:
        """Tell all that the run is over, for which they have a while."""
        self._closing = True
        self._door.close()
        sessions = [worker.session for worker in self._workers.values()]
        for session in sessions:
            session.send(protocol.Finish(reason))
        deadline = time.monotonic() + FAREWELL_S
        while not all(session.settled for session in sessions) and time.monotonic() < deadline:
            for key, events in self._selector.select(0.1):
                key.data(events)
        for session in sessions:
            session.close()


def packed(experiment: Experiment) -> tuple[str, list[File]]:
    """A resolved experiment (YAML) that names files relative to itself, and these files."""
    names: dict[str, str] = {}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if isinstance(value, str) and value.startswith("/") and Path(value).is_file():
            return names.setdefault(value, f"files/{len(names)}-{Path(value).name}")
        return value

    described = experiment.model_dump(mode="json")
    data_root = described.pop("data_root", None)
    text = yaml.safe_dump({**renamed(described), "data_root": data_root}, sort_keys=False, allow_unicode=True)
    return text, [File(name, Path(path).read_bytes()) for path, name in names.items()]
