"""A worker runs nodes for a coordinator until the run is over: the fork server, or ``gossamer worker`` on
another machine.

A worker on another machine that loses its coordinator keeps its nodes running. It stores their messages, and
sends them when it reaches the coordinator again. After ``failures.detection_s`` without the coordinator, the
worker ends its nodes and itself."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from gossamer.config import Experiment
from gossamer.config.experiment import parse_mapping
from gossamer.errors import BadInput, RunFailed
from gossamer.fingerprint import differences
from gossamer.learning.malloc import keep_freed_memory
from gossamer.results.folder import RunFolder
from gossamer.results.formatting import some
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import (
    LARGEST_STRANGER,
    Channel,
    Session,
    keep_alive,
    parse_address,
)
from gossamer.runtime.processes.node_process.host import ComputeResources
from gossamer.runtime.processes.protocol import (
    Finish,
    Fork,
    Job,
    NodeReport,
    Refused,
    Tell,
    Violation,
    Welcome,
)
from gossamer.runtime.processes.security import NONCE_BYTES, context, proof
from gossamer.runtime.processes.system import check_supported, raise_descriptor_limit
from gossamer.runtime.processes.worker.pool import ProcessPool
from gossamer.runtime.setup import prepare
from gossamer.version import __version__

log = logging.getLogger("gossamer")

CONNECT_S, HANDSHAKE_S = 1.0, 10.0
"""Timeouts, in seconds, for connecting and for the coordinator's answer to a worker that joins."""
RETRY_S = 0.5
"""Seconds between two attempts to reach the coordinator."""
SILENT_S = 30.0
"""Seconds without an answer after which a connection is dropped, until the job sets them
(``failures.detection_s``)."""

_PREFIX, _LOCK = "gossamer-worker-", ".lock"
"""How the names of workers' temporary folders begin, and the locked file in each."""


def join(address: str, token: str, session: str, slots: int, received: int) -> tuple[ssl.SSLSocket, Welcome]:
    """Connect to a coordinator and prove knowledge of the token. Returns the connection and the answer. Raises
    OSError if it can't be reached, and RunFailed if it does not know the token or refuses this worker."""
    end: socket.socket = socket.create_connection(parse_address(address), CONNECT_S)
    try:
        end.settimeout(HANDSHAKE_S)
        end = tls = context(ssl.PROTOCOL_TLS_CLIENT, None, ()).wrap_socket(end)
        channel: Channel[protocol.ToJoining] = Channel(tls, protocol.ToJoining, LARGEST_STRANGER)
        certificate, nonce = tls.getpeercert(binary_form=True) or b"", secrets.token_bytes(NONCE_BYTES)
        request_proof = proof(token, "worker", certificate, nonce)
        channel.send(protocol.JoinRequest(__version__, session, slots, received, nonce, request_proof))
        match channel.receive():
            case None:
                raise ConnectionError("the coordinator closed the connection")
            case Refused(problems=problems):
                raise RunFailed(f"{address} refuses this worker: {'; '.join(problems)}")
            case Welcome() as welcome:
                if not hmac.compare_digest(welcome.proof, proof(token, "coordinator", certificate, nonce)):
                    raise RunFailed(f"{address} does not know the token")
                return tls, welcome
    except BaseException as error:
        end.close()
        if isinstance(error, Violation):
            raise RunFailed(f"{address} does not speak this version's protocol: {error}") from None
        raise


