"""The workers of a run, as the coordinator sees them: the fork server on its machine, or workers that join.

A worker takes commands about nodes, and reports what happens to them, over a
:class:`~gossamer.runtime.processes.channel.Session`. One that joins also gets the run's files and keys.

A worker that is out of reach keeps its nodes running and stores their messages. Both ends continue on the
next connection. After ``failures.detection_s`` the worker is lost, and its nodes are dead. Restarted nodes go
to the first worker with room, in the order of joining."""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from msgspec import structs

from gossamer import files
from gossamer.config import Experiment, Processes
from gossamer.errors import BadInput, RecordError, RunFailed
from gossamer.results.checkpoints import CheckpointFolder, RunCheckpoint, highest
from gossamer.results.folder import RunFolder, atomic, run_id
from gossamer.results.formatting import some
from gossamer.results.reading import TIMELINE
from gossamer.results.schema import TimelineRow
from gossamer.results.segment import read_segment
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Session, keep_alive
from gossamer.runtime.processes.coordinator.listener import WorkerListener
from gossamer.runtime.processes.fork_server import ForkServer
from gossamer.runtime.processes.protocol import Fork, FromProcess, FromWorker, NodeReport, Violation, line
from gossamer.runtime.processes.security import issue
from gossamer.runtime.processes.transport.wire import TOKEN_BYTES
from gossamer.runtime.setup import Setup

SPARE_WORKERS = 256
"""Workers that may join in addition to one for each node."""
CLOSE_S = 5.0
"""Seconds for telling the workers that the run is over."""


@dataclass(eq=False)
class _Worker:
    """A worker that has not been lost."""

    name: str
    slots: int
    session: Session[FromWorker]
    joined_at: float = field(default_factory=time.monotonic)
    ready: bool = False
    away: float | None = None  # since when it has been out of reach


