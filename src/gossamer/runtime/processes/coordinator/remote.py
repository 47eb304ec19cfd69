"""Workers on other machines: how they join, get the run's files and keys, are lost and come back.

A worker that is out of reach keeps its nodes going and what they say on disk; both ends go on with the next connection
(:mod:`gossamer.runtime.processes.session`). After ``failures.detection_s``, or as soon as another worker joins in its place,
it is lost, and its nodes are dead. Nodes that are restarted then go to the worker that has room, in the order of joining.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from gossamer import __version__
from gossamer.errors import BadInput
from gossamer.results.checkpoints import CheckpointFolder, Cut, highest
from gossamer.results.folder import RunFolder, atomic
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import ChannelError, Unpacker, pack
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.workers import placed
from gossamer.runtime.processes.parts import Assembly, packed, parts
from gossamer.runtime.processes.protocol import (
    Addresses,
    Challenge,
    Dismiss,
    Exited,
    Fit,
    Fork,
    FromJoining,
    FromWorker,
    Hello,
    Job,
    Listen,
    Listening,
    Part,
    PoolEvent,
    Proof,
    Rejected,
    Said,
    Signal,
    Tell,
    ToNode,
    Unfit,
    Welcome,
)
from gossamer.runtime.processes.security.join import NONCE_BYTES, proof, proved
from gossamer.runtime.processes.security.trust import context, issue
from gossamer.runtime.processes.session import LARGEST_STRANGER, Session, Stream
from gossamer.runtime.processes.system.memory import SharedModels
from gossamer.runtime.processes.transport.wire import TOKEN_BYTES
from gossamer.runtime.setup import Setup

JOIN_S = 10.0
"""Seconds that whoever connects has to prove that it knows the token."""
MOST_JOINING = 64
"""Connections that may be here without having proved it; the oldest makes room."""
FAREWELL_S = 5.0
"""Seconds that workers have to hear that the run is over."""
SAY_S = 10.0
"""Seconds after which it is said again that workers are awaited."""


class Door:
    """Where workers join.

    Args:
        address: "host:port" to listen at.
        token: that workers must know.

    Raises:
        BadInput: for an address that can't be used.
    """

    def __init__(self, address: str, token: str) -> None:
        self.token = token
        host, port = parse_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise BadInput(
                f"--listen {address}: {error.strerror or error}; accepted: an address of this machine that is free"
            ) from None
        self.listener.setblocking(False)
        self.identity = issue()
        self.context = context(ssl.PROTOCOL_TLS_SERVER, self.identity.pem, ())
        self.address = f"{f'[{host}]' if ':' in host else host}:{self.listener.getsockname()[1]}"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 address stands in brackets.

    Raises:
        BadInput: for anything else.
    """
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or int(port) > 65_535 or (":" in host and not bracketed):
        raise BadInput(f"{text!r}; accepted: HOST:PORT, e.g. 10.0.0.1:9000 or [::1]:9000")
    return host.strip("[]"), int(port)


@dataclass(eq=False)
class _Joining:
    """A connection that has not proved that it knows the token."""

    stream: Stream
    deadline: float
    unpacker: Unpacker[FromJoining] = field(default_factory=lambda: Unpacker(FromJoining, LARGEST_STRANGER))
    hello: Hello | None = None
    nonce: bytes = b""


@dataclass(eq=False)
class _Worker:
    """A worker that has joined.

    Args:
        name: of its session.
        number: the how-many-th to join, from 1.
        host: where it is.
        slots: how many nodes it takes.
        session: the conversation with it.
        fit: whether it has prepared the run.
        ranks: of the nodes that it has, or had.
        away: since when it has been out of reach.
        watched: which stream is registered with the selector, and for which events.
    """

    name: str
    number: int
    host: str
    slots: int
    session: Session[FromWorker]
    fit: bool = False
    ranks: set[int] = field(default_factory=set)
    away: float | None = None
    watched: tuple[Stream, int] | None = None
    files: Assembly = field(default_factory=Assembly)

    def __str__(self) -> str:
        return f"worker {self.number} ({self.host})"


