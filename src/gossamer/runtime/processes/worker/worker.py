"""``gossamer worker``: joins a coordinator on another machine, and runs nodes for it until the run is over.

A worker that loses its coordinator keeps its nodes going. What they say waits in a file, and goes to the coordinator when it
can be reached again. After the time that the coordinator has named (``failures.detection_s``) the worker ends its nodes and
itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from msgspec import structs

from gossamer import __version__
from gossamer.config import Experiment
from gossamer.errors import BadInput, GossamerError, RunFailed
from gossamer.learning.malloc import keep_freed_memory
from gossamer.results.checkpoints import newest
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import ChannelError, Unpacker, pack
from gossamer.runtime.processes.node_process.computing import Stage, with_data_for_forks
from gossamer.runtime.processes.parts import Assembly, Kind, parts
from gossamer.runtime.processes.protocol import (
    Challenge,
    Dismiss,
    Exited,
    Final,
    Fit,
    Go,
    Hello,
    Job,
    Part,
    PoolEvent,
    Proof,
    Rejected,
    RestartSaved,
    Row,
    Said,
    Saved,
    Tell,
    ToWorker,
    Unfit,
    Welcome,
)
from gossamer.runtime.processes.security.join import NONCE_BYTES, proof, proved
from gossamer.runtime.processes.security.trust import context
from gossamer.runtime.processes.session import LARGEST, Session, Stream
from gossamer.runtime.processes.system.descriptors import raise_descriptor_limit
from gossamer.runtime.processes.system.memory import FINAL, SharedModels
from gossamer.runtime.processes.system.shared_file import shared_file
from gossamer.runtime.processes.worker.pool import Keys, PoolCommand, ProcessPool
from gossamer.runtime.setup import Setup, prepare

log = logging.getLogger("gossamer")

CONNECT_S, HANDSHAKE_S = 1.0, 10.0
"""Seconds in which a connection must be made, and both ends must have proved that they know the token."""
RETRY_S = 0.5
"""Seconds between two attempts to reach the coordinator."""
SILENT_S = 30.0
"""Seconds without an answer after which a connection is given up, before the coordinator has said how many."""
END_S = 10.0
"""Seconds that nodes have to end in order when the coordinator is lost."""


class Turned(GossamerError):
    """The coordinator does not take this worker."""


@dataclass(frozen=True)
class Coordinator:
    """Where a coordinator is, and the token that both know.

    Args:
        host: its name or address.
        port: its port.
        token: of the run.
    """

    host: str
    port: int
    token: str

    def join(self, session: str, slots: int, received: int) -> tuple[Stream, Welcome, bytes]:
        """Connect and prove who we are; gives the connection, the answer, and what has come after it.

        Raises:
            OSError: where it can't be reached.
            Turned: where it does not know the token, or does not take this worker.
        """
        end = socket.create_connection((self.host, self.port), CONNECT_S)
        stream = Stream(end, context(ssl.PROTOCOL_TLS_CLIENT, None, ()), server_side=False, silent_s=SILENT_S)
        try:
            return (stream, *self._greet(stream, session, slots, received))
        except BaseException:
            stream.close()
            raise

    def _greet(self, stream: Stream, session: str, slots: int, received: int) -> tuple[Welcome, bytes]:
        unpacker: Unpacker[Any] = Unpacker(protocol.ToJoining, LARGEST)
        deadline = time.monotonic() + HANDSHAKE_S
        while not stream.secure:
            self._wait(stream, deadline)
            if stream.read() is None:
                raise ConnectionError("the coordinator closed the connection")
        nonce = secrets.token_bytes(NONCE_BYTES)
        stream.write(pack(Hello(__version__, nonce, session)))
        answer = self._answer(stream, unpacker, deadline)
        if not isinstance(answer, Challenge):
            raise Turned(f"{self.host}:{self.port}: {_why(answer)}")
        seen = stream.certificate or b""
        if not proved(answer.proof, proof(self.token, "coordinator", seen, nonce, answer.nonce)):
            # Somebody with another token, or in the middle: it gets no proof from us.
            raise Turned(f"{self.host}:{self.port} does not know the token")
        sent = proof(self.token, "worker", seen, nonce, answer.nonce)
        stream.write(pack(Proof(sent, slots, received)))
        answer = self._answer(stream, unpacker, deadline)
        if not isinstance(answer, Welcome):
            raise Turned(f"{self.host}:{self.port} does not take this worker: {_why(answer)}")
        return answer, unpacker.rest

    def _answer(self, stream: Stream, unpacker: Unpacker[Any], deadline: float) -> Any:
        data: bytes | None = b""
        while True:
            if data is None:
                raise ConnectionError("the coordinator closed the connection")
            try:
                if messages := unpacker.feed(data, 1):
                    return messages[0]
            except ChannelError as error:
                raise Turned(f"{self.host}:{self.port} speaks another language: {error}") from None
            self._wait(stream, deadline)
            data = stream.read()

    @staticmethod
    def _wait(stream: Stream, deadline: float) -> None:
        """Wait until there is something to read, or room to write."""
        with selectors.DefaultSelector() as selector:
            write = selectors.EVENT_WRITE if stream.waiting else 0
            selector.register(stream, selectors.EVENT_READ | write)
            if not selector.select(max(deadline - time.monotonic(), 0.0)):
                raise TimeoutError("the coordinator does not answer")
        stream.flush()


def _why(answer: Any) -> str:
    return answer.why if isinstance(answer, Rejected) else f"unexpected {type(answer).__name__}"


def run_worker(
    coordinator: Coordinator,
    slots: int,
    *,
    address: str | None = None,
    data_root: str | None = None,
    wait_s: float = 60.0,
    say: Callable[[str], None] = log.info,
) -> None:
    """Be a worker until the run is over.

    Args:
        coordinator: which to join.
        slots: how many nodes to take at most.
        address: of this machine, at which nodes listen; None: the one from which the coordinator is reached.
        data_root: where this machine has the data, if not where the experiment says.
        wait_s: seconds for which a coordinator that is not there yet is tried.
        say: tells the user something.

    Raises:
        BadInput: where the experiment can't be run here.
        RunFailed: where the coordinator does not take this worker, can't be reached, or is lost.
    """
    torch.set_num_threads(1)  # before any operation: a fork after one with more threads hangs
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="gossamer-worker-") as folder, _interruptible():
        worker = Worker(coordinator, slots, Path(folder), address, data_root, say)
        try:
            worker.run(wait_s)
        except Turned as error:
            raise RunFailed(str(error)) from None
        finally:
            worker.close()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end the worker as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Worker:
    """One worker; arguments as for :func:`run_worker`, and a folder for its files."""

    def __init__(
        self,
        coordinator: Coordinator,
        slots: int,
        folder: Path,
        address: str | None,
        data_root: str | None,
        say: Callable[[str], None],
    ) -> None:
        self._coordinator, self._slots, self._say = coordinator, slots, say
        self._path, self._address, self._data_root = folder, address, data_root
        self._name = secrets.token_hex(16)
        self._session: Session[ToWorker] = Session(ToWorker, folder / "outbox")
        self._selector = selectors.DefaultSelector()
        self._watched: tuple[Stream, int] | None = None
        self._files = Assembly()
        self._memory = shared_file()
        self._pool: ProcessPool | None = None
        self._models: SharedModels
        self._folder: RunFolder
        self._offset = 0.0  # what is to be added to the coordinator's monotonic clock
        self._reconnect_s = SILENT_S
        self._lost_at: float | None = None
        self._retry_at = 0.0
        self._stopping: float | None = None  # until when nodes have time to end
        self._over: str | None = None

    def run(self, wait_s: float) -> None:
        """Join, and serve until the run is over."""
        self._join_first(time.monotonic() + wait_s)
        while self._over is None:
            for key, events in self._selector.select(0.1):
                if key.fileobj in self._selector.get_map():
                    key.data(events)
            if self._pool is not None:
                self._pool.look()
            if self._lost_at is not None:
                self._do_without()
        if self._over == "lost":
            raise RunFailed(
                f"the coordinator was out of reach for {self._reconnect_s:g} s: this worker's nodes have ended"
            )
        self._say(f"the run is over ({self._over})")

    def close(self) -> None:
        """End all nodes, and the connection."""
        if self._pool is not None:
            self._pool.close()
        if self._watched is not None:
            self._selector.unregister(self._watched[0])
        self._session.close()
        self._selector.close()
        os.close(self._memory)

    # --- the coordinator

    def _join_first(self, deadline: float) -> None:
        told = False
        while True:
            try:
                self._join()
            except OSError as error:
                where = f"{self._coordinator.host}:{self._coordinator.port}"
                if time.monotonic() > deadline:
                    raise RunFailed(f"no coordinator at {where}: {error}") from None
                if not told:
                    told = True
                    self._say(f"waiting for a coordinator at {where} ({error})")
                time.sleep(RETRY_S)
            else:
                self._say(f"has joined {self._coordinator.host}:{self._coordinator.port}")
                return

    def _join(self) -> None:
        stream, welcome, came = self._coordinator.join(self._name, self._slots, self._session.received)
        self._address = self._address or stream.own_host
        self._offset = time.monotonic() - welcome.clock
        self._lost_at = None
        self._unwatch()
        messages = self._session.attach(stream, welcome.received, came)
        self._watch()
        for message in messages:
            self._take(message)

    def _watch(self) -> None:
        stream = self._session.stream
        if stream is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._session.behind else 0)
        if self._watched is None:
            self._selector.register(stream, events, self._serve)
        elif self._watched[1] != events:
            self._selector.modify(stream, events, self._serve)
        self._watched = stream, events

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._selector.unregister(self._watched[0])
            self._watched = None

    def _serve(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._session.flush()
        messages = self._session.read() if events & selectors.EVENT_READ else []
        if messages is None:
            self._unwatch()
            self._session.detach()
            self._lost_at = time.monotonic()
            self._say("the coordinator is out of reach; nodes go on")
            return
        self._watch()
        for message in messages:
            self._take(message)

    def _do_without(self) -> None:
        """Try to reach the coordinator again; in the end, end the nodes in order."""
        now = time.monotonic()
        assert self._lost_at is not None
        if self._stopping is None and now > self._lost_at + self._reconnect_s:
            self._stopping = now + END_S
            if self._pool is not None:
                for rank in list(self._pool.alive):
                    self._pool.do(Tell(rank, protocol.Finish("stopped")))
        if self._stopping is not None:
            if self._pool is None or not self._pool.alive or now > self._stopping:
                self._over = "lost"
        elif now > self._retry_at:
            try:
                self._join()
                self._say("has reached the coordinator again")
            except OSError:
                self._retry_at = time.monotonic() + RETRY_S

    def _send(self, message: protocol.FromWorker) -> None:
        self._session.send(message)
        self._watch()

    # --- what it is told

    def _take(self, message: ToWorker) -> None:
        match message:
            case Part():
                if (data := self._files.take(message)) is not None:
                    self._keep(message, data)
            case Job():
                self._prepare(message)
            case Dismiss(reason=reason):
                self._over = reason
            case Tell(rank=rank, message=Go() as go):
                local = structs.replace(go, start=go.start + self._offset)
                self._do(Tell(rank, local))
            case protocol.Acknowledge():
                """(The session takes these.)"""
            case _:
                self._do(message)

    def _do(self, command: PoolCommand) -> None:
        if self._pool is not None:
            self._pool.do(command)

    def _keep(self, part: Part, data: bytes) -> None:
        """A whole file has come."""
        match part.kind:
            case "experiment":
                path = self._path / "files" / Path(part.name).name
            case "manifest":
                path = self._path / "checkpoints" / str(part.number) / "manifest.json"
            case "checkpoint":
                path = self._path / "checkpoints" / str(part.number) / f"node-{part.rank}.safetensors"
            case "restart":
                path = self._path / "restart" / f"node-{part.rank}.safetensors"
            case _:
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _prepare(self, job: Job) -> None:
        """Load the experiment and its data."""
        self._reconnect_s = job.reconnect_s
        (self._path / "experiment.yaml").write_text(job.experiment, encoding="utf-8")
        try:
            setup = self._setup(job)
            raise_descriptor_limit(setup, channels=min(self._slots, setup.experiment.nodes))
        except BadInput as error:
            self._send(Unfit(list(error.problems)))
            return
        stage = Stage(setup)
        stage.warm_up()
        self._folder = RunFolder.open(self._path)
        experiment = setup.experiment
        self._models = SharedModels(
            self._memory, experiment.nodes, setup.layout.size, setup.layout.buffer_size
        )
        assert self._address is not None
        self._pool = ProcessPool(
            setup,
            self._folder,
            self._memory,
            stage,
            newest(self._folder.checkpoints),
            self._selector,
            self._relay,
            keys=Keys(job.token, tuple(job.certificates)),
            host=self._address,
            checkpoints=(job.digest, job.first_checkpoint),
        )
        self._send(Fit())

    def _setup(self, job: Job) -> Setup:
        raw = yaml.safe_load(job.experiment)
        if self._data_root is not None:
            raw["data_root"] = str(Path(self._data_root).resolve())
        elif raw.get("data_root") is not None and not Path(raw["data_root"]).is_dir():
            raw["data_root"] = None
        return with_data_for_forks(prepare(Experiment.of(raw, self._path)))

    # --- what nodes say

    def _relay(self, event: PoolEvent) -> None:
        """Pass on what happens, after the files and models that belong to it."""
        match event:
            case Said(rank=rank, message=Row(slot=int(slot))):
                self._send_parts("model", rank, slot, self._models.read_bytes(slot, rank))
            case Said(rank=rank, message=Saved(number=number)):
                path = self._folder.checkpoints / str(number) / f"node-{rank}.safetensors"
                self._send_parts("checkpoint", rank, number, path.read_bytes())
                path.unlink()
            case Said(rank=rank, message=RestartSaved()):
                self._send_parts("restart", rank, 0, self._folder.restart(rank).read_bytes())
            case Said(rank=rank, message=Final()):
                self._send_parts("model", rank, FINAL, self._models.read_bytes(FINAL, rank))
                self._send_timeline(rank)
            case Exited(rank=rank):
                self._send_timeline(rank)
        self._send(event)

    def _send_timeline(self, rank: int) -> None:
        path = self._folder.segments / f"timeline-{rank}.jsonl"
        if path.exists():
            self._send_parts("timeline", rank, 0, path.read_bytes())
            path.unlink()

    def _send_parts(self, kind: Kind, rank: int, number: int, data: bytes) -> None:
        for part in parts(kind, rank, number, data):
            self._send(part)