class Worker:
    """Prepares a coordinator's job, lets a pool execute its commands, and relays the nodes' messages."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # before any operation: a fork after a multi-threaded one hangs
        keep_freed_memory()
        self._selector = selectors.DefaultSelector()
        self._session: Session[protocol.ToWorker]
        self._session = Session(protocol.ToWorker, self._selector, self._take, self._lose)
        self._pool: ProcessPool | None = None
        self._host = "127.0.0.1"
        self._over: str | None = None
        self._differs: list[str] = []  # what differs from the coordinator's code and data

    def attach(self, end: socket.socket, received: int = 0) -> None:
        """Continue on this connection to the coordinator, which has received ``received`` messages."""
        self._session.attach(end, received)

    def serve(self) -> None:
        for key, events in self._selector.select(0.1):
            key.data(events)

    def run(self) -> None:
        while self._over is None:
            self.serve()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._session.close()
        self._selector.close()

    def _lose(self, error: str | None) -> None:
        self._over = "the coordinator is gone"

    def _take(self, message: protocol.ToWorker) -> None:
        match message:
            case Job():
                self._prepare(message)
            case Finish(reason=reason):
                self._over = reason
            case protocol.Fork() | protocol.Tell() | protocol.Signal() if self._pool is not None:
                self._pool.do(message)

    def _prepare(self, job: Job) -> None:
        folder = self._folder(job)
        try:
            setup = prepare(Experiment.of(self._experiment(job), folder), job.trainer)
            raise_descriptor_limit(setup.experiment.nodes)
        except BadInput as error:
            self._session.send(Refused(list(error.problems)))
            return
        if job.fingerprint is not None and (what := differences(job.fingerprint, setup.fingerprint)):
            self._differs = what
            self._session.send(protocol.Differs(what))
            return
        resources = ComputeResources(setup)
        resources.warm_up()
        run = RunFolder.open(folder)
        self._pool = ProcessPool(setup, run, resources, job, self._selector, self._relay, self._host)
        self._session.send(protocol.Prepared())

    def _folder(self, job: Job) -> Path:
        assert job.folder is not None, "the coordinator is on this machine"
        return Path(job.folder)

    def _experiment(self, job: Job) -> dict[str, Any]:
        return parse_mapping(job.experiment, "experiment")

    def _relay(self, report: NodeReport) -> None:
        self._session.send(report)


def serve(end: int) -> None:
    """Run the worker of the coordinator at the other end of a socket, if the experiment can be read here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker, connection = Worker(), socket.socket(fileno=end)
    channel: Channel[protocol.Check] = Channel(connection, protocol.Check)
    if (check := channel.receive()) is None:
        return
    try:
        Experiment.parse(check.experiment)
    except BadInput as error:
        channel.send(Refused(list(error.problems)))
        return
    channel.send(protocol.Prepared())
    worker.attach(connection)
    worker.run()
    worker.close()


# --- on another machine


def run_worker(
    coordinator: str,
    token: str,
    slots: int,
    *,
    address: str | None = None,
    data_root: str | None = None,
    wait_s: float = 60.0,
) -> None:
    """Run a worker of the coordinator at "host:port" until the run is over.

    At most ``slots`` nodes run here, and listen at ``address`` (None: the one from which the coordinator is
    reached). ``data_root`` replaces the experiment's. The worker waits for the coordinator for ``wait_s``
    seconds.

    Raises:
        RunFailed: if the coordinator refuses this worker, can't be reached, or is lost.
    """
    check_supported()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the worker as Ctrl-C does
    remove_abandoned_folders()
    with own_folder() as folder:
        worker = JoinedWorker(coordinator, token, slots, folder, address, data_root, wait_s)
        try:
            worker.run()
        finally:
            worker.close()
            signal.signal(signal.SIGTERM, before)


@contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary folder for a worker, removed at the end. It has a lock, which the system releases when the
    worker and its nodes have ended, however they end."""
    import fcntl

    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, Path(folder, "unlocked").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(lock.name).rename(Path(folder, _LOCK))  # so no other process sees it unlocked before the end
        yield Path(folder)


def remove_abandoned_folders() -> None:
    """Remove the folders of this user's workers that were killed."""
    import fcntl

    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        # OSError: the worker still runs, or the folder is being removed or can't be read.
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                with path.open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent)