class Workers(ABC):
    """The workers of one run. ``emit`` takes messages from nodes and about their processes. ``say`` shows text to
    the user. Nodes resume from ``checkpoint``, if given."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        checkpoint: RunCheckpoint | None,
        selector: selectors.BaseSelector,
        emit: Callable[[NodeReport], None],
        say: Callable[[str], None],
    ) -> None:
        self._setup, self._folder, self._resumed_from, self._selector = setup, folder, checkpoint, selector
        self._emit, self._say = emit, say
        self._nodes = setup.experiment.nodes
        self._model_bytes = 4 * (setup.layout.size + setup.layout.buffer_size)
        self._workers: dict[str, _Worker] = {}  # by session, in the order of joining
        self._at: dict[int, _Worker] = {}
        self._closing = False
        self._job = protocol.Job(
            experiment=setup.experiment.to_yaml(),
            trainer=setup.trainer,
            folder=str(folder.path),
            files={},
            checkpoint=None if checkpoint is None else checkpoint.number,
            next_checkpoint=highest(folder.checkpoints) + 1,
            digest=CheckpointFolder(folder.checkpoints, setup.experiment).digest,
            token=secrets.token_bytes(TOKEN_BYTES),
            certificates=[],
            reconnect_s=setup.experiment.failures.detection_s,
            fingerprint=setup.fingerprint,
        )

    def _new(self, session_name: str, text: str, slots: int) -> _Worker:
        session = Session[FromWorker](
            FromWorker,
            self._selector,
            lambda message: self._take(worker, message),
            lambda error: self._disconnected(session_name, error),
        )
        worker = self._workers[session_name] = _Worker(text, slots, session)
        session.send(self._job)
        return worker

    @abstractmethod
    def _disconnected(self, session_name: str, error: str | None) -> None:
        """A connection has ended; ``error`` describes the invalid message that was the cause, if any."""

    def _take(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case _ if self._closing:
                return
            case protocol.Prepared():
                worker.ready = True
            case protocol.Refused() | protocol.Differs() if worker.ready:
                raise Violation(f"{type(message).__name__} after it had prepared the run")
            case protocol.Refused(problems=problems):
                raise RunFailed(f"{worker.name} can't run the experiment: {'; '.join(problems)}")
            case protocol.Differs(what=what):
                self._refuse(worker, f"it has other code or data than the coordinator: {some(what)}")
            case NodeReport(rank=rank) if self._at.get(rank) is not worker:
                raise Violation(f"a message of node {rank}, which is not there")
            case NodeReport(rank=rank):
                model = getattr(message.message, "model", None)
                if model is not None and len(model) != self._model_bytes:
                    raise Violation(f"a model of {len(model)} bytes of node {rank}")
                self._emit(message)

    def _refuse(self, worker: _Worker, why: str) -> None:
        """Go on without a worker that can't take part."""
        raise RunFailed(f"{worker.name} can't run the experiment: {why}")

    def keep(self, report: NodeReport) -> FromProcess:
        """Write the files that belong to a node's message. Returns the message, with the error if a checkpoint file can't
        be written."""
        rank, accepted = report.rank, ""
        match report.message:
            case protocol.FinalModel() | protocol.Exited():
                accepted = f"segments/timeline-{rank}-{report.incarnation}.jsonl"
            case protocol.Saved(number=None):
                accepted = f"restart/node-{rank}.safetensors"
            case protocol.Saved(number=number, error=None):
                accepted = f"checkpoints/{number}/node-{rank}.safetensors"
        for path, data in report.files.items():
            if path != accepted:
                raise Violation(f"the file {line(repr(path))} of node {rank}")
            target = self._folder.path / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic(target) as temporary:
                    temporary.write_bytes(data)
                    if not isinstance(report.message, protocol.Saved):
                        self._check_timeline(rank, temporary)
            except OSError as error:
                if not isinstance(saved := report.message, protocol.Saved):
                    raise RecordError(target, error) from error
                return _unwritten(saved, error)
        return report.message

    def _check_timeline(self, rank: int, path: Path) -> None:
        """Refuse a timeline that could not be read at the end of the run, or is not of node ``rank``."""
        options = self._setup.experiment.evaluation.timeline
        ranks = () if options is None else options.ranks(self._nodes)
        most = files.MAX_VALUES // (len(TIMELINE) * max(len(ranks), 1)) if rank in ranks else 0
        try:
            for number, row in enumerate(read_segment(path, run_id(self._folder.path), path.parent), 1):
                if files.conforming(row, TimelineRow, f"row {number}")["node"] != rank or number > most:
                    raise BadInput(
                        f"row {number}, of node {row['node']}; accepted: {most:,} rows of node {rank}"
                    )
        except BadInput as error:
            raise Violation(f"a timeline of node {rank} that can't be read: {line(str(error))}") from None

    # --- requests of the coordinator

    @abstractmethod
    def assemble(self, wait: Callable[[], None]) -> None:
        """Assign a worker to each rank; calls ``wait`` until there are enough workers. RunFailed if one that has joined
        is silent."""

    def has_room(self, rank: int) -> bool:
        return self._worker_of(rank) is not None

    def _worker_of(self, rank: int) -> _Worker | None:
        workers = self._workers.values()
        if self._at[rank] in workers:
            return self._at[rank]
        used = Counter(map(id, self._at.values()))
        return next((worker for worker in workers if worker.ready and used[id(worker)] < worker.slots), None)

    def do(self, command: protocol.ToPool) -> None:
        if isinstance(command, Fork):
            worker = self._worker_of(command.rank)
            assert worker is not None, "the lifecycle has checked that there is room"
            self._at[command.rank] = worker
            worker.session.send(self._with_files(command))
        elif (worker := self._at[command.rank]) in self._workers.values():
            worker.session.send(command)

    def _with_files(self, fork: Fork) -> Fork:
        """The command with the data that its worker lacks."""
        return fork

    @abstractmethod
    def drop_silent(self) -> None:
        """Drop workers that have been silent for too long."""

    def close(self, reason: str) -> None:
        """Tell all workers that the run is over, within :data:`CLOSE_S` seconds."""
        self._closing = True
        sessions = [worker.session for worker in self._workers.values()]
        for session in sessions:
            session.send(protocol.Finish(reason))
        deadline = time.monotonic() + CLOSE_S
        while not all(session.settled for session in sessions) and time.monotonic() < deadline:
            for key, events in self._selector.select(0.1):
                key.data(events)
        for session in sessions:
            session.close()


