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
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from msgspec import structs

from gossamer import files
from gossamer.config import Experiment, Processes
from gossamer.errors import BadInput, RecordError, RunFailed
from gossamer.fingerprint import own_sources
from gossamer.results.checkpoints import CheckpointFolder, RunCheckpoint, highest
from gossamer.results.folder import (
    RunFolder,
    atomic,
    read_environment,
    record_workers,
    run_id,
    this_computer,
)
from gossamer.results.formatting import ranks_text, some
from gossamer.results.reading import TIMELINE
from gossamer.results.schema import TimelineRow
from gossamer.results.segment import read_segment
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Session, keep_alive
from gossamer.runtime.processes.coordinator.checks import MAX_EVENTS
from gossamer.runtime.processes.coordinator.computers import differing, in_words, new_numerics
from gossamer.runtime.processes.coordinator.listener import WorkerListener
from gossamer.runtime.processes.fork_server import ForkServer
from gossamer.runtime.processes.protocol import Fork, FromProcess, FromWorker, NodeReport, Violation, line
from gossamer.runtime.processes.security import issue
from gossamer.runtime.processes.transport.wire import TOKEN_BYTES
from gossamer.runtime.setup import Setup

WAITING_S = 10.0
"""Seconds before the start after which it is first said who is waited for; then after twice as long, and so on."""
SILENCE_S = 3.0
"""Seconds without a sign of life after which a worker's silence is said, and recorded once it is over."""
SPARE_WORKERS = 256
"""Workers that may join in addition to one for each node."""
CLOSE_S = 5.0
"""Seconds for telling the workers that the run is over."""


class Reminder:
    """Tells when to say again who is waited for: :data:`WAITING_S` after it was made, then after twice as long, and so on."""

    def __init__(self) -> None:
        self.since, self._pause_s = time.monotonic(), WAITING_S
        self._due = self.since + WAITING_S

    def due(self) -> bool:
        now = time.monotonic()
        if now <= self._due:
            return False
        self._pause_s *= 2
        self._due = now + self._pause_s
        return True


@dataclass(eq=False)
class _Worker:
    """A worker that has not been lost."""

    name: str
    slots: int
    session: Session[FromWorker]
    joined_at: float = field(default_factory=time.monotonic)
    doing: str = "loads the experiment"  # until it is ready
    ready: bool = False
    dismissed: bool = False
    away: float | None = None  # since when it has been out of reach
    address: str = ""
    computer: protocol.Computer | None = None
    ranks: set[int] = field(default_factory=set)  # those that it has computed, on record
    new: set[int] = field(default_factory=set)  # further ones that it computes
    heard: int = 0  # what had arrived from it at the last look
    silent_s: float = 0.0  # since then, as far as the coordinator was not busy itself

    @property
    def record(self) -> dict[str, Any]:
        """The worker in ``environment.json``."""
        of_worker = {"worker": self.name, "address": self.address, "ranks": sorted(self.ranks)}
        return {**of_worker, **(self.computer or {})}


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
            case _ if self._closing or worker.dismissed:
                return
            case protocol.Prepared() if not worker.ready:
                self._prepared(worker, message)
            case protocol.Refused() | protocol.Differs() if worker.ready:
                raise Violation(f"{type(message).__name__} after it had prepared the run")
            case protocol.Refused(problems=problems):
                self._refuse(worker, f"can't run the experiment: {'; '.join(problems)}")
            case protocol.Differs(what=what):
                self._refuse(worker, f"has other code or data than the coordinator: {some(what)}")
            case protocol.Leaving():
                self._left(worker)
            case protocol.Preparing(what=what) if worker.doing != what:
                worker.doing = what
                self._say(f"{worker.name} {what}, which may take a minute")
            case NodeReport(rank=rank) if self._at.get(rank) is not worker:
                raise Violation(f"a message of node {rank}, which is not there")
            case NodeReport(rank=rank):
                model = getattr(message.message, "model", None)
                if model is not None and len(model) != self._model_bytes:
                    raise Violation(f"a model of {len(model)} bytes of node {rank}")
                self._emit(message)

    def _prepared(self, worker: _Worker, message: protocol.Prepared) -> None:
        worker.ready = True

    def _left(self, worker: _Worker) -> None:
        """A worker was stopped."""
        raise Violation("that it was stopped")

    def _refuse(self, worker: _Worker, why: str) -> None:
        """Go on without a worker that can't take part, or fail if nothing else can take its place."""
        raise RunFailed(f"{worker.name} {why}")

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
        """Assign a worker to each rank; calls ``wait`` until there are enough workers. RunFailed if there are not in time."""

    def where(self, ranks: Iterable[int]) -> str:
        """Nodes and the workers that have them, in words."""
        at: dict[str, list[int]] = {}
        for rank in ranks:
            at.setdefault(self._at[rank].name, []).append(rank)
        return some([f"{_nodes(ranks)} at {name}" for name, ranks in at.items()])

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
            worker.new |= {command.rank} - worker.ranks
            worker.session.send(self._with_files(command))
        elif (worker := self._at[command.rank]) in self._workers.values():
            worker.session.send(command)

    def _with_files(self, fork: Fork) -> Fork:
        """The command with the data that its worker lacks."""
        return fork

    @abstractmethod
    def look_after(self) -> None:
        """Drop workers that have been silent for too long, and record what has happened to the others."""

    def close(self, reason: str, failure: RunFailed | None = None, faulty: Container[int] = ()) -> None:
        """Tell all workers how the run has ended, within :data:`CLOSE_S` seconds. A worker whose node has failed is told
        that it was the cause, if the node is ``faulty``, not a peer of it."""
        self._closing = True
        how = reason if failure is None else f"{reason}: {failure}"
        node = None if failure is None else failure.node
        cause = self._at.get(node) if node is not None and node in faulty else None
        for worker in self._workers.values():
            worker.session.send(protocol.RunOver(how, str(failure) if worker is cause else ""))
        sessions = [worker.session for worker in self._workers.values()]
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

    def look_after(self) -> None:
        """The end of the fork server is noticed at once."""


