"""The pool of a worker's nodes: each node's process is a fork of this one, and has a channel to it."""

from __future__ import annotations

import gc
import os
import secrets
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from gossamer.config import Processes
from gossamer.cores import cores
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel, SelectorChannel
from gossamer.runtime.processes.node_process.host import NodeContext, Stage
from gossamer.runtime.processes.node_process.process import main as node_main
from gossamer.runtime.processes.protocol import Addresses, Fork, FromNode, Said, ToNode
from gossamer.runtime.processes.security import Security
from gossamer.runtime.processes.system import close_all_but, describe_exit, die_with, wakeup
from gossamer.runtime.processes.transport.transport import listen
from gossamer.runtime.processes.transport.wire import TOKEN_BYTES
from gossamer.runtime.setup import Setup


@dataclass(eq=False)
class _Child:
    pid: int
    channel: SelectorChannel[FromNode]


class ProcessPool:
    """Carries out the commands of a coordinator about nodes of this machine, and tells it (``emit``) what becomes of them.

    ``memory`` is the descriptor of the file that all processes of this machine share; ``cut`` is the checkpoint from which
    nodes go on; ``job`` says what the nodes of all machines share, and is None if all are on this one, and talk without TLS.
    """

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        memory: int,
        stage: Stage,
        cut: Cut | None,
        selector: selectors.BaseSelector,
        emit: Callable[[protocol.FromPool], None],
        job: protocol.Job | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        assert isinstance(setup.experiment.engine, Processes)
        self._setup, self._folder, self._memory, self._stage = setup, folder, memory, stage
        self._cut, self._selector, self._emit = cut, selector, emit
        self._host = host
        self._token = secrets.token_bytes(TOKEN_BYTES) if job is None else job.token
        self._certificates = [] if job is None else job.certificates
        self._checkpoints = None if job is None else (job.digest, job.first_checkpoint)
        self._keys: dict[int, bytes] = {}
        self._at_once = setup.experiment.engine.train_at_once or cores()
        self._wakeup = wakeup()
        self._stopped: set[int] = set()  # ranks whose process was stopped, perhaps in a CPU slot
        self._children: dict[int, _Child] = {}
        self._addresses: list[tuple[str, int]] = [("127.0.0.1", 0)] * setup.experiment.nodes
        self._listeners: dict[int, socket.socket] = {}  # of nodes that have no process
        self._frozen = False

    def do(self, command: protocol.ToPool) -> None:
        match command:
            case protocol.Listen(ranks=ranks, keys=keys):
                self._keys |= zip(ranks, keys, strict=False)
                self._try(ranks[0], 0, lambda: self._listen(ranks))
            case Addresses(nodes=nodes):
                self._learn(nodes)
            case Fork(rank=rank, incarnation=incarnation):
                self._try(rank, incarnation, lambda: self._fork(command))
            case protocol.Tell(rank=rank, message=message) if rank in self._children:
                self._children[rank].channel.send(message)  # one that was stopped reads it when it goes on
            case protocol.Signal(rank=rank, number=number) if rank in self._children:
                os.kill(self._children[rank].pid, number)
                self._count_slots(rank, stopped=number == signal.SIGSTOP)

    # --- starting

    def _try(self, rank: int, incarnation: int, start: Callable[[], None]) -> None:
        try:
            start()
        except OSError as error:  # there is no port, or no process (see ulimit -u)
            how = f"it can't be started: {error.strerror}"
            self._emit(Said(rank, incarnation, protocol.Exited(how)))

    def _listen(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._listeners[rank] = listen(self._host)
        opened = [(rank, *self._listeners[rank].getsockname()[:2]) for rank in ranks]
        self._learn(opened)
        self._emit(Addresses(opened))

    def _learn(self, nodes: Iterable[tuple[int, str, int]]) -> None:
        moved = [each for each in nodes if self._addresses[each[0]] != each[1:]]
        for rank, host, port in moved:
            self._addresses[rank] = host, port
        if moved:
            self._tell_all(Addresses(moved))

    def _tell_all(self, message: ToNode) -> None:
        for child in self._children.values():
            child.channel.send(message)

    def _fork(self, fork: Fork) -> None:
        if not self._frozen:
            self._frozen = True
            gc.collect()
            gc.freeze()  # so that the collector does not write to, and so copy, what all share
        rank, parent = fork.rank, os.getpid()
        if rank not in self._listeners:
            self._listen([rank])
        listener = self._listeners.pop(rank)
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_node(fork, listener, theirs, parent)
        except OSError:
            ours.close()
            raise
        finally:
            listener.close()
            theirs.close()
        self._adopt(rank, fork.incarnation, pid, ours)

    def _adopt(self, rank: int, incarnation: int, pid: int, end: socket.socket) -> None:
        def hear(message: protocol.FromProcess) -> None:
            self._emit(Said(rank, incarnation, message))

        def gone(why: str | None) -> None:
            how = self._bury(rank)
            hear(protocol.Exited(how if why is None else f"it sent {why}"))

        self._children[rank] = _Child(pid, SelectorChannel(end, FromNode, self._selector, hear, gone))

    def _become_node(self, fork: Fork, listener: socket.socket, channel: socket.socket, parent: int) -> None:
        """In the child: be a node, and leave without the parent's clean-up."""
        code = 1
        try:
            die_with(parent)
            for other in self._listeners.values():
                other.detach()  # closed in one go, and not once more by a finaliser
            close_all_but({listener.fileno(), channel.fileno(), self._memory, *self._wakeup})
            key = self._keys.get(fork.rank)
            context = NodeContext(
                listener=listener,
                channel=channel,
                addresses=self._addresses,
                token=self._token,
                memory=self._memory,
                at_once=self._at_once + len(self._stopped),
                wakeup=self._wakeup,
                trims=self._stage.trims(),
                folder=self._folder,
                security=None if key is None else Security(key, self._certificates),
                cut=self._cut,
                checkpoints=self._checkpoints,
                incarnation=fork.incarnation,
                crashes=tuple(fork.crashes),
            )
            code = node_main(fork.rank, self._setup, context, self._stage)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the coordinator is told and the process ends here
            Channel[ToNode](channel, ToNode).send(protocol.Failed.of(error, 0))
        finally:
            try:
                sys.stdout.flush()  # which may go to a full disk, or to nobody any more
                sys.stderr.flush()
            finally:
                os._exit(code)

    # --- ending

    def _bury(self, rank: int) -> str:
        """A node's process is gone; gives how it ended."""
        child = self._children.pop(rank)
        self._count_slots(rank, stopped=False)
        _, status = os.waitpid(child.pid, 0)
        return describe_exit(os.waitstatus_to_exitcode(status))

    def _count_slots(self, rank: int, *, stopped: bool) -> None:
        """One more node may compute for each that was stopped, which may hold a CPU slot."""
        if stopped != (rank in self._stopped):
            self._stopped ^= {rank}
            self._tell_all(protocol.Note("slots", self._at_once + len(self._stopped)))

    def close(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
        for child in self._children.values():
            os.waitpid(child.pid, 0)
            child.channel.close()
        self._children.clear()
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