class LocalWorker(Workers):
    """The fork server, which runs all nodes."""

    def __init__(self, server: ForkServer, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._server = server
        self._new("", "the fork server", self._nodes).session.attach(server.begin(), 0)

    def _disconnected(self, session_name: str, error: str | None) -> None:
        if self._closing:
            return
        if error is not None:
            raise RunFailed(f"the fork server sent {error}")
        raise RunFailed(f"the fork server died: {self._server.how_it_died()}")

    def assemble(self, wait: Callable[[], None]) -> None:
        [worker] = self._workers.values()
        while not worker.ready:
            wait()
        self._at = dict.fromkeys(range(self._nodes), worker)

    def drop_silent(self) -> None:
        """The end of the fork server is noticed at once."""


class JoinedWorkers(Workers):
    """The workers that join over the network, which get all files and keys that they need. The run starts with at
    least ``min_workers`` workers, once they have slots for all nodes. ``refused`` records a worker that does not
    know the token, or has other code or data."""

    def __init__(
        self, listener: WorkerListener, min_workers: int, refused: Callable[[str], None], *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self._listener, self._min_workers, self._refused = listener, min_workers, refused
        self._silent_s = self._job.reconnect_s
        self._joined = 0  # workers so far
        self._incarnations: dict[int, int] = {}
        self._identities = [issue() for _ in range(self._nodes)]
        text, contents = packed(self._setup.experiment)
        contents["experiment.yaml"] = text.encode()
        contents["environment.json"] = json.dumps({"run": run_id(self._folder.path)}).encode()
        if self._resumed_from is not None:
            contents |= self._file(self._resumed_from.folder / "manifest.json")
        certificates = [identity.certificate for identity in self._identities]
        self._job = structs.replace(
            self._job, experiment=text, folder=None, files=contents, certificates=certificates
        )
        listener.open(self._selector, self._admit, refused)

    def _file(self, path: Path) -> dict[str, bytes]:
        data = files.read(path, files.MAX_ROWS_BYTES, self._folder.path, "a checkpoint")
        return {str(path.relative_to(self._folder.path)): data}

    # --- joining and losing workers

    def _admit(
        self, join: protocol.JoinRequest, host: str, release: Callable[[], socket.socket]
    ) -> str | None:
        worker = self._workers.get(join.session)
        if worker is None and len(self._workers) >= self._nodes + SPARE_WORKERS:
            return f"{len(self._workers)} workers have joined, for {_counted(self._nodes, 'node')}"
        if worker is None and join.received:
            return "it belongs to another run, or was out of reach for too long; start it again"
        end = release()
        keep_alive(end, self._silent_s)
        if worker is None:
            self._joined += 1
            worker = self._new(join.session, f"worker {self._joined} ({host})", join.slots)
            self._say(f"{worker.name} has joined with {_counted(worker.slots, 'slot')}")
        else:
            self._say(f"{worker.name} is back")
        proof = self._listener.proof("coordinator", join.nonce)
        welcome = protocol.Welcome(proof, worker.session.received, time.monotonic())
        try:
            worker.session.attach(end, join.received, welcome)
        except Violation:
            end.close()
            raise
        worker.away = None
        return None

    def _refuse(self, worker: _Worker, why: str) -> None:
        # Its connection stays open until it has heard that its message has arrived.
        del self._workers[next(name for name, other in self._workers.items() if other is worker)]
        self._refused(f"{worker.name} is refused: {why}")

    def _disconnected(self, session_name: str, error: str | None) -> None:
        if self._closing or session_name not in self._workers:
            return
        if error is not None:
            self._lose(session_name, f"it sent {error}")
        else:
            worker = self._workers[session_name]
            worker.away = time.monotonic()
            self._say(f"{worker.name} is out of reach")

    def _lose(self, session_name: str, why: str) -> None:
        """A worker is gone for good, and its nodes with it."""
        worker = self._workers.pop(session_name)
        worker.session.close()
        text = f"{worker.name} is lost: {why}"
        self._say(text)
        for rank in sorted(rank for rank, home in self._at.items() if home is worker):
            self._emit(NodeReport(rank, self._incarnations.get(rank, 0), protocol.Exited(text)))

    def drop_silent(self) -> None:
        """Drop strangers and workers that have been silent for too long."""
        self._listener.drop_silent()
        for session_name, worker in list(self._workers.items()):
            if worker.away is not None and time.monotonic() > worker.away + self._silent_s:
                self._lose(session_name, f"it was out of reach for {self._silent_s:g} s")

    def close(self, reason: str) -> None:
        self._listener.close()
        super().close(reason)

    # --- nodes

    def assemble(self, wait: Callable[[], None]) -> None:
        """Each worker gets contiguous ranks, in proportion to its slots."""
        last_text, workers = "", self._workers
        while self._slots() < self._nodes or len(workers) < self._min_workers or not self._all_ready():
            have = "has" if len(workers) == 1 else "have"
            text = (
                f"{_counted(len(workers), 'worker')} with {_counted(self._slots(), 'slot')} {have} joined; needed:"
                f" {self._min_workers} or more, for {_counted(self._nodes, 'node')}. Join with:"
                f" gossamer worker {self._listener.address} --join TOKEN --slots {-(-self._nodes // self._min_workers)}"
            )
            if text != last_text:
                self._say(text)
                last_text = text
            wait()
            self._check_silence()
        total, before = self._slots(), 0
        for worker in workers.values():
            before += worker.slots
            until = -(-self._nodes * before // total)  # rounded up: never more than its slots
            self._at |= dict.fromkeys(range(len(self._at), until), worker)

    def _check_silence(self) -> None:
        assert isinstance(self._setup.experiment.engine, Processes)
        longest_s = self._setup.experiment.engine.start_timeout_s
        for worker in self._workers.values():
            if not worker.ready and time.monotonic() > worker.joined_at + longest_s:
                raise RunFailed(
                    f"{worker.name} was not ready within engine.start_timeout_s = {longest_s:g} s after it had joined"
                )

    def _slots(self) -> int:
        return sum(worker.slots for worker in self._workers.values())

    def _all_ready(self) -> bool:
        return all(worker.ready for worker in self._workers.values())

    def _with_files(self, fork: Fork) -> Fork:
        """The command with the node's key, and the file from which it resumes."""
        rank, contents = fork.rank, {}
        self._incarnations[rank] = fork.incarnation
        if fork.incarnation == 0 and self._resumed_from is not None and rank in self._resumed_from.rounds:
            contents = self._file(self._resumed_from.path(rank))
        elif fork.incarnation and (path := self._folder.restart(rank)).exists():
            contents = self._file(path)
        return structs.replace(fork, key=self._identities[rank].pem, files=contents)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def packed(experiment: Experiment) -> tuple[str, dict[str, bytes]]:
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
    return text, {name: Path(path).read_bytes() for path, name in names.items()}


def _unwritten(saved: protocol.Saved, error: OSError) -> protocol.Saved | protocol.Event:
    """The report of a node whose checkpoint file could not be written."""
    if saved.number is None:
        return protocol.Event("checkpoint", f"its checkpoint could not be written: {error}")
    return structs.replace(saved, error=str(error))
