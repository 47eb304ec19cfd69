"""The pool of a worker's nodes: each node's process is forked from this one, and has a channel to it."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.config import Processes
from gossamer.cores import cores
from gossamer.results.checkpoints import read_run_checkpoint
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel, SelectorChannel
from gossamer.runtime.processes.node_process.host import ComputeResources, NodeContext
from gossamer.runtime.processes.node_process.process import main as node_main
from gossamer.runtime.processes.protocol import Fork, FromNode, Job, NodeReport, ToNode
from gossamer.runtime.processes.security import Security
from gossamer.runtime.processes.system import close_all_but, describe_exit, die_with, wakeup
from gossamer.runtime.processes.transport.transport import listen
from gossamer.runtime.setup import Setup


@dataclass(eq=False)
class _Child:
    pid: int
    channel: SelectorChannel[FromNode]


class ProcessPool:
    """Executes a coordinator's commands about the nodes of this machine, which listen at ``host``. Reports their
    messages, and the ends of their processes, to ``emit``."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        resources: ComputeResources,
        job: Job,
        selector: selectors.BaseSelector,
        emit: Callable[[NodeReport], None],
        host: str,
    ) -> None:
        assert isinstance(setup.experiment.engine, Processes)
        self._setup, self._folder, self._resources, self._job = setup, folder, resources, job
        self._selector, self._emit, self._host = selector, emit, host
        self._resumed_from = (
            None if job.checkpoint is None else read_run_checkpoint(folder.checkpoints, job.checkpoint)
        )
        self._at_once = setup.experiment.engine.train_at_once or cores()
        with tempfile.TemporaryFile() as file:
            self._slots, self._wakeup = os.dup(file.fileno()), wakeup()
        os.ftruncate(self._slots, self._at_once)
        self._stopped: set[int] = set()  # ranks of stopped processes, which may hold a CPU slot
        self._children: dict[int, _Child] = {}
        self._frozen = False

    def do(self, command: protocol.ToPool) -> None:
        match command:
            case Fork(rank=rank, incarnation=incarnation):
                try:
                    self._fork(command)
                except OSError as error:  # no more processes are allowed (see ulimit -u)
                    how = f"it can't be started: {error.strerror}"
                    self._emit(NodeReport(rank, incarnation, protocol.Exited(how)))
            case protocol.Tell(rank=rank, message=message) if rank in self._children:
                self._children[rank].channel.send(message)  # a stopped node reads it when it continues
            case protocol.Signal(rank=rank, number=number) if rank in self._children:
                os.kill(self._children[rank].pid, number)
                self._count_slots(rank, stopped=number == signal.SIGSTOP)

    # --- starting

    def _fork(self, fork: Fork) -> None:
        if not self._frozen:
            self._frozen = True
            gc.collect()
            gc.freeze()  # so that the collector does not write to, and thereby copy, shared memory
        parent, (ours, theirs) = os.getpid(), socket.socketpair()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_node(fork, theirs, parent)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._adopt(fork.rank, fork.incarnation, pid, ours)

    def _adopt(self, rank: int, incarnation: int, pid: int, end: socket.socket) -> None:
        def hear(message: protocol.FromProcess) -> None:
            self._emit(NodeReport(rank, incarnation, message))

        def gone(why: str | None) -> None:
            if why is not None:  # it may still run
                os.kill(pid, signal.SIGKILL)
            how = self._remove_dead(rank, pid)
            hear(protocol.Exited(how if why is None else f"it sent {why}"))

        self._children[rank] = _Child(pid, SelectorChannel(end, FromNode, self._selector, hear, gone))

    def _become_node(self, fork: Fork, channel: socket.socket, parent: int) -> None:
        """In the child process: run the node, and exit without the parent's clean-up."""
        code = 1
        try:
            die_with(parent)
            close_all_but({channel.fileno(), self._slots, *self._wakeup})
            context = NodeContext(
                job=self._job,
                fork=fork,
                listener=listen(self._host),
                channel=channel,
                slots=self._slots,
                wakeup=self._wakeup,
                folder=self._folder,
                security=None if fork.key is None else Security(fork.key, self._job.certificates),
                checkpoint=self._resumed_from,
            )
            code = node_main(fork.rank, self._setup, context, self._resources)
        except BaseException as error:  # noqa: BLE001 - the coordinator is told of any failure
            Channel[ToNode](channel, ToNode).send(protocol.Failed.of(error, fork.rank, None))
        finally:
            try:
                sys.stdout.flush()  # it may go to a full disk or a closed pipe
                sys.stderr.flush()
            finally:
                os._exit(code)

    # --- ending

    def _remove_dead(self, rank: int, pid: int) -> str:
        """Clean up after a node's process, in whose place another one may have been started. Returns how it ended."""
        if (child := self._children.get(rank)) is not None and child.pid == pid:
            del self._children[rank]
            self._count_slots(rank, stopped=False)
        _, status = os.waitpid(pid, 0)
        return describe_exit(os.waitstatus_to_exitcode(status))

    def _count_slots(self, rank: int, *, stopped: bool) -> None:
        """Add a CPU slot for each stopped node, which may hold one."""
        if stopped != (rank in self._stopped):
            self._stopped ^= {rank}
            os.ftruncate(self._slots, self._at_once + len(self._stopped))

    def close(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
        for child in self._children.values():
            os.waitpid(child.pid, 0)
            child.channel.close()
        self._children.clear()
        for descriptor in (self._slots, *self._wakeup):
            os.close(descriptor)
