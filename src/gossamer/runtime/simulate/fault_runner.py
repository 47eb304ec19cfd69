"""Faults in virtual time: nodes that crash, leave, join, return or freeze at their instants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from gossamer.errors import Deadlock, RunFailed
from gossamer.faults import FaultEvent, FaultInterval, StartFrom
from gossamer.messages.tags import Message
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Checkpoint
from gossamer.node.rejoin import earliest_round
from gossamer.runtime.events import EventLog, starting_state
from gossamer.runtime.simulate.core import Order, ScheduledCall, to_ns
from gossamer.runtime.simulate.host import FaultyHost, NodeTasks, SimContext
from gossamer.runtime.simulate.links import NETWORK
from gossamer.runtime.simulate.presence import SimPresence
from gossamer.runtime.simulate.recording import SimRecorder

MAX_IDLE = 10_000
"""The run fails after this many events of an endless schedule without a completed round and without any other
event that could wake a node."""


class FaultRunner:
    """Executes the schedule of faults of a run. ``start`` starts a new incarnation of a node, from a
    checkpoint if one is given; its flag says whether the node asks a neighbour for its model.

    Attributes:
        presence: the ranks that take part, and their rounds.
        left: the ranks that have left after a completed round."""

    def __init__(
        self,
        context: SimContext,
        nodes: Sequence[NodeRuntime],
        tasks: NodeTasks,
        recorder: SimRecorder,
        start: Callable[[int, Checkpoint | None, bool], NodeRuntime],
        log: EventLog,
    ) -> None:
        self._context, self._nodes, self._tasks = context, nodes, tasks
        self._recorder, self._start, self._log = recorder, start, log
        self._clock, self._links = context.clock, context.links
        self._experiment, self._schedule = context.setup.experiment, context.setup.faults
        self._gathers = self._experiment.algorithm.gathers
        self.presence = SimPresence(self._experiment.nodes, gather=self._gathers)
        self._up, self._lost = self.presence.up, self.presence.lost
        self.left: set[int] = set()
        self._absent: set[int] = set()  # ranks that have not joined yet
        self._hosts: dict[int, FaultyHost] = {}
        self._fault_queue = self._schedule.event_queue()
        self._at_rounds = {rank: list(crashes) for rank, crashes in self._schedule.at_rounds.items()}
        # Nodes to start again as soon as they have left.
        self._restart_after_leaving: dict[int, StartFrom] = {}
        self._detections: dict[int, ScheduledCall] = {}  # when peers declare a node dead
        self._saved: dict[int, Checkpoint] = {}
        self._made = [0] * self._experiment.nodes  # number of checkpoints of each node
        self._next: ScheduledCall | None = None
        self._idle = 0  # events of the schedule that count for MAX_IDLE
        self._last_departure = ""

    def host(self, rank: int, round_ended: Callable[[int], None]) -> FaultyHost:
        host = self._hosts[rank] = FaultyHost(self._context, rank, round_ended, self.presence)
        return host

    def arrive(self, rank: int, message: Message) -> None:
        """A message reaches a node, which takes it once it is not frozen."""
        self._hosts[rank].happen(partial(self._nodes[rank].deliver, message))

    # --- the schedule

    def begin(self) -> None:
        self._execute_due(0.0)
        self._check_any_left()

    def _due(self) -> None:
        now_s = self._clock.now()
        # Before the schedule is settled, all nodes may wait for one that has yet to join.
        stuck = now_s >= self._schedule.settled_s and self._clock.pending <= len(self._detections)
        self._idle = self._idle + 1 if stuck else 0
        if self._idle > MAX_IDLE:
            raise Deadlock(f"all nodes wait, even as others leave and return: {self._clock.waiting()}")
        self._execute_due(max(now_s, self._fault_queue.next_s))  # now_s is rounded to nanoseconds
        self._check_any_left()  # an expected return may be cancelled without an event

    def _execute_due(self, now_s: float) -> None:
        for event in self._fault_queue.due(now_s):
            self._execute(event)
        if self._next is not None:
            self._next.cancel()
        if math.isfinite(self._fault_queue.next_s):
            due_ns = to_ns(self._fault_queue.next_s)
            self._next = self._clock.at(due_ns, Order.COMMIT, NETWORK, self._due)

    def _execute(self, event: FaultEvent) -> None:
        rank = event.node
        if rank is not None and event.what == "return":
            self._return(rank, event.start_from)
            return
        if rank is not None and rank not in self._up:
            return
        match event.what, rank:
            case "join", int(rank):
                self._absent.add(rank)
                self._lost.add(rank)
                self._stop(rank, "absent", f"node {rank} has not joined yet", silently=True)
            case "crash", int(rank):
                text = f"node {rank} crashed in round {self._nodes[rank].round}"
                self._stop(rank, "lost", text, silently=True)
                self._detect_later(rank)
                self._check_any_left(text)
            case "leave", int(rank):
                self._hosts[rank].leaving = True
                if rank not in self._tasks.running:
                    self._depart(rank)
            case "freeze", int(rank):
                self._hosts[rank].freeze()
                self._log.append(rank, "frozen", f"node {rank} is frozen")
                self._detect_later(rank)
            case "thaw", int(rank):
                self._thaw(rank)
            case _:
                self._log.append(rank, event.what, event.detail)

    def round_ended(self, rank: int) -> None:
        self._idle = 0
        completed = self._nodes[rank].round
        self.presence.begin_round(rank, max(completed, self.presence.first(rank, rank)))
        for crash in list(self._at_rounds.get(rank, ())):
            if completed >= crash.round and rank in self._up:
                self._at_rounds[rank].remove(crash)
                now_s = self._clock.now()
                self._fault_queue.add(
                    FaultInterval(now_s, now_s + crash.after_s, "crash", rank, crash.start_from)
                )
                self._execute_due(now_s)

    def save(self, node: NodeRuntime) -> None:
        due = self._experiment.checkpoint.due(node.round, self._clock.now())
        if due > self._made[node.rank]:
            self._made[node.rank] = due
            self._saved[node.rank] = node.checkpoint()

    def returned(self, rank: int) -> None:
        if self._hosts[rank].leaving:
            self._tasks.running.discard(rank)
            self._depart(rank)
        else:
            self._tasks.ended(rank)

    # --- single faults

    def _depart(self, rank: int) -> None:
        """A node leaves after a completed round. The others notice once all its messages have landed."""
        text = f"node {rank} left after round {self._nodes[rank].round}"
        self._recorder.node_ended(self._nodes[rank])
        self.left.add(rank)
        self._stop(rank, "left", text, silently=False)
        self._links.when_landed(rank, lambda: self._lose(rank))
        if rank in self._restart_after_leaving:
            self._return(rank, self._restart_after_leaving.pop(rank))
        self._check_any_left(text)

    def _stop(self, rank: int, event: str, text: str, *, silently: bool) -> None:
        self._hosts[rank].dead = True
        self._tasks.cancel(rank)
        self.presence.leave(rank)
        self._links.leave(rank, silently=silently)
        self._recorder.leave(rank, keep=not silently)
        self._tasks.running.discard(rank)
        if self._up:
            self._tasks.ended(rank)
        self._log.append(rank, event, text)

    def _return(self, rank: int, start_from: StartFrom) -> None:
        if rank in self._up:
            if self._hosts[rank].done:
                self._restart_after_leaving[rank] = start_from
            else:
                self._hosts[rank].leaving = False  # it was about to leave
            return
        before, joins = self._nodes[rank].round, rank in self._absent
        saved = self._saved.get(rank) if start_from == "checkpoint" else None
        node = self._start(rank, saved, start_from == "neighbor")
        self._absent.discard(rank)
        self.left.discard(rank)
        self._links.join(rank)
        self._recorder.resume_usage(rank)
        first = self._meet(node, before, again=self._gathers and not joins, restarted=True)
        event = "joined" if joins else "returned"
        self._log.append(rank, event, f"node {rank} takes part from round {first} on")
        self._log.append(rank, "begins", f"node {rank} begins with {starting_state(start_from, saved)}")

    def _thaw(self, rank: int) -> None:
        host, node, text = self._hosts[rank], self._nodes[rank], f"node {rank} continues"
        if not host.frozen:
            return
        if rank in self._lost:
            first = self._meet(node, node.round, again=True, restarted=False)
            text += f", and takes part from round {first} on"
        self._forget_detection(rank)
        self._log.append(rank, "thawed", text)
        self._recorder.resume_usage(rank)
        host.thaw()

    def _meet(self, node: NodeRuntime, completed: int, *, again: bool, restarted: bool) -> int:
        """Let a node that was away continue in the round that most others are in, or in its earliest one if
        nodes don't wait for each other. Then no two nodes wait for messages that were sent while one of them
        was away. Returns that round."""
        rank = node.rank
        self._forget_detection(rank)
        self._lost.discard(rank)
        if self._gathers:
            node.mailbox.forget_late(self._up)
            if restarted:
                for other in self.presence.remembering(rank) & self._up:
                    self._nodes[other].mailbox.forget_late({rank})
        earliest = earliest_round(completed, self._experiment.stop.rounds, again=again)
        first = self.presence.join(rank, earliest)
        if self._gathers:
            for _, waiter in self.presence.watching(rank):
                waiter.wake()
        node.mailbox.wake_all()
        if restarted:
            node.catch_up()
            self.presence.begin_round(rank, node.round)
        self._recorder.join(rank, first + 1)
        return first

    # --- what other nodes know

    def _detect_later(self, rank: int) -> None:
        self._forget_detection(rank)
        after_s = self._experiment.failures.detection_s
        self._detections[rank] = self._clock.after(after_s, Order.TIMER, NETWORK, lambda: self._lose(rank))

    def _forget_detection(self, rank: int) -> None:
        if rank in self._detections:
            self._detections.pop(rank).cancel()

    def _lose(self, rank: int) -> None:
        self._detections.pop(rank, None)
        self._lost.add(rank)
        if rank in self._up:  # frozen
            self._recorder.leave(rank, keep=True, frozen=True)
        for other, waiter in self.presence.watching(rank):
            if other in self._up:
                self._hosts[other].happen(waiter.wake)

    def _check_any_left(self, departure: str = "") -> None:
        """Fail the run if no node takes part and none will. ``departure`` describes how the last one left."""
        self._last_departure = departure or self._last_departure
        if not self._up and not any(map(self._fault_queue.returns, range(len(self._nodes)))):
            last = f"; the last one: {self._last_departure}" if self._last_departure else ""
            self._tasks.fail(RunFailed(f"no node is left{last}"))
