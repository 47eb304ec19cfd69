"""Faults in virtual time: nodes that crash, leave, join, return or freeze at their instants.

:mod:`gossamer.runtime.life` has the rules, and this file executes them. No event costs more than the nodes that it
concerns: those that wait for the node look up what they need, and nobody else hears of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from gossamer.errors import Deadlock
from gossamer.faults import FaultEvent
from gossamer.messages.tags import Message
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Checkpoint
from gossamer.runtime import life
from gossamer.runtime.events import EventLog
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
        self._core, self._links = context.core, context.links
        self._experiment, self._schedule = context.setup.experiment, context.setup.faults
        self._gathers = self._experiment.algorithm.gathers
        self.presence = SimPresence(self._experiment.nodes, gather=self._gathers)
        self._up, self._lost = self.presence.up, self.presence.lost
        self.left: set[int] = set()
        self._hosts: dict[int, FaultyHost] = {}
        self._fault_queue = self._schedule.event_queue()
        self._at_rounds = {rank: list(crashes) for rank, crashes in self._schedule.at_rounds.items()}
        self._detections: dict[int, ScheduledCall] = {}  # when peers declare a node dead
        self._saved: dict[int, Checkpoint] = {}
        self._made = [0] * self._experiment.nodes  # number of checkpoints of each node
        self._next: ScheduledCall | None = None
        self._idle = 0  # events of the schedule that count for MAX_IDLE

    def host(self, rank: int, round_ended: Callable[[int], None]) -> FaultyHost:
        host = self._hosts[rank] = FaultyHost(self._context, rank, round_ended, self.presence)
        return host

    def arrive(self, rank: int, message: Message) -> None:
        """A message reaches a node, which takes it once it is not frozen."""
        host, deliver = self._hosts[rank], self._nodes[rank].deliver
        if host.frozen:
            host.happen(partial(deliver, message))
        elif not host.dead:
            deliver(message)

    # --- the schedule

    def begin(self) -> None:
        self._execute_due(0.0)
        self._check_any_left()

    def _due(self) -> None:
        now_s = self._core.now()
        # Until the last fault has ended, all nodes may wait for one that has yet to join.
        stuck = now_s >= self._schedule.last_end_s and self._core.pending <= len(self._detections)
        self._idle = self._idle + 1 if stuck else 0
        if self._idle > MAX_IDLE:
            raise Deadlock(f"all nodes wait, even as others leave and return: {self._core.waiting()}")
        self._execute_due(max(now_s, self._fault_queue.next_s))  # now_s is rounded to nanoseconds
        self._check_any_left()  # an expected return may be cancelled without an event

    def _execute_due(self, now_s: float) -> None:
        for event in self._fault_queue.due(now_s):
            self._execute(event)
        if self._next is not None:
            self._next.cancel()
        if math.isfinite(self._fault_queue.next_s):
            due_ns = to_ns(self._fault_queue.next_s)
            self._next = self._core.at(due_ns, Order.COMMIT, NETWORK, self._due)

    def _state(self, rank: int) -> life.State:
        if rank not in self._up:
            return "away"
        host = self._hosts[rank]
        return "going" if host.leaves else "leaving" if host.leaving else "here"

    def _execute(self, event: FaultEvent) -> None:
        if (rank := event.node) is None:
            self._log.append(rank, event.what, event.detail)
            return
        match self.presence.take(event, self._state(rank)):
            case "record":
                self._log.append(rank, event.what, event.detail)
            case "keep away":
                absent = life.absent(rank)
                self._stop(absent, silently=True)
                self.presence.keep_away(rank, absent.text)
            case "crash":
                self._stop(life.lost(rank, self._nodes[rank].round), silently=True)
                self._detect_later(rank)
                self._check_any_left()
            case "leave":
                self._hosts[rank].leaving = True
                if rank not in self._tasks.running:
                    self._depart(rank)
            case "stay":
                self._hosts[rank].leaving = False
            case "freeze":
                self._hosts[rank].freeze()
                self._log.append(*life.frozen(rank))
                self._detect_later(rank)
            case "thaw":
                self._thaw(rank)
            case "start":
                self._start_again(rank)

    def round_ended(self, rank: int) -> None:
        self._idle = 0
        completed = self._nodes[rank].round
        self.presence.begin_round(rank, max(completed, self.presence.first(rank, rank)))
        for crash in list(self._at_rounds.get(rank, ())):
            if completed >= crash.round and rank in self._up:
                self._at_rounds[rank].remove(crash)
                now_s = self._core.now()
                self._fault_queue.add(crash.now(now_s))
                self._execute_due(now_s)

    def save(self, node: NodeRuntime) -> None:
        due = self._experiment.checkpoint.due(node.round, self._core.now())
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
        self._recorder.node_ended(self._nodes[rank])
        self.left.add(rank)
        self._stop(life.left(rank, self._nodes[rank].round), silently=False)
        self._links.when_landed(rank, lambda: self._lose(rank))
        if rank in self.presence.restarts:
            self._start_again(rank)
        self._check_any_left()

    def _stop(self, why: life.LifeEvent, *, silently: bool) -> None:
        rank = why.rank
        self._hosts[rank].dead = True
        self._tasks.cancel(rank)
        self.presence.leave(rank, why.text)
        self._links.leave(rank, silently=silently)
        self._recorder.leave(rank, keep=not silently)
        self._tasks.running.discard(rank)
        if self._up:
            self._tasks.ended(rank)
        self._log.append(*why)

    def _start_again(self, rank: int) -> None:
        start_from = self.presence.restarts.pop(rank)
        before, joins = self._nodes[rank].round, rank in self.presence.absent
        saved = self._saved.get(rank) if start_from == "checkpoint" else None
        node = self._start(rank, saved, start_from == "neighbor")
        self.left.discard(rank)
        self._links.join(rank)
        self._recorder.resume_usage(rank)
        first = self._meet(node, before, joins=joins, restarted=True)
        self._log.append(*life.back(rank, first, joins=joins))
        self._log.append(*life.begins(rank, start_from, saved))

    def _thaw(self, rank: int) -> None:
        host, node, first = self._hosts[rank], self._nodes[rank], None
        if not host.frozen:
            return
        if rank in self._lost:
            first = self._meet(node, node.round, joins=False, restarted=False)
        self._forget_detection(rank)
        self._log.append(*life.thawed(rank, first))
        self._recorder.resume_usage(rank)
        host.thaw()

    def _meet(self, node: NodeRuntime, completed: int, *, joins: bool, restarted: bool) -> int:
        """Let a node that was away continue in the round that most others are in, or in its earliest one if
        nodes don't wait for each other. Then no two nodes wait for messages that were sent while one of them
        was away. Returns that round."""
        rank = node.rank
        self._forget_detection(rank)
        self.presence.find(rank)
        if self._gathers:
            node.mailbox.forget_late(self._up)
            if restarted:
                for other in self.presence.remembering(rank) & self._up:
                    self._nodes[other].mailbox.forget_late({rank})
        last = self._experiment.stop.rounds
        earliest = life.earliest(completed, last, gathers=self._gathers, joins=joins, restarted=restarted)
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
        self._detections[rank] = self._core.after(after_s, Order.TIMER, NETWORK, lambda: self._lose(rank))

    def _forget_detection(self, rank: int) -> None:
        if rank in self._detections:
            self._detections.pop(rank).cancel()

    def _lose(self, rank: int) -> None:
        self._detections.pop(rank, None)
        self.presence.lose(rank, life.frozen(rank).text)
        if rank in self._up:  # frozen
            self._recorder.leave(rank, keep=True, frozen=True)
        for other, waiter in self.presence.watching(rank):
            if other in self._up:
                self._hosts[other].happen(waiter.wake)

    def _check_any_left(self) -> None:
        if (failure := self.presence.nobody(self._fault_queue)) is not None:
            self._tasks.fail(failure)