class JoinedWorkers(Workers):
    """The workers that join over the network, which get all files and keys that they need. The run starts with at
    least ``min_workers`` workers, once they have slots for all nodes. A worker that is refused may be replaced by others, if
    ``replaceable``, or else by none. ``record`` takes the kind and the text of an event."""

    def __init__(
        self,
        listener: WorkerListener,
        min_workers: int,
        replaceable: bool,
        record: Callable[[str, str], None],
        *arguments: Any,
    ) -> None:
        super().__init__(*arguments)
        self._listener, self._min_workers, self._record_event = listener, min_workers, record
        self._events = 0
        self._silent_s, self._looked_at = self._job.reconnect_s, time.monotonic()
        self._replaceable = replaceable
        self._began = False  # whether each rank has a worker
        self._joined = 0  # workers so far
        self._refused: dict[str, None] = {}  # the refusals on record
        self._told: list[Session[FromWorker]] = []  # with workers that are refused, until they hear it
        self._gone: dict[str, str] = {}  # by session, why a worker is lost
        assert isinstance(self._setup.experiment.engine, Processes)
        self._start_s = self._setup.experiment.engine.start_timeout_s
        self._changed_at = time.monotonic()  # the workers, before the start
        environment = {**this_computer(), "fingerprint": self._setup.fingerprint}
        self._computer: Mapping[str, Any] = environment
        self._known: list[_Worker] = []  # all that were ready at some time
        self._incarnations: dict[int, int] = {}
        self._identities = [issue() for _ in range(self._nodes)]
        text, contents = packed(self._setup.experiment)
        contents["experiment.yaml"] = text.encode()
        contents["environment.json"] = json.dumps({"run": run_id(self._folder.path)}).encode()
        if self._resumed_from is not None:
            contents |= self._file(self._resumed_from.folder / "manifest.json")
        certificates = [identity.certificate for identity in self._identities]
        self._job = structs.replace(
            self._job,
            experiment=text,
            folder=None,
            files=contents,
            certificates=certificates,
            sources=own_sources(),
        )
        listener.open(self._selector, self._admit, partial(self._record, "refused"))

    def _record(self, event: str, text: str) -> None:
        self._events += 1
        if self._events <= MAX_EVENTS:
            self._record_event(event, text)
        elif self._events == MAX_EVENTS + 1:
            self._record_event("left-out", f"only the first {MAX_EVENTS:,} events of workers are recorded")

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
            other = "it belongs to another run, or was out of reach for too long; start it again"
            return self._gone.get(join.session, other)
        end = release()
        keep_alive(end, self._silent_s)
        if worker is None:
            self._joined += 1
            worker = self._new(join.session, f"worker {self._joined} ({host})", join.slots)
            worker.address = host
            if not self._began:
                self._record_join(worker)
        else:
            gone_s = "" if worker.away is None else f", after {time.monotonic() - worker.away:.1f} s"
            self._record("worker-back", f"{worker.name} is back{gone_s}")
        proof = self._listener.proof("coordinator", join.nonce)
        welcome = protocol.Welcome(proof, worker.session.received, time.monotonic())
        try:
            worker.session.attach(end, join.received, welcome)
        except Violation:
            end.close()
            raise
        worker.away, worker.silent_s = None, 0.0
        return None

    def _record_join(self, worker: _Worker) -> None:
        self._record("worker-joined", f"{worker.name} has joined with {_counted(worker.slots, 'slot')}")

    def _refuse(self, worker: _Worker, why: str) -> None:
        if not (self._replaceable or self._began):
            super()._refuse(worker, why)
        # Its connection stays open until it has heard why.
        self._gone[self._session_of(worker)] = f"it {why}"
        del self._workers[self._session_of(worker)]
        worker.session.send(protocol.Dismissed(f"it {why}"))
        worker.dismissed = True
        self._told = [session for session in self._told if session.channel is not None] + [worker.session]
        # A service may start a worker again and again, which is no change.
        if (refusal := f"{worker.address} {why}") not in self._refused:
            self._refused[refusal], self._changed_at = None, time.monotonic()
            self._record("refused", f"{worker.name} is refused: it {why}")

    def _disconnected(self, session_name: str, error: str | None) -> None:
        if self._closing or session_name not in self._workers:
            return
        if error is not None:
            self._lose(session_name, f"is lost: it sent {error}")
        else:
            worker = self._workers[session_name]
            worker.away = time.monotonic()
            self._record("worker-away", f"{worker.name} is out of reach")

    def _left(self, worker: _Worker) -> None:
        self._lose(self._session_of(worker), "was stopped", "worker-stopped")

    def _session_of(self, worker: _Worker) -> str:
        return next(name for name, other in self._workers.items() if other is worker)

    def _lose(self, session_name: str, what: str, event: str = "worker-lost") -> None:
        """A worker is gone for good, and its nodes with it. ``what`` has happened to it."""
        worker = self._workers.pop(session_name)
        worker.session.close()
        text, self._gone[session_name] = f"{worker.name} {what}", f"it {what}"
        self._changed_at = time.monotonic()
        self._record(event, text)
        for rank in sorted(rank for rank, home in self._at.items() if home is worker):
            self._emit(NodeReport(rank, self._incarnations.get(rank, 0), protocol.Exited(text)))

    def look_after(self) -> None:
        self._listener.drop_silent()
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, 1.0), now
        for session_name, worker in list(self._workers.items()):
            if worker.away is not None:
                if now > worker.away + self._silent_s:
                    self._lose(session_name, f"is lost: it was out of reach for {self._silent_s:g} s")
            elif not worker.ready and now > worker.joined_at + self._start_s:
                limit = f"engine.start_timeout_s = {self._start_s:g} s"
                self._refuse(worker, f"was not ready within {limit} after it had joined")
            elif worker.session.heard == worker.heard and worker.ready:
                if worker.silent_s <= SILENCE_S < worker.silent_s + passed_s:
                    self._say(f"{worker.name} has not been heard from for {SILENCE_S:g} s")
                worker.silent_s += passed_s
            else:
                if worker.silent_s > SILENCE_S:
                    text = f"{worker.name} was not heard from for {worker.silent_s:.0f} s"
                    self._record("worker-silent", text)
                worker.heard, worker.silent_s = worker.session.heard, 0.0
        self._announce()

    def close(self, reason: str, failure: RunFailed | None = None, faulty: Container[int] = ()) -> None:
        self._listener.close()
        self._announce()
        super().close(reason, failure, faulty)
        for session in self._told:
            session.close()

    # --- who computes

    def _prepared(self, worker: _Worker, message: protocol.Prepared) -> None:
        super()._prepared(worker, message)
        worker.computer, self._changed_at = message.computer, time.monotonic()
        self._known = sorted([*self._known, worker], key=attrgetter("joined_at"))
        if self._began:
            self._record_join(worker)
        if apart := message.not_compared:
            text = f"read only by {worker.name} or only by the coordinator, so not compared: {some(apart)}"
            self._record("not-compared", text)
        if self._began:
            self._compare([worker])

    def _compare(self, workers: Iterable[_Worker]) -> None:
        """Say and record that workers compute otherwise than the coordinator, or than those of a run that continues."""
        known = [worker.record for worker in workers if worker.computer is not None]
        if (text := differing(self._computer, known)) is not None:
            self._record("machines-differ", text)
        if self._resumed_from is not None:
            recorded = read_environment(self._folder.path)
            before = {**recorded, "resumed": recorded.get("resumed", [])[:-1]}
            if (text := new_numerics(before, known)) is not None:
                self._say(text)

    def _announce(self) -> None:
        """Say and record which nodes have been given to which workers."""
        if not (given := [worker for worker in self._known if worker.new]):
            return
        for worker in given:
            what = "" if worker.computer is None or worker.ranks else f": {in_words(worker.computer)}"
            self._record("placed", f"{worker.name} has {_nodes(worker.new)}{what}")
            worker.ranks |= worker.new
            worker.new.clear()
        record_workers(self._folder.path, [worker.record for worker in self._known if worker.ranks])

    # --- nodes

    def assemble(self, wait: Callable[[], None]) -> None:
        """Each worker gets contiguous ranks, in proportion to its slots."""
        last_text, workers, reminder = "", self._workers, Reminder()
        while (short := self._short()) or self._loading():
            if short and short != last_text:
                slots = -(-self._nodes // self._min_workers)
                join = f"gossamer worker {self._listener.address} --join TOKEN --slots {slots}"
                self._say(f"{short}. Join with: {join}")
                last_text = short
            wait()
            self._check_start(reminder)
        total, before = self._slots(), 0
        for worker in workers.values():
            before += worker.slots
            until = -(-self._nodes * before // total)  # rounded up: never more than its slots
            ranks = range(len(self._at), until)
            self._at |= dict.fromkeys(ranks, worker)
            worker.new.update(ranks)
        self._began = True
        self._announce()
        self._compare(workers.values())

    def _short(self) -> str:
        """How many workers have joined, and what the run needs; empty if there are enough."""
        workers, slots, nodes = len(self._workers), self._slots(), self._nodes
        if workers >= self._min_workers and slots >= nodes:
            return ""
        joined = f"{_counted(workers, 'worker')} with {_counted(slots, 'slot')} {'has' if workers == 1 else 'have'} joined"
        lacking = nodes - slots
        missing = (
            f": {_counted(lacking, 'slot')} {'is' if lacking == 1 else 'are'} missing" if lacking > 0 else ""
        )
        return f"{joined}; needed: {self._min_workers} or more, for {_counted(nodes, 'node')}{missing}"

    def _loading(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if not worker.ready]

    def _check_start(self, reminder: Reminder) -> None:
        """Say from time to time who is waited for, and fail once nothing has changed for ``engine.start_timeout_s``."""
        now = time.monotonic()
        if reminder.due():
            loading = [
                f"{worker.name}, which {worker.doing} (since {now - worker.joined_at:.0f} s)"
                for worker in self._loading()
            ]
            more = [f"further workers (since {now - self._changed_at:.0f} s)"] if self._short() else []
            self._say(f"waiting for {some(loading + more)}")
        if now > self._changed_at + self._start_s and not self._loading():
            limit = f"engine.start_timeout_s = {self._start_s:g} s"
            refused = f"; refused: {some([*self._refused])}" if self._refused else ""
            raise RunFailed(f"no further worker has joined within {limit}: {self._short()}{refused}")

    def _slots(self) -> int:
        return sum(worker.slots for worker in self._workers.values())

    def _with_files(self, fork: Fork) -> Fork:
        """The command with the node's key, and the file from which it resumes."""
        rank, contents = fork.rank, {}
        self._incarnations[rank] = fork.incarnation
        if fork.incarnation == 0 and self._resumed_from is not None and rank in self._resumed_from.rounds:
            contents = self._file(self._resumed_from.path(rank))
        elif fork.incarnation and (path := self._folder.restart(rank)).exists():
            contents = self._file(path)
        return structs.replace(fork, key=self._identities[rank].pem, files=contents)


def _nodes(ranks: Collection[int]) -> str:
    return f"node{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


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