class RemoteWorkers:
    """The workers that join.

    Args:
        setup: what is run.
        folder: the run's.
        models: where snapshots of models go.
        cut: the checkpoint from which the run goes on; None is the start.
        door: where they join.
        least: how many must be there before the run starts.
        selector: where connections are waited for; the data of a key is a function to call with the events.
        emit: takes what happens to nodes.
        say: tells the user something.
    """

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        models: SharedModels,
        cut: Cut | None,
        door: Door,
        least: int,
        selector: selectors.BaseSelector,
        emit: Callable[[PoolEvent], None],
        say: Callable[[str], None],
    ) -> None:
        self._setup, self._folder, self._models, self._cut = setup, folder, models, cut
        self._door, self._least, self._selector = door, least, selector
        self._emit, self._say = emit, say
        self._nodes = setup.experiment.nodes
        self._silent_s = setup.experiment.failures.detection_s
        self._joining: dict[_Joining, None] = {}
        self._workers: dict[str, _Worker] = {}  # those that are not lost, in the order of joining
        self._joined = 0
        self._closing = False
        self._gone: set[str] = set()
        self._at: dict[int, _Worker] = {}
        self._incarnations: dict[int, int] = {}
        self._living: set[int] = set()
        self._addresses: dict[int, tuple[str, int]] = {}
        self._pending: dict[int, Fork] = {}  # that wait for the address of their node
        self._identities = [issue() for _ in range(self._nodes)]
        experiment, files = packed(setup.experiment)
        checkpoints = CheckpointFolder(folder.checkpoints, setup.experiment)
        self._files = files
        self._job = Job(
            experiment,
            checkpoints.digest,
            highest(folder.checkpoints) + 1,
            secrets.token_bytes(TOKEN_BYTES),
            [identity.certificate for identity in self._identities],
            self._silent_s,
        )
        selector.register(door.listener, selectors.EVENT_READ, self._accept)

    # --- joining

    def _accept(self, events: int) -> None:
        try:
            end, _ = self._door.listener.accept()
        except OSError:
            return
        stream = Stream(end, self._door.context, server_side=True, silent_s=self._silent_s)
        joining = _Joining(stream, time.monotonic() + JOIN_S)
        self._joining[joining] = None
        self._selector.register(stream, selectors.EVENT_READ, lambda events: self._hear_stranger(joining))
        if len(self._joining) > MOST_JOINING:
            self._refuse(next(iter(self._joining)))

    def _hear_stranger(self, joining: _Joining) -> None:
        data = joining.stream.read()
        try:
            said = None if data is None else joining.unpacker.feed(data)
        except ChannelError:
            said = None
        match said:
            case []:
                return
            case [Hello() as hello] if joining.hello is None and len(hello.nonce) == NONCE_BYTES:
                self._challenge(joining, hello)
            case [Proof() as proven] if joining.hello is not None:
                self._admit(joining, joining.hello, proven)
            case _:
                self._refuse(joining)

    def _challenge(self, joining: _Joining, hello: Hello) -> None:
        joining.hello, joining.nonce = hello, secrets.token_bytes(NONCE_BYTES)
        sent = proof(
            self._door.token, "coordinator", self._door.identity.certificate, hello.nonce, joining.nonce
        )
        joining.stream.write(pack(Challenge(joining.nonce, sent)))

    def _admit(self, joining: _Joining, hello: Hello, said: Proof) -> None:
        certificate = self._door.identity.certificate
        if not proved(said.proof, proof(self._door.token, "worker", certificate, hello.nonce, joining.nonce)):
            self._say(f"a worker at {joining.stream.host} has another token")
            self._refuse(joining, "it has another token")
        elif hello.version != __version__:
            self._refuse(joining, f"it runs gossamer {hello.version}, and the coordinator {__version__}")
        elif hello.session in self._gone:
            self._refuse(joining, "it was out of reach for too long; start it again")
        elif said.slots < 1:
            self._refuse(joining, "it offers no slots")
        else:
            self._let_go(joining)
            worker = self._workers.get(hello.session)
            if worker is None:
                worker = self._new(hello.session, joining.stream.host, said.slots)
                self._attach(worker, joining.stream, said.received)
                self._begin(worker)
            else:
                self._attach(worker, joining.stream, said.received)
                self._say(f"{worker} is back")

    def _new(self, name: str, host: str, slots: int) -> _Worker:
        self._joined += 1
        path = self._folder.path / f".worker-{self._joined}"
        session: Session[FromWorker] = Session(FromWorker, path)
        path.unlink()  # the file goes with its descriptor
        worker = self._workers[name] = _Worker(name, self._joined, host, slots, session)
        return worker

    def _attach(self, worker: _Worker, stream: Stream, received: int) -> None:
        self._unwatch(worker)
        stream.write(pack(Welcome(worker.session.received, time.monotonic())))
        worker.session.attach(stream, received)
        worker.away = None
        self._watch(worker)

    def _begin(self, worker: _Worker) -> None:
        """Send a new worker what it has to prepare."""
        send = worker.session.send
        for part in self._files:
            send(part)
        if self._cut is not None:
            send(
                next(
                    iter(
                        parts(
                            "manifest", 0, self._cut.number, (self._cut.folder / "manifest.json").read_bytes()
                        )
                    )
                )
            )
        send(self._job)
        self._watch(worker)
        self._say(f"{worker} has joined with {worker.slots} slots")
        for other in list(self._workers.values()):
            if other.away is not None:
                self._lose(other, "another worker has joined in its place")

    def _let_go(self, joining: _Joining) -> None:
        self._selector.unregister(joining.stream)
        self._joining.pop(joining, None)

    def _refuse(self, joining: _Joining, why: str | None = None) -> None:
        self._let_go(joining)
        if why is not None:
            joining.stream.write(pack(Rejected(why)))
        joining.stream.close()

    # --- the conversation with a worker

    def _watch(self, worker: _Worker) -> None:
        """Have the selector wait for what its connection waits for."""
        stream = worker.session.stream
        if stream is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.session.behind else 0)
        if worker.watched is None:
            self._selector.register(stream, events, lambda events: self._serve(worker, events))
        elif worker.watched[1] != events:
            self._selector.modify(stream, events, lambda events: self._serve(worker, events))
        worker.watched = stream, events

    def _unwatch(self, worker: _Worker) -> None:
        if worker.watched is not None:
            self._selector.unregister(worker.watched[0])
            worker.watched = None

    def _send(self, worker: _Worker, message: protocol.Message) -> None:
        worker.session.send(message)
        self._watch(worker)

    def _serve(self, worker: _Worker, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                worker.session.flush()
            messages = worker.session.read() if events & selectors.EVENT_READ else []
            for message in messages or () if not self._closing else ():
                self._take(worker, message)
        except ChannelError as error:
            self._lose(worker, f"it sent {error}")
            return
        if messages is None:
            self._unwatch(worker)
            worker.session.detach()
            worker.away = time.monotonic()
            self._say(f"{worker} is out of reach")
            return
        self._watch(worker)

    def _take(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case Fit():
                worker.fit = True
            case Unfit(problems=problems):
                raise Ended("failed", message=f"{worker} can't run the experiment: {'; '.join(problems)}")
            case Listening(nodes=nodes):
                self._learn(worker, nodes)
            case Part():
                if (data := worker.files.take(message)) is not None and message.rank in worker.ranks:
                    self._keep(message, data)
            case Said(rank=rank) | Exited(rank=rank):
                if self._at.get(rank) is worker and self._incarnations.get(rank) == message.incarnation:
                    if isinstance(message, Exited):
                        self._living.discard(rank)
                    self._emit(message)
            case protocol.NotForked(rank=rank):
                self._living.discard(rank)
                self._emit(message)
            case protocol.Stood():
                self._emit(message)

    def _keep(self, part: Part, data: bytes) -> None:
        """A whole file or model has come."""
        match part.kind:
            case "model":
                try:
                    self._models.write_bytes(part.number, part.rank, data)
                except ValueError as error:
                    raise ChannelError(str(error)) from None
                return
            case "checkpoint":
                path = self._folder.checkpoints / str(part.number) / f"node-{part.rank}.safetensors"
            case "restart":
                path = self._folder.restart(part.rank)
            case "timeline":
                path = self._folder.segments / f"timeline-{part.rank}-{self._incarnations[part.rank]}.jsonl"
            case _:
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            temporary.write_bytes(data)

    def _lose(self, worker: _Worker, why: str) -> None:
        """A worker is gone for good, and its nodes with it."""
        self._unwatch(worker)
        worker.session.close()
        self._workers.pop(worker.name, None)
        self._gone.add(worker.name)
        self._say(f"{worker} is lost: {why}")
        dead = sorted(rank for rank in self._living if self._at[rank] is worker)
        self._living -= set(dead)
        for rank in dead:
            self._emit(Exited(rank, self._incarnations[rank], f"{worker} is lost: {why}"))

    # --- what the coordinator asks for

    def assemble(self, ranks: Collection[int], wait: Callable[[], None]) -> None:
        """Wait until enough workers are ready, and give each rank an address."""
        told = 0.0
        while not self._enough():
            if time.monotonic() > told + SAY_S:
                told = time.monotonic()
                self._say(self._awaited())
            wait()
            self.look()
        fit = {name: worker.slots for name, worker in self._workers.items() if worker.fit}
        for name, own in placed(self._nodes, fit).items():
            if own:
                self._place(self._workers[name], own)
        while len(self._addresses) < self._nodes:
            wait()
            self.look()
            if lost := [worker for worker in self._at.values() if worker.name not in self._workers]:
                raise Ended("failed", message=f"{lost[0]} was lost before the run started")

    def _enough(self) -> bool:
        """Whether there are workers enough, and all that have joined are ready."""
        workers = self._workers.values()
        slots = sum(worker.slots for worker in workers)
        return len(workers) >= self._least and slots >= self._nodes and all(worker.fit for worker in workers)

    def _awaited(self) -> str:
        slots = sum(worker.slots for worker in self._workers.values())
        here = f"{len(self._workers)} workers with {slots} slots are here"
        if len(self._workers) >= self._least and slots >= self._nodes:
            return f"{here}, and prepare the run"
        each = -(-self._nodes // self._least)
        return (
            f"{here}; awaited: {self._least} or more, for {self._nodes} nodes. Join with:"
            f" gossamer worker {self._door.address} --join {self._door.token} --slots {each}"
        )

    def _place(self, worker: _Worker, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._at[rank] = worker
            if self._cut is not None and rank in self._cut.rounds:
                name = f"node-{rank}.safetensors"
                data = (self._cut.folder / name).read_bytes()
                worker.session.send_all(list(parts("checkpoint", rank, self._cut.number, data)))
        worker.ranks |= set(ranks)
        self._send(worker, Listen(list(ranks)))

    def _learn(self, worker: _Worker, nodes: Sequence[tuple[int, str, int]]) -> None:
        """A worker has opened ports."""
        self._addresses |= {rank: (host, port) for rank, host, port in nodes}
        if len(self._addresses) < self._nodes:
            return
        first = not self._living and not self._pending
        known = (
            sorted(self._addresses.items()) if first else [(rank, (host, port)) for rank, host, port in nodes]
        )
        news = Addresses([(rank, host, port) for rank, (host, port) in known])
        for other in list(self._workers.values()):
            if other is worker and not first:
                everything = sorted(self._addresses.items())
                self._send(other, Addresses([(rank, host, port) for rank, (host, port) in everything]))
            else:
                self._send(other, news)
        for rank, *_ in nodes:
            if (fork := self._pending.pop(rank, None)) is not None:
                self._send(self._at[rank], fork)

    def has_room(self, rank: int) -> bool:
        """Whether a node can be started now: its worker is there, or another one has a free slot."""
        return self._home(rank) is not None

    def _home(self, rank: int) -> _Worker | None:
        if self._at[rank].name in self._workers:
            return self._at[rank]
        return next((each for each in self._workers.values() if each.fit and self._room(each)), None)

    def fork(self, rank: int, incarnation: int, crashes: Sequence[int], wait_s: float) -> None:
        """Start a node."""
        fork = Fork(rank, incarnation, list(crashes), wait_s, self._identities[rank].pem)
        worker = self._home(rank)
        assert worker is not None, "whoever starts a node has asked whether there is room"
        self._incarnations[rank] = incarnation
        self._living.add(rank)
        path = self._folder.restart(rank)
        if incarnation and path.exists():
            worker.session.send_all(list(parts("restart", rank, 0, path.read_bytes())))
        if worker is self._at[rank]:
            self._send(worker, fork)
        else:
            self._pending[rank] = fork
            self._place(worker, [rank])

    def _room(self, worker: _Worker) -> bool:
        taken = sum(1 for rank in worker.ranks if self._at[rank] is worker)
        return taken < worker.slots

    def tell(self, rank: int, message: ToNode) -> None:
        """Send a node a message."""
        if rank in self._living:
            self._send(self._at[rank], Tell(rank, message))

    def signal(self, rank: int, number: int) -> None:
        """Send a node's process a signal."""
        if rank in self._living:
            self._send(self._at[rank], Signal(rank, number))

    def look(self) -> None:
        """Give up workers that have been out of reach for too long, and strangers."""
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.away is not None and now > worker.away + self._silent_s:
                self._lose(worker, f"it was out of reach for {self._silent_s:g} s")
        for joining in [each for each in self._joining if now > each.deadline]:
            self._refuse(joining)

    def close(self, reason: str) -> None:
        """Tell all workers that the run is over, and wait a while until they know."""
        self._closing = True
        for worker in self._workers.values():
            self._send(worker, Dismiss(reason))
        deadline = time.monotonic() + FAREWELL_S
        while any(self._unsettled(worker) for worker in self._workers.values()):
            if time.monotonic() > deadline:
                break
            for key, events in self._selector.select(0.1):
                if key.fileobj in [worker.session.stream for worker in self._workers.values()]:
                    key.data(events)
        for worker in self._workers.values():
            self._unwatch(worker)
            worker.session.close()
        self._selector.unregister(self._door.listener)
        self._door.listener.close()

    @staticmethod
    def _unsettled(worker: _Worker) -> bool:
        return worker.session.stream is not None and not worker.session.settled
