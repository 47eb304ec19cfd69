"""The fork server and supervisor of a run: ``python -m gossamer.engines.processes.server CHANNEL MEMORY
PARENT``.

A process of its own, because it forks: it imports everything and loads the data once, with one torch thread
and no event loop, and every node is a fork of it. It watches over the nodes, and never leaves one behind: it
ends them when the run ends, and the system ends them when it dies.
"""

from __future__ import annotations

import gc
import math
import os
import secrets
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch

from gossamer.engines.events import EventLog, HeardClock
from gossamer.engines.muster import Moment
from gossamer.engines.outcome import describe_waits
from gossamer.engines.processes.assembly import Assembly
from gossamer.engines.processes.channel import Channel, close_all_but
from gossamer.engines.processes.child import Child
from gossamer.engines.processes.death import describe_exit, die_with
from gossamer.engines.processes.descriptors import raise_descriptor_limit
from gossamer.engines.processes.fates import Fates
from gossamer.engines.processes.memory import FINAL, SharedModels
from gossamer.engines.processes.rehearsal import Stage, with_data_for_forks
from gossamer.engines.processes.transport import listen
from gossamer.engines.processes.worker import Place
from gossamer.engines.processes.worker import main as worker_main
from gossamer.engines.recording import (
    GraphLog,
    NetworkRows,
    TargetWatch,
    ViewLog,
    reporters,
    resume_rows,
)
from gossamer.engines.setup import Setup, prepare
from gossamer.errors import BadInput
from gossamer.experiment import Experiment, Processes
from gossamer.learning.memory import keep_freed_memory
from gossamer.learning.workers import cores
from gossamer.messages import Model, Traffic
from gossamer.results.checkpoints import Cut, newest
from gossamer.results.folder import RunFolder
from gossamer.results.recorder import read_metrics

END_S = 30.0
"""Seconds without a sign of life after which nodes that should end are killed."""
TRAFFIC = tuple(field.name for field in fields(Traffic))
"""The counters in a row."""
UNREACHABLE_S = 5.0
"""Seconds after which a peer that was reported unreachable, but is alive, is given up."""
PROGRESS_S = 0.1


