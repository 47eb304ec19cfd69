"""``gossamer worker``: joins a coordinator on another machine, and runs nodes for it until the run is over.

A worker that loses its coordinator keeps its nodes going. What they say waits, and goes to the coordinator when it can be
reached again. After the time that the coordinator has named (``failures.detection_s``) the worker ends its nodes and itself.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import structs

from gossamer import __version__
from gossamer.config import Experiment
from gossamer.config.experiment import parse_mapping
from gossamer.errors import BadInput, GossamerError, RunFailed
from gossamer.learning.malloc import keep_freed_memory
from gossamer.results.checkpoints import newest
from gossamer.results.folder import RunFolder, write_json
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import (
    LARGEST_STRANGER,
    Channel,
    ChannelError,
    Session,
    keep_alive,
    parse_address,
)
from gossamer.runtime.processes.node_process.host import Stage
from gossamer.runtime.processes.protocol import File, Finish, Job, Refused, Said, Tell, Welcome
from gossamer.runtime.processes.security import NONCE_BYTES, context, proof
from gossamer.runtime.processes.shared_models import FINAL, SharedModels
from gossamer.runtime.processes.system import raise_descriptor_limit, shared_file
from gossamer.runtime.processes.worker.pool import ProcessPool
from gossamer.runtime.setup import prepare

log = logging.getLogger("gossamer")

CONNECT_S, HANDSHAKE_S = 1.0, 10.0
"""Seconds in which a connection must be made, and in which the coordinator must answer while the worker joins."""
RETRY_S = 0.5
"""Seconds between two attempts to reach the coordinator."""
SILENT_S = 30.0
"""Seconds without an answer after which a connection is given up."""


class NotAdmitted(GossamerError):
    """The coordinator does not take this worker."""


def join(address: str, token: str, session: str, slots: int, received: int) -> tuple[ssl.SSLSocket, Welcome]:
    """Connect to a coordinator and prove the token; gives the connection and the answer.

    Raises:
        OSError: if it can't be reached.
        NotAdmitted: if it does not know the token, or does not take this worker.
    """
    end: socket.socket = socket.create_connection(parse_address(address), CONNECT_S)
    try:
        end.settimeout(HANDSHAKE_S)
        end = tls = context(ssl.PROTOCOL_TLS_CLIENT, None, ()).wrap_socket(end)
        channel: Channel[protocol.ToJoining] = Channel(tls, protocol.ToJoining, LARGEST_STRANGER)
        seen, nonce = tls.getpeercert(binary_form=True) or b"", secrets.token_bytes(NONCE_BYTES)
        own = proof(token, "worker", seen, nonce)
        channel.send(protocol.Join(__version__, session, slots, received, nonce, own))
        match channel.receive():
            case None:
                raise ConnectionError("the coordinator closed the connection")
            case Refused(problems=problems):
                raise NotAdmitted(f"{address} does not take this worker: {'; '.join(problems)}")
            case Welcome() as welcome:
                if not hmac.compare_digest(welcome.proof, proof(token, "coordinator", seen, nonce)):
                    raise NotAdmitted(f"{address} does not know the token")
                return tls, welcome
    except ChannelError as error:
        end.close()
        raise NotAdmitted(f"{address} does not speak this version's protocol: {error}") from None
    except BaseException:
        end.close()
        raise


def run_worker(
    coordinator: str,
    token: str,
    slots: int,
    *,
    address: str | None = None,
    data_root: str | None = None,
    wait_s: float = 60.0,
    say: Callable[[str], None] = log.info,
) -> None:
    """Be a worker until the run is over.

    Args:
        coordinator: "host:port" of the coordinator to join.
        token: of the run.
        slots: how many nodes to take at most.
        address: of this machine, at which nodes listen; None: the one from which the coordinator is reached.
        data_root: where this machine has the data, if not where the experiment says.
        wait_s: seconds for which a coordinator that is not there yet is tried.
        say: tells the user something.

    Raises:
        RunFailed: if the coordinator does not take this worker, can't be reached, or is lost.
    """
    torch.set_num_threads(1)  # before any operation: a fork after one with more threads hangs
    keep_freed_memory()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the worker as Ctrl-C does
    with tempfile.TemporaryDirectory(prefix="gossamer-worker-") as folder:
        worker = Worker(coordinator, token, slots, Path(folder), address, data_root, say)
        try:
            worker.run(wait_s)
        except NotAdmitted as error:
            raise RunFailed(str(error)) from None
        finally:
            worker.close()
            signal.signal(signal.SIGTERM, before)


class Worker:
    """One worker; arguments as for :func:`run_worker`, and a folder for its files."""

    def __init__(
        self,
        coordinator: str,
        token: str,
        slots: int,
        folder: Path,
        address: str | None,
        data_root: str | None,
        say: Callable[[str], None],
    ) -> None:
        self._coordinator, self._token, self._slots, self._say = coordinator, token, slots, say
        self._path, self._address, self._data_root = folder, address, data_root
        self._name = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._session: Session[protocol.ToWorker]
        self._session = Session(protocol.ToWorker, self._selector, self._take, self._lose)
        self._memory = shared_file()
        self._pool: ProcessPool | None = None
        self._models: SharedModels
        self._folder: RunFolder
        self._offset = 0.0  # what is to be added to the coordinator's monotonic clock
        self._reconnect_s = SILENT_S
        # While there is no connection: when to try again, until when, and how the run fails then.
        self._retry_at = self._deadline = 0.0
        self._failure = ""
        self._over: str | None = None

    def run(self, wait_s: float) -> None:
        self._deadline = time.monotonic() + wait_s
        self._failure = f"no coordinator at {self._coordinator}"
        while self._over is None:
            if self._session.channel is None and time.monotonic() > self._retry_at:
                self._join()
            for key, events in self._selector.select(0.1):
                key.data(events)
        self._say(f"the run is over ({self._over})")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._session.close()
        self._selector.close()
        os.close(self._memory)

    # --- the coordinator

    def _join(self) -> None:
        """Try to reach the coordinator."""
        received = self._session.received
        try:
            end, welcome = join(self._coordinator, self._token, self._name, self._slots, received)
        except OSError as error:
            if time.monotonic() > self._deadline:
                raise RunFailed(self._failure) from error
            if self._retry_at == 0.0:
                self._say(f"waiting for a coordinator at {self._coordinator} ({error})")
            self._retry_at = time.monotonic() + RETRY_S
            return
        self._say(f"has joined {self._coordinator}")
        keep_alive(end, SILENT_S)
        self._address = self._address or str(end.getsockname()[0])
        self._offset = time.monotonic() - welcome.clock
        self._session.attach(end, welcome.received)

    def _lose(self, error: str | None) -> None:
        if error is not None:  # it would come again on the next connection
            raise RunFailed(f"{self._coordinator} sent {error}")
        self._deadline = time.monotonic() + self._reconnect_s
        lost = f"the coordinator was out of reach for {self._reconnect_s:g} s"
        self._failure = f"{lost}: this worker's nodes have ended"
        self._say("the coordinator is out of reach; nodes go on")

    # --- what it is told

    def _take(self, message: protocol.ToWorker) -> None:
        match message:
            case File():
                self._keep(message)
            case Job():
                self._prepare(message)
            case Finish(reason=reason):
                self._over = reason
            case Tell(rank=rank, message=protocol.Go() as go):
                self._do(Tell(rank, structs.replace(go, start=go.start + self._offset)))
            case protocol.Listen() | protocol.Addresses() | protocol.Fork() | Tell() | protocol.Signal():
                self._do(message)

    def _do(self, command: protocol.ToPool) -> None:
        if self._pool is not None:
            self._pool.do(command)

    def _keep(self, file: File) -> None:
        name = f"node-{file.rank}.safetensors"
        match file.kind:
            case "experiment":
                path = self._path / "files" / Path(file.name).name
            case "manifest":
                path = self._path / "checkpoints" / str(file.number) / "manifest.json"
            case "checkpoint":
                path = self._path / "checkpoints" / str(file.number) / name
            case _:
                path = self._path / "restart" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)

    def _prepare(self, job: Job) -> None:
        self._reconnect_s = job.reconnect_s
        (self._path / "experiment.yaml").write_text(job.experiment, encoding="utf-8")
        write_json(self._path / "environment.json", {"run": job.run})
        raw = parse_mapping(job.experiment, "experiment")
        if self._data_root is not None:
            raw["data_root"] = str(Path(self._data_root).resolve())
        elif raw.get("data_root") is not None and not Path(raw["data_root"]).is_dir():
            raw["data_root"] = None
        try:
            setup = prepare(Experiment.of(raw, self._path))
            raise_descriptor_limit(setup.experiment.nodes)
        except BadInput as error:
            self._session.send(Refused(list(error.problems)))
            return
        stage = Stage(setup)
        stage.warm_up()
        folder = self._folder = RunFolder.open(self._path)
        nodes, layout = setup.experiment.nodes, setup.layout
        self._models = SharedModels(self._memory, nodes, layout.size, layout.buffer_size)
        assert self._address is not None
        cut, selector = newest(folder.checkpoints), self._selector
        self._pool = ProcessPool(
            setup, folder, self._memory, stage, cut, selector, self._relay, job, self._address
        )
        self._session.send(protocol.Ready())

    # --- what nodes say

    def _relay(self, event: protocol.FromPool) -> None:
        """Pass on what happens, after the files and models that belong to it."""
        if isinstance(event, Said):
            self._send_files(event.rank, event.message)
        self._session.send(event)

    def _send_files(self, rank: int, message: protocol.FromProcess) -> None:
        send, folder = self._session.send, self._folder
        match message:
            case protocol.Row(slot=int(slot)):
                send(File("model", rank, slot, self._models.read_bytes(slot, rank)))
            case protocol.Saved(number=None):
                send(File("restart", rank, 0, folder.restart(rank).read_bytes()))
            case protocol.Saved(number=int(number), error=None):
                path = folder.checkpoints / str(number) / f"node-{rank}.safetensors"
                send(File("checkpoint", rank, number, path.read_bytes()))
                path.unlink()
            case protocol.Final():
                send(File("model", rank, FINAL, self._models.read_bytes(FINAL, rank)))
        timeline = folder.segments / f"timeline-{rank}.jsonl"
        if isinstance(message, protocol.Final | protocol.Exited) and timeline.exists():
            send(File("timeline", rank, 0, timeline.read_bytes()))
            timeline.unlink()