class JoinedWorker(Worker):
    """A worker that joins from another machine; arguments as for :func:`run_worker`, and a folder for
    files."""

    def __init__(
        self,
        coordinator: str,
        token: str,
        slots: int,
        folder: Path,
        address: str | None = None,
        data_root: str | None = None,
        wait_s: float = 0.0,
    ) -> None:
        super().__init__()
        self._coordinator, self._token, self._slots = coordinator, token, slots
        self._path, self._address, self._data_root = folder, address, data_root
        self._name = secrets.token_hex(16)
        self._offset = 0.0  # this machine's monotonic clock minus the coordinator's
        self._reconnect_s = SILENT_S
        self._end: socket.socket | None = None  # the newest connection to the coordinator
        # While there is no connection: when to try again, and until when.
        self._retry_at, self._deadline = 0.0, time.monotonic() + wait_s

    def run(self) -> None:
        while self._over is None and not (self._differs and self._session.settled):
            if self._session.channel is None and time.monotonic() > self._retry_at:
                self._join()
            self.serve()
        if self._differs:
            raise RunFailed(
                f"{self._coordinator} refuses this worker, which has other code or data: {some(self._differs)}"
            )
        log.info("the run is over (%s)", self._over)

    def _join(self) -> None:
        """Try to reach the coordinator."""
        received = self._session.received
        try:
            end, welcome = join(self._coordinator, self._token, self._name, self._slots, received)
        except OSError as error:
            if time.monotonic() > self._deadline and received:
                lost = f"the coordinator was out of reach for {self._reconnect_s:g} s"
                raise RunFailed(f"{lost}: this worker's nodes have ended") from error
            if time.monotonic() > self._deadline:
                raise RunFailed(f"no coordinator at {self._coordinator}") from error
            if self._retry_at == 0.0:
                log.info("waiting for a coordinator at %s (%s)", self._coordinator, error)
            self._retry_at = time.monotonic() + RETRY_S
            return
        log.info("joined %s", self._coordinator)
        self._end = end
        keep_alive(end, self._reconnect_s)
        self._host = self._address or str(end.getsockname()[0])
        self._offset = time.monotonic() - welcome.clock
        self.attach(end, welcome.received)

    def _lose(self, error: str | None) -> None:
        if error is not None:  # the same message would be sent again on the next connection
            raise RunFailed(f"{self._coordinator} sent {error}")
        self._deadline = time.monotonic() + self._reconnect_s
        log.info("the coordinator is out of reach; nodes continue")

    def _take(self, message: protocol.ToWorker) -> None:
        if isinstance(message, Fork):
            self._keep(message.files)
        elif isinstance(message, Tell) and isinstance(message.message, protocol.Go):
            start = message.message.start + self._offset
            message = Tell(message.rank, structs.replace(message.message, start=start))
        super()._take(message)

    def _keep(self, files: Mapping[str, bytes]) -> None:
        for path, data in files.items():
            target = (self._path / path).resolve()
            if not target.is_relative_to(self._path.resolve()):
                raise Violation(f"the file {path!r}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def _folder(self, job: Job) -> Path:
        self._reconnect_s = job.reconnect_s
        assert self._end is not None, "the job came over it"
        keep_alive(self._end, self._reconnect_s)
        self._keep(job.files)
        return self._path

    def _experiment(self, job: Job) -> dict[str, Any]:
        raw = super()._experiment(job)
        if self._data_root is not None:
            raw["data_root"] = str(Path(self._data_root).resolve())
        elif raw.get("data_root") is not None and not Path(raw["data_root"]).is_dir():
            raw["data_root"] = None
        return raw

    def _relay(self, report: NodeReport) -> None:
        """Relay a message with the files that belong to it."""
        rank, file = report.rank, f"node-{report.rank}.safetensors"
        timeline = {f"segments/timeline-{rank}-{report.incarnation}.jsonl": f"segments/timeline-{rank}.jsonl"}
        paths: dict[str, str] = {}  # path at the coordinator -> path on this machine
        match report.message:
            case protocol.FinalModel() | protocol.Exited():
                paths = timeline
            case protocol.Saved(number=None):
                paths = {f"restart/{file}": f"restart/{file}"}
            case protocol.Saved(number=int(number), error=None):
                paths = {f"checkpoints/{number}/{file}": f"checkpoints/{number}/{file}"}
        files = {}
        for remote, local in paths.items():
            if (path := self._path / local).exists():
                files[remote] = path.read_bytes()
                path.unlink()
        super()._relay(structs.replace(report, files=files))
