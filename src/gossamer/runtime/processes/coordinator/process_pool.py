"""The processes of a run's nodes: how each comes into being, and what is left of it."""

from __future__ import annotations

import errno
import gc
import os
import secrets
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence

from gossamer.config import Processes
from gossamer.cores import cores
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes.channel import Channel, PatientChannel
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.node_state import Child
from gossamer.runtime.processes.node_process.environment import Place
from gossamer.runtime.processes.node_process.process import main as worker_main
from gossamer.runtime.processes.node_process.warmup import Stage
from gossamer.runtime.processes.protocol import Failed, FromNode, Message, ToNode
from gossamer.runtime.processes.system.cpu_slots import holds, news
from gossamer.runtime.processes.system.death import describe_exit, die_with
from gossamer.runtime.processes.system.descriptors import close_all_but
from gossamer.runtime.processes.system.holes import fill_holes
from gossamer.runtime.processes.transport.transport import listen
from gossamer.runtime.setup import Setup


class ProcessPool:
    """Forks the nodes of a run from this process.

    Args:
        setup: what is run.
        folder: where rows are recorded.
        memory: descriptor of the file that all processes share.
        stage: what nodes compute with.
        cut: the checkpoint from which they go on; None is the start.
        selector: where their channels are waited for.
        crashes: gives the rounds after which a node is to kill itself.

    Attributes:
        children: the newest process of each node, by rank.
        alive: the ranks of those that have not ended.
        places: how many may compute at once: as many as the experiment says, and one for each that was stopped while it did.
    """

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        memory: int,
        stage: Stage,
        cut: Cut | None,
        selector: selectors.BaseSelector,
        crashes: Callable[[int], tuple[int, ...]],
    ) -> None:
        assert isinstance(setup.experiment.engine, Processes)
        self._setup, self._folder, self._memory, self._stage = setup, folder, memory, stage
        self._cut, self._selector, self._crashes = cut, selector, crashes
        self._at_once = self.cpu_slots = setup.experiment.engine.train_at_once or cores()
        self._news = news()
        self._stopped_inside: set[Child] = set()
        self.children: dict[int, Child] = {}
        self.alive: set[int] = set()
        self._addresses: list[tuple[str, int]] = []
        self._listeners: dict[int, socket.socket] = {}  # of nodes that are not there yet
        self._token = secrets.token_bytes(16)

    def fill(self, absent: Collection[int]) -> None:
        """Start all nodes, but for those who are not there yet; each has its port from the beginning."""
        nodes = self._setup.experiment.nodes
        try:
            listeners = dict(enumerate(listen() for _ in range(nodes)))
        except OSError as error:
            raise Ended("failed", message=f"no port for each of {nodes} nodes: {error}") from None
        self._addresses = [listener.getsockname()[:2] for listener in listeners.values()]
        self._listeners = {rank: listeners[rank] for rank in absent}
        gc.collect()
        self._filling = fill_holes()
        gc.freeze()  # so that the collector does not write to, and so copy, what all share
        for rank in range(nodes):
            if rank not in absent:
                listener = listeners.pop(rank)
                try:
                    self._fork(rank, listener, list(listeners.values()))
                except OSError as error:
                    text = f"no process for node {rank} of {nodes}: {error}; see ulimit -u"
                    raise Ended("failed", message=text) from None
                listener.close()

    def fork(self, rank: int) -> Child:
        """Start a node anew, on the port that it had.

        Raises:
            OSError: if its port is taken, or the system gives no process; its ``strerror`` says which.
        """
        host, port = self._addresses[rank]
        try:
            listener = self._listeners.pop(rank, None) or listen(host, port)
        except OSError as error:
            raise OSError(error.errno, f"its port {port}: {error.strerror}") from None
        try:
            return self._fork(rank, listener)
        except OSError as error:
            limit = "; see ulimit -u" if error.errno == errno.EAGAIN else ""
            raise OSError(error.errno, f"no process for it: {error.strerror}{limit}") from None
        finally:
            listener.close()

    def _fork(self, rank: int, listener: socket.socket, others: Sequence[socket.socket] = ()) -> Child:
        before, parent = self.children.get(rank), os.getpid()
        life = 0 if before is None else before.life + 1
        ours, theirs = socket.socketpair()
        place = Place(
            listener,
            theirs,
            self._addresses,
            self._token,
            self._memory,
            self.cpu_slots,
            self._stage.trims(),
            life,
            self._crashes(rank),
            news=self._news,
        )
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            self._become_node(rank, parent, place, {listener, theirs}, others)
        theirs.close()
        child = self.children[rank] = Child(rank, pid, PatientChannel(ours, FromNode), life=life)
        self.alive.add(rank)
        self._selector.register(child.channel, selectors.EVENT_READ, child)
        return child

    def _become_node(
        self,
        rank: int,
        parent: int,
        place: Place,
        own: Collection[socket.socket],
        others: Sequence[socket.socket],
    ) -> None:
        """In the child: live as a node, and leave without the parent's clean-up."""
        code = 1
        assert place.channel is not None
        try:
            die_with(parent)
            _forget_sockets(list(others))
            close_all_but({*(each.fileno() for each in own), self._memory, *self._news})
            code = worker_main(rank, self._setup, place, self._stage, self._folder, self._cut)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor is told and the process ends here
            text = traceback.format_exc()
            Channel(place.channel, ToNode).send(Failed(f"{type(error).__name__}: {error}", 0, text))
        finally:
            try:
                sys.stdout.flush()  # which may go to a full disk, or to nobody any more
                sys.stderr.flush()
            finally:
                os._exit(code)

    def tell(self, rank: int, message: Message) -> None:
        """Send a node a message. What one that was stopped does not read is sent when it does, by :meth:`send_on`."""
        child = self.children[rank]
        child.channel.send(message)
        self._mind(child)

    def send_on(self, child: Child) -> None:
        """A node that was behind with its messages takes some again."""
        child.channel.flush()
        self._mind(child)

    def _mind(self, child: Child) -> None:
        behind = bool(child.channel.waiting)
        if behind != child.behind:
            child.behind = behind
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if behind else 0)
            self._selector.modify(child.channel, events, child)

    def stopped(self) -> Iterator[tuple[Child, bool]]:
        """Whose processes were stopped (True), or go on (False), since the last call; nobody's where the system doesn't say
        (Linux does)."""
        while (seen := _seen()) is not None:
            for child in [self.children[rank] for rank in self.alive]:
                if child.pid == seen.si_pid:
                    stopped = seen.si_code == os.CLD_STOPPED
                    self._find_place(child, stopped=stopped)
                    yield child, stopped

    def _find_place(self, child: Child, *, stopped: bool) -> None:
        self._stopped_inside.discard(child)
        if stopped and holds(self._memory, self.cpu_slots, child.pid):
            self._stopped_inside.add(child)
        self.cpu_slots = self._at_once + len(self._stopped_inside)

    def bury(self, child: Child) -> str:
        """A node's process is gone; gives how it ended."""
        self._find_place(child, stopped=False)
        self._selector.unregister(child.channel)
        child.channel.close()
        _, status = os.waitpid(child.pid, 0)
        self.alive.discard(child.rank)
        return describe_exit(status)

    def kill_all(self) -> None:
        """End all processes, and wait until they are gone."""
        for rank in self.alive:
            os.kill(self.children[rank].pid, signal.SIGKILL)
        for rank in self.alive:
            os.waitpid(self.children[rank].pid, 0)
        self.alive.clear()


def _seen() -> os.waitid_result | None:
    """A child of this process that was stopped or goes on, and has not been seen before."""
    if not hasattr(os, "waitid"):
        return None
    try:
        return os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    except ChildProcessError:  # none is alive
        return None


def _forget_sockets(others: list[socket.socket]) -> None:
    """Let go of sockets whose descriptors are closed in one go, so that no finaliser closes the number
    again."""
    for other in others:
        other.detach()