class Ended(Exception):
    """The run is over: how, and if it failed, why."""

    def __init__(self, reason: str, **failure: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.failure = failure or None


class Supervisor:
    """Starts the nodes of a run, watches over them, and ends them.

    Args:
        setup: what is run.
        folder: where rows are recorded.
        launcher: the channel to the launcher.
        memory: descriptor of the file that all processes share.
        cut: the checkpoint from which it goes on; None is the start.
    """

    def __init__(
        self, setup: Setup, folder: RunFolder, launcher: Channel, memory: int, cut: Cut | None = None
    ) -> None:
        experiment = setup.experiment
        assert isinstance(experiment.engine, Processes)
        self._setup, self._folder, self._launcher, self._memory = setup, folder, launcher, memory
        self._options = experiment.engine
        self._nodes = experiment.nodes
        self._models = SharedModels(memory, self._nodes, setup.layout.size, setup.layout.buffer_size)
        self._stage = Stage(setup)
        self._rows = NetworkRows(setup, self._stage.evaluator)
        self._target = TargetWatch(experiment.stop.target, reporters(setup))
        self.children: dict[int, Child] = {}
        self.alive: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._fates = Fates(setup, self)
        self._addresses: list[tuple[str, int]] = []
        self._listeners: dict[int, socket.socket] = {}  # of nodes that are not there yet
        self._token = secrets.token_bytes(16)
        self._wiped = False  # whether messages may have been lost with a node
        self._suspects: list[tuple[float, int, int, str]] = []
        self._clock = HeardClock(time.monotonic)
        self._said = 0.0
        self._start: float | None = None
        self._ending = False
        self._heard = 0.0
        self._skips = 0
        self._cut = cut
        self._assembly = Assembly(setup.experiment, folder, cut, self.tell, self._say_of_checkpoint)

    def run(self) -> Ended:
        """From the first fork to the last exit."""
        try:
            self._fork()
            self._metrics = self._folder.segment("metrics", self._nodes)
            self._events = EventLog(self._folder.segment("events"), self._clock.now, self._wall)
            graphs = self._folder.segment("graphs")
            self._graphs = GraphLog(self._setup.topology, graphs)
            self._views = ViewLog(self._nodes, graphs)
            if self._cut is not None:
                self._resume(self._cut)
            self._selector.register(self._launcher, selectors.EVENT_READ, None)
            for message in self._launcher.pending():
                self._hear_launcher(message)
            self._await_ready()
            self._supervise()
        except Ended as end:
            if end.failure is None:
                end = self._finish(end)
            return end
        finally:
            self._kill()
        raise AssertionError("a run ends by Ended")

    # --- starting

    def _resume(self, cut: Cut) -> None:
        self._clock.hear(max(cut.times_s.values()), runs=False)
        for log in (self._graphs, self._views):
            log.resume(max(cut.rounds.values()))
        for rank in set(range(self._nodes)) - cut.rounds.keys():
            self.without(rank, keep=False)
            self._forget_models([rank])
        resume_rows(self._setup, cut, read_metrics(self._folder.path), self._rows, self._target)

    def _fork(self) -> None:
        self._stage.rehearse()
        try:
            listeners = dict(enumerate(listen() for _ in range(self._nodes)))
        except OSError as error:
            raise Ended("failed", message=f"no port for each of {self._nodes} nodes: {error}") from None
        self._addresses = [listener.getsockname()[:2] for listener in listeners.values()]
        absent = self._fates.absent()
        self._forget_models(absent)
        if self._cut is not None:  # who is not in it was lost before
            absent |= listeners.keys() - self._cut.rounds.keys()
        self._listeners = {rank: listeners[rank] for rank in absent}
        gc.collect()
        gc.freeze()  # so that the collector does not write to, and so copy, what all share
        for rank in range(self._nodes):
            if rank not in absent:
                listener = listeners.pop(rank)
                try:
                    self._fork_one(rank, listener, list(listeners.values()))
                except OSError as error:
                    text = f"no process for node {rank} of {self._nodes}: {error}; see ulimit -u"
                    raise Ended("failed", message=text) from None
                listener.close()

    def _fork_one(self, rank: int, listener: socket.socket, others: Sequence[socket.socket] = ()) -> Child:
        before, parent = self.children.get(rank), os.getpid()
        life = 0 if before is None else before.life + 1
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            keep = {listener.fileno(), theirs.fileno(), self._memory}
            _forget_sockets(list(others))
            close_all_but(keep)
            place = Place(
                listener,
                theirs,
                self._addresses,
                self._token,
                self._memory,
                self._options.train_at_once or cores(),
                self._stage.trims(),
                life,
                tuple(crash.round for crash in self._fates.at_rounds.get(rank, ())),
            )
            self._become_node(rank, parent, place)
        theirs.close()
        child = self.children[rank] = Child(rank, pid, Channel(ours), life=life)
        self.alive.add(rank)
        self._selector.register(child.channel, selectors.EVENT_READ, child)
        return child

    def _become_node(self, rank: int, parent: int, place: Place) -> None:
        """In the child: live as a node, and leave without the parent's clean-up."""
        code = 1
        assert place.channel is not None
        try:
            die_with(parent)
            code = worker_main(rank, self._setup, place, self._stage, self._folder, self._cut)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor is told and the process ends here
            text = traceback.format_exc()
            Channel(place.channel).send("failed", f"{type(error).__name__}: {error}", 0, text)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._options.start_timeout_s
        while not all(child.ready for child in self.children.values()):
            if time.monotonic() > deadline:
                late = [child.rank for child in self.children.values() if not child.ready]
                raise Ended(
                    "failed",
                    message=f"nodes {late} were not up within engine.start_timeout_s = {self._options.start_timeout_s}",
                )
            self._poll(0.5)
        self._start = time.monotonic()
        for rank in self._fates.away:
            self._tell_all("lost", rank, "not there yet", None)
        self._tell_all("go", self._start)
        self._clock.hear(self._clock.now())  # it runs from here on
        for rank in [] if self._cut is None else sorted(set(range(self._nodes)) - self._cut.rounds.keys()):
            self._tell_all("lost", rank, f"node {rank} was lost before the run was resumed", None)
        self._assembly.begin(self.alive, self._start)
        self._fates.begin(self._start)

    # --- watching

    def _supervise(self) -> None:
        while True:
            self._poll(self._fates.timeout(0.2))
            self._fates.look()
            awaited = self._awaited()
            if awaited and all(self.children[rank].done for rank in awaited):
                raise Ended("rounds")
            if not self.alive and not self._fates.expects():
                raise Ended("failed", message=f"no node is left: {self._events.summary()}")
            self._look_at_suspects()
            self._look_for_deadlock()

    def _awaited(self) -> list[int]:
        """Whose rounds the run waits for: who is there, or will be again. One that stands still, and not by the schedule,
        may do so for good."""
        away = self._fates.away
        return [
            rank
            for rank in sorted(self.alive)
            if rank not in away or self.children[rank].frozen or self.children[rank].arriving
        ]

    def _poll(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            child: Child | None = key.data
            channel = self._launcher if child is None else child.channel
            messages = channel.read()
            if messages is None:
                if child is None:
                    raise Ended("failed", message="the launcher died")
                self._died(child)
                continue
            for message in messages:
                if child is None:
                    self._hear_launcher(message)
                else:
                    self._hear(child, message)
        now = time.monotonic()
        if now - self._said > PROGRESS_S:
            self._said = now
            rounds = sum(child.round for child in self.children.values())
            self._launcher.send("progress", rounds, self._clock.now())

    def _hear_launcher(self, message: list[Any]) -> None:
        if message[0] == "stop":
            raise Ended("stopped")

    def _hear(self, child: Child, message: list[Any]) -> None:
        what, *rest = message
        self._heard = time.monotonic()
        if child.rank in self._fates.away and self._start is not None and child.ready:
            self._fates.heard(child)
        if what == "ready":
            child.ready = True
            if self._start is not None:
                child.arriving = True
                self._fates.ready(child)
        elif what == "progress":
            child.round = rest[0]
            self._clock.hear(rest[1])
        elif what == "time" and not self._ending:
            raise Ended("time")
        elif what == "row":
            self._record(child, *rest)
        elif what == "view":
            moment, rounds, view = rest
            self._views.add(_moment(moment), child.rank, rounds, view)
        elif what == "done":
            child.done, child.round = True, rest[0]
            self._assembly.done(child.rank)
            if child.leaving:
                self.tell(child.rank, "finish", "left", None)
        elif what == "marked":
            self._assembly.marked(child.rank, *rest)
        elif what == "saved":
            self._assembly.saved(child.rank, *rest)
        elif what == "broken":
            self._assembly.broken(child.rank, *rest)
        elif what == "final":
            child.final, child.round, child.private = True, rest[0], rest[1]
            if child.leaving and not self._ending:
                self._fates.left(child)
        elif what == "at":
            self._fates.told(child, rest[0], rest[1])
        elif what == "crash":
            self._fates.crashes_itself(child, rest[0])
        elif what == "idle":
            child.idle = (rest[0], rest[1], rest[2]) if rest[0] >= 0 else None
            child.idle_reports = child.idle_reports + 1 if child.idle else 0
        elif what == "event":
            self._event(child.rank, rest[0], rest[1])
        elif what == "unreachable" and not self._ending and self._setup.experiment.gather.lost_peer != "fail":
            self._fates.doubt(child, rest[0], rest[1])
        elif what == "unreachable" and not self._ending:
            self._suspects.append((time.monotonic(), child.rank, rest[0], rest[1]))
        elif what == "reachable":
            told = child.rank, rest[0]
            self._suspects = [suspect for suspect in self._suspects if suspect[1:3] != told]
        elif what == "failed":
            text, round, trace = rest
            where = f"in round {round}" if self._start is not None else "at start"
            raise Ended(
                "failed",
                message=f"node {child.rank} failed {where}: {text}",
                node=child.rank,
                round=round,
                traceback=trace,
            )

    def _died(self, child: Child) -> None:
        """A channel was closed: that node's process is gone."""
        self._selector.unregister(child.channel)
        child.channel.close()
        _, status = os.waitpid(child.pid, 0)
        self.alive.discard(child.rank)
        if child.final and (self._ending or child.leaving):
            return
        said = "crashed" if child.planned else "died"
        text = f"node {child.rank} {said} in round {child.round}: {describe_exit(status)}"
        self._event(child.rank, "lost", text)
        if self._ending:
            self._forget_models([child.rank])
            return
        again = self._options.restart == "always" and child.restarts < self._options.restart_limit
        fails = self._setup.experiment.gather.lost_peer == "fail" and not (child.planned or again)
        if fails or self._start is None:
            raise Ended("failed", message=text, node=child.rank, round=child.round)
        self._launcher.send("say", text)
        self._fates.died(child, text)
        self._forget_models([child.rank])
        if again and not child.planned:
            child.restarts += 1
            self._fates.bring_back(child.rank, "checkpoint")
        if not self.alive and not self._fates.expects():
            raise Ended("failed", message=f"every node died; the last one: {text}")

    def _forget_models(self, ranks: Iterable[int]) -> None:
        """What these ended with is not known; nobody shall take zeros for a model."""
        sizes = self._setup.layout.size, self._setup.layout.buffer_size
        unknown = Model(*(torch.full((n,), math.nan) for n in sizes))
        for rank in ranks:
            self._models.write(FINAL, rank, unknown)

    # --- what faults ask for

    def fork(self, rank: int) -> Child:
        """Start a node anew, on the port that it had.

        Raises:
            OSError: if its port is taken.
        """
        listener = self._listeners.pop(rank, None) or listen(*self._addresses[rank])
        try:
            return self._fork_one(rank, listener)
        finally:
            listener.close()

    def say(self, rank: int | None, event: str, text: str) -> None:
        """Write an event down, and show it."""
        self._event(rank, event, text)
        self._launcher.send("say", text or event)

    def without(self, rank: int, *, keep: bool) -> None:
        """Nobody waits for a node any more; what it gave for moments that are not complete counts if it is to be kept."""
        self._wiped = True
        if rank in self.alive and not self.children[rank].leaving:
            self._assembly.away(rank)
        else:
            self._assembly.lost(rank)
        self._target.without(rank, keep=keep)
        self._views.without(rank, keep=keep)
        for moment, row in self._rows.without(rank, keep=keep).items():
            self._append(moment, row)

    def go(self, child: Child, first: int, together: Sequence[tuple[int, int]]) -> None:
        """Let a node live that was started anew, from this round on, and with each of the others from one."""
        start = time.monotonic() - self._clock.now()  # the nodes' clocks stand still while they are judged
        arrival = [first, together, child.start_from, self._next_tick(), dict(child.traffic or {})]
        self.tell(child.rank, "go", start, arrival)

    def again(self, rank: int, first: int) -> None:
        """A node that takes part from a round on is recorded again."""
        self._assembly.back(rank)
        self._target.back(rank, first + 1, self._next_tick())
        self._rows.back(rank, first + 1, self._next_tick())
        self._views.back(rank, first + 1, self._next_tick())

    def tell(self, rank: int, *message: Any) -> None:
        """Send a node a message; one that is gone is noticed by its closed channel."""
        self.children[rank].channel.send(*message)

    def _next_tick(self) -> int:
        every_s = self._setup.experiment.evaluation.every_s
        return 0 if every_s is None else int(self._clock.now() / every_s) + 1

    def _look_at_suspects(self) -> None:
        """A peer that could not be reached is dead, which its channel says, or is given up after a while."""
        now = time.monotonic()
        for since, reporter, rank, why in list(self._suspects):
            if rank in self.alive and now - since < UNREACHABLE_S:
                continue
            self._suspects.remove((since, reporter, rank, why))
            if rank in self.alive and reporter in self.alive:
                text = f"node {reporter} can't reach node {rank}: {why}"
                self._event(reporter, "unreachable", text)
                raise Ended("failed", message=text, node=reporter)

    def _look_for_deadlock(self) -> None:
        """All nodes wait for messages, none is on its way, and no end of time is set: they wait for ever.

        (Not while a peer is given up: that may be what they wait for, and is the better reason.)
        """
        if self._suspects:
            return
        if self._setup.experiment.stop.time_s is not None or len(self.alive) < self._nodes or self._wiped:
            return
        if any(child.idle is None or child.idle_reports < 2 for child in self.children.values()):
            return
        nodes = [child for _, child in sorted(self.children.items())]
        states = [child.idle for child in nodes if child.idle is not None]
        if sum(sent for sent, _, _ in states) != sum(got for _, got, _ in states):
            return
        waits = {child.rank: state[2] for child, state in zip(nodes, states, strict=True)}
        raise Ended("failed", message=f"all nodes wait and nothing is under way: {describe_waits(waits)}")

    # --- recording

    def _record(self, child: Child, moment: Any, row: dict[str, Any], slot: int | None) -> None:
        key = _moment(moment)
        self._graphs.completed(row["round"])
        child.traffic = {name: row[name] for name in TRAFFIC}
        self._launcher.send("row", row)
        if self._target.reached(key, row):
            raise Ended("target")
        if slot is None:
            if child.rank in self._setup.judged:
                self._skip(key)
            return
        complete = self._rows.add(key, row, self._models.read(slot, child.rank))
        self.tell(child.rank, "consumed")
        if complete is not None:
            self._append(key, complete)

    def _skip(self, moment: Moment) -> None:
        if not self._skips:
            self._launcher.send(
                "say",
                "consensus distance: not recorded where a node is more than two evaluations ahead of the record",
            )
        self._skips += 1
        self._rows.skip(moment)

    def _append(self, moment: Moment, row: dict[str, Any]) -> None:
        self._metrics.append(row)
        self._launcher.send("row", row)
        if self._target.reached(moment, row):
            raise Ended("target")

    def _event(self, rank: int | None, kind: str, text: str) -> None:
        self._events.append(rank, kind, text)

    def _wall(self) -> float:
        now_s = 0.0 if self._start is None else time.monotonic() - self._start
        return now_s + (0.0 if self._cut is None else self._cut.wall_s)

    # --- ending

    def _finish(self, end: Ended) -> Ended:
        """Have every node write its last row and its model; gives how it went."""
        self._ending = True
        self._fates.thaw_all()
        self._tell_all("finish", end.reason, self._assembly.last())
        self._heard = time.monotonic()
        awaited = set(self._awaited())
        try:
            while any(not self.children[rank].final for rank in awaited & self.alive):
                if time.monotonic() > self._heard + END_S:
                    break
                self._poll(0.2)
            for rank in sorted(self.alive):
                if not self.children[rank].final:
                    self._give_up(rank)
        except Ended as other:
            if other.failure is not None:
                return other
        if (away := self._events.summary()) is not None:
            self._launcher.send("say", away)
        return end

    def _give_up(self, rank: int) -> None:
        """A node does not end: it is killed, and lost; the others' outcome stands."""
        child = self.children[rank]
        os.kill(child.pid, signal.SIGKILL)
        self._launcher.send("say", f"node {rank} did not end with the others, and was killed")
        self._died(child)

    def private_bytes(self) -> dict[str, float] | None:
        """What nodes had to themselves at their end, as far as they said."""
        said = [child.private for child in self.children.values() if child.private is not None]
        return {"mean": sum(said) / len(said), "max": max(said)} if said else None

    def _tell_all(self, *message: Any) -> None:
        for rank in sorted(self.alive):
            self.tell(rank, *message)

    def _say_of_checkpoint(self, text: str) -> None:
        self.say(None, "checkpoint", text)

    def _kill(self) -> None:
        for rank in self.alive:
            os.kill(self.children[rank].pid, signal.SIGKILL)
        for rank in self.alive:
            os.waitpid(self.children[rank].pid, 0)
        self.alive.clear()


def _moment(said: Any) -> Moment:
    """A moment as it was before it went through a channel."""
    return tuple(said) if isinstance(said, list) else said


def _forget_sockets(others: list[socket.socket]) -> None:
    """Let go of sockets whose descriptors are closed in one go, so that no finaliser closes the number
    again."""
    for other in others:
        other.detach()


def main() -> None:
    """The process's whole life."""
    channel_fd, memory, parent = (int(argument) for argument in sys.argv[1:4])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # before any operation: a fork after one with more threads hangs
    keep_freed_memory()
    launcher = Channel(socket.socket(fileno=channel_fd))
    hello = launcher.receive()
    if hello is None:
        return
    try:
        setup = with_data_for_forks(prepare(Experiment.parse(hello[1])))
        raise_descriptor_limit(setup, channels=setup.experiment.nodes)
    except BadInput as error:
        launcher.send("bad-input", list(error.problems))
        return
    launcher.send("prepared", setup.description(), setup.layout.size, setup.layout.buffer_size)
    answer = launcher.receive()
    if answer is None:
        return
    folder = RunFolder.open(answer[1])
    cut = newest(folder.checkpoints) if answer[2] else None
    supervisor = Supervisor(setup, folder, launcher, memory, cut)
    end = supervisor.run()
    launcher.send("memory", supervisor.private_bytes())
    launcher.send("ended", end.reason, end.failure)


if __name__ == "__main__":
    main()
