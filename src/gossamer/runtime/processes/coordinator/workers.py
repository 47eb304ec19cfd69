"""The workers of a run, as the coordinator sees them: its own process, which forks the nodes itself, or workers that join.

A worker takes commands about nodes, and reports what happens to them (``protocol``: coordinator -> worker, and back). The
commands and events of the coordinator's own process are calls; a worker that joins gets them, and the run's files and keys,
over a :class:`~gossamer.runtime.processes.channel.Session`.

A worker that is out of reach keeps its nodes going and what they say; both ends go on with the next connection. After
``failures.detection_s``, or as soon as another worker joins in its place, it is lost, and its nodes are dead. Nodes that are
restarted then go to the worker that has room, in the order of joining.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from gossamer.runtime.processes.protocol import Addresses, File, Fork, FromPool, FromWorker, Said
from gossamer.runtime.processes.security import issue
from gossamer.runtime.processes.shared_models import SharedModels
from gossamer.runtime.processes.transport.wire import TOKEN_BYTES
from gossamer.runtime.processes.worker.pool import ProcessPool
from gossamer.runtime.setup import Setup

FAREWELL_S = 5.0
"""Seconds that workers have to hear that the run is over."""
SAY_S = 10.0
"""Seconds after which it is said again that workers are awaited."""


@dataclass(eq=False)
class _Worker:
    """A worker that has not been lost."""

    number: int  # in the order of joining, from 1
    host: str
    slots: int
    send: Callable[[Any], object]
    session: Session[FromWorker] | None = None  # None for the coordinator's own process
    ready: bool = False
    ranks: set[int] = field(default_factory=set)  # of the nodes that it has, or had
    away: float | None = None  # since when it has been out of reach

    def __str__(self) -> str:
        return f"worker {self.number} ({self.host})"


class Workers:
    """The processes that fork a run's nodes, or go on with them from a checkpoint (``cut``).

    ``emit`` takes what nodes and their processes say, ``say`` tells the user something, and ``refused`` records a worker
    that does not know the token.
    """

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        models: SharedModels,
        cut: Cut | None,
        selector: selectors.BaseSelector,
        emit: Callable[[Said], None],
        say: Callable[[str], None],
        refused: Callable[[str], None],
    ) -> None:
        self._setup, self._folder, self._models, self._cut = setup, folder, models, cut
        self._selector, self._emit, self._say, self._refused = selector, emit, say, refused
        self._nodes = setup.experiment.nodes
        self._silent_s = setup.experiment.failures.detection_s
        self._pool: ProcessPool | None = None
        self._door: Door | None = None
        self._least = 1
        self._workers: dict[str, _Worker] = {}  # by session, in the order of joining
        self._joined = 0  # workers so far
        self._at: dict[int, _Worker] = {}
        self._incarnations: dict[int, int] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._keys: list[bytes] = []
        self._closing = False

    def fork_here(self, pool: Callable[[Callable[[FromPool], None]], ProcessPool]) -> None:
        self._pool = pool(lambda event: self._take(worker, event))
        worker = self._workers[""] = _Worker(0, "here", self._nodes, self._pool.do, ready=True)

    def let_join(self, door: Door, least: int) -> None:
        """Let workers join; the run starts when there are ``least``, and slots for all nodes."""
        self._door, self._least = door, least
        identities = [issue() for _ in range(self._nodes)]
        self._keys = [identity.pem for identity in identities]
        experiment, self._files = packed(self._setup.experiment)
        if self._cut is not None:
            manifest = files.read(self._cut.folder / "manifest.json", root=self._folder.path)
            self._files.append(File("manifest", 0, self._cut.number, manifest))
        self._job = protocol.Job(
            experiment,
            run_id(self._folder.path),
            CheckpointFolder(self._folder.checkpoints, self._setup.experiment).digest,
            highest(self._folder.checkpoints) + 1,
            secrets.token_bytes(TOKEN_BYTES),
            [identity.certificate for identity in identities],
            self._silent_s,
        )
        door.open(self._selector, self._admit, self._refused)

    # --- workers that join

    def _admit(self, said: protocol.Join, host: str, release: Callable[[], socket.socket]) -> str | None:
        worker = self._workers.get(said.session)
        if worker is None and said.received:
            return "it belongs to another run, or was out of reach for too long; start it again"
        if said.slots < 1:
            return "it offers no slots"
        end = release()
        keep_alive(end, self._silent_s)
        if worker is None:
            worker = self._new(said.session, host, said.slots)
        else:
            self._say(f"{worker} is back")
        worker.away = None
        assert worker.session is not None
        assert self._door is not None
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
        for other in [other for other, each in self._workers.items() if each.away is not None]:
            self._lose(other, "another worker has joined in its place")
        self._joined += 1
        worker = self._workers[name] = _Worker(self._joined, host, slots, session.send, session)
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
        if worker.session is not None:
            worker.session.close()
        self._say(f"{worker} is lost: {why}")
        for rank in sorted(rank for rank in worker.ranks if self._at[rank] is worker):
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
                self._learn(nodes)
            case File(rank=rank) if rank in worker.ranks:
                self._keep(message)
            case Said(rank=rank) if self._at.get(rank) is worker:
                self._emit(message)

    def _keep(self, file: File) -> None:
        match file.kind:
            case "model":
                try:
                    self._models.write_bytes(file.number, file.rank, file.data)
                except ValueError as error:
                    raise ChannelError(str(error)) from None
                return
            case "checkpoint":
                path = self._folder.checkpoints / str(file.number) / f"node-{file.rank}.safetensors"
            case "restart":
                path = self._folder.restart(file.rank)
            case "timeline":
                number = self._incarnations.get(file.rank, 0)
                path = self._folder.segments / f"timeline-{file.rank}-{number}.jsonl"
            case _:
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            temporary.write_bytes(file.data)

    def _learn(self, nodes: Sequence[tuple[int, str, int]]) -> None:
        """A worker has opened ports: as soon as all nodes have one, all workers are told."""
        self._addresses |= {rank: (host, port) for rank, host, port in nodes}
        if len(self._addresses) == self._nodes:
            for worker in self._workers.values():
                worker.send(self._known())

    def _known(self) -> Addresses:
        return Addresses([(rank, *address) for rank, address in sorted(self._addresses.items())])

    # --- what the coordinator asks for

    def assemble(self, wait: Callable[[], None]) -> None:
        """Give each rank an address, calling ``wait`` while workers are still to come."""
        told = 0.0
        while not (self._has_slots() and all(worker.ready for worker in self._workers.values())):
            if time.monotonic() > told + SAY_S:
                told = time.monotonic()
                self._say(self._awaited())
            wait()
        slots = {name: worker.slots for name, worker in self._workers.items()}
        for name, own in placed(self._nodes, slots).items():
            if own:
                self._place(self._workers[name], own)
        while len(self._addresses) < self._nodes:
            wait()

    def _has_slots(self) -> bool:
        slots = sum(worker.slots for worker in self._workers.values())
        return len(self._workers) >= self._least and slots >= self._nodes

    def _awaited(self) -> str:
        """Which workers the run waits for, in words."""
        assert self._door is not None
        slots = sum(worker.slots for worker in self._workers.values())
        here = f"{len(self._workers)} workers with {slots} slots are here"
        if self._has_slots():
            return f"{here}, and prepare the run"
        each = -(-self._nodes // self._least)
        return (
            f"{here}; awaited: {self._least} or more, for {self._nodes} nodes. Join with:"
            f" gossamer worker {self._door.address} --join TOKEN --slots {each}"
        )

    def _place(self, worker: _Worker, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._at[rank] = worker
            if worker.session is not None and self._cut is not None and rank in self._cut.rounds:
                worker.send(File("checkpoint", rank, self._cut.number, self._bytes(self._cut.path(rank))))
        worker.ranks |= set(ranks)
        worker.send(self._known())
        worker.send(protocol.Listen(list(ranks), [self._keys[rank] for rank in ranks] if self._keys else []))

    def _bytes(self, path: Path) -> bytes:
        return files.read(path, files.MOST_ROWS_BYTES, self._folder.path, "a checkpoint")

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
            worker.send(command)

    def _fork(self, fork: Fork) -> None:
        rank, worker = fork.rank, self._home(fork.rank)
        assert worker is not None, "the lifecycle has asked whether there is room"
        self._incarnations[rank] = fork.incarnation
        path = self._folder.restart(rank)
        if worker.session is not None and fork.incarnation and path.exists():
            worker.send(File("restart", rank, 0, self._bytes(path)))
        if worker is not self._at[rank]:
            self._place(worker, [rank])
        worker.send(fork)

    def look(self) -> None:
        """Give up strangers and workers that have been silent for too long."""
        if self._door is not None:
            self._door.look()
        for name, worker in list(self._workers.items()):
            if worker.away is not None and time.monotonic() > worker.away + self._silent_s:
                self._lose(name, f"it was out of reach for {self._silent_s:g} s")

    def close(self, reason: str) -> None:
        """End all nodes; workers that have joined have a while to hear that the run is over."""
        self._closing = True
        if self._pool is not None:
            self._pool.close()
        if self._door is None:
            return
        self._door.close()
        sessions = [worker.session for worker in self._workers.values() if worker.session is not None]
        for session in sessions:
            session.send(protocol.Finish(reason))
        deadline = time.monotonic() + FAREWELL_S
        while not all(session.settled for session in sessions) and time.monotonic() < deadline:
            time.sleep(0.01)
            for channel in [session.channel for session in sessions if session.channel is not None]:
                channel.write()
                channel.read()
        for session in sessions:
            session.close()


def placed(nodes: int, slots: Mapping[str, int]) -> dict[str, list[int]]:
    """Which ranks each worker gets: contiguous ones, in the order of the workers, in proportion to their slots (which are
    at least as many as nodes together)."""
    total, before, given, ranks = sum(slots.values()), 0, 0, {}
    for name, count in slots.items():
        before += count
        until = -(-nodes * before // total)  # rounded up: never more than its slots
        ranks[name] = list(range(given, until))
        given = until
    return ranks


def packed(experiment: Experiment) -> tuple[str, list[File]]:
    """A resolved experiment (YAML) that names files relative to itself, and these files."""
    files: dict[str, str] = {}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if isinstance(value, str) and value.startswith("/") and Path(value).is_file():
            return files.setdefault(value, f"files/{len(files)}-{Path(value).name}")
        return value

    described = experiment.model_dump(mode="json")
    data_root = described.pop("data_root", None)
    text = yaml.safe_dump({**renamed(described), "data_root": data_root}, sort_keys=False, allow_unicode=True)
    return text, [File("experiment", 0, 0, Path(path).read_bytes(), name) for path, name in files.items()]
