"""Faults in virtual time: nodes that die, go, come, come back or stand still at their instants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from gossamer.errors import Deadlock, RunFailed
from gossamer.faults import Event, Spell, StartFrom
from gossamer.messages.tags import Message
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Checkpoint
from gossamer.node.host import Host
from gossamer.runtime.events import EventLog, begins
from gossamer.runtime.outcome import describe_waits
from gossamer.runtime.rejoin import Hospitality, meeting
from gossamer.runtime.setup import Setup
from gossamer.runtime.simulate.clock import Clock, Order, to_ns
from gossamer.runtime.simulate.clock import Event as Due
from gossamer.runtime.simulate.faulty_host import FaultyHost
from gossamer.runtime.simulate.links import NETWORK, Links

MOST_IDLE = 10_000
"""Events of a schedule that goes on for ever, with nothing else to come and no round completed, after which a run is given
up: in a row, but where newcomers may ask in vain."""


@runtime_checkable
class Stage(Protocol):
    """What the simulation does for its faults."""

    nodes: list[NodeRuntime]
    rounds: int
    """Rounds that all nodes together have completed."""

    def running(self, rank: int) -> bool:
        """Whether a node's protocol has not returned."""

    def start(self, rank: int, saved: Checkpoint | None, *, asks: bool) -> NodeRuntime:
        """Make a node anew, which begins to live when this instant's events are done: as it was saved, or at the start; and
        asking a neighbour for its model, or not."""

    def cancel(self, rank: int) -> None:
        """End all tasks of a node."""

    def ended(self, rank: int) -> None:
        """The run does not wait for a node any more."""

    def without(self, rank: int, *, keep: bool) -> None:
        """A node is recorded no more; what it gave for moments that are not complete counts if it is to be kept."""

    def again(self, rank: int, first: int) -> None:
        """A node that takes part from a round on is recorded again."""

    def record_last(self, node: NodeRuntime) -> None:
        """Record a node as it ends, unless it was recorded in the same round."""

    def fail(self, error: RunFailed) -> None:
        """End the run."""


class FaultRunner:
    """Carries the schedule of a run out.

    Args:
        setup: what is run.
        stage: the simulation.
        clock: the virtual clock.
        links: the messages under way.
        log: where it is written down.

    Attributes:
        lost: the ranks that the nodes take for dead.
        up: the ranks that are there.
        left: those that have left in good order.
    """

    def __init__(self, setup: Setup, stage: Stage, clock: Clock, links: Links, log: EventLog) -> None:
        nodes = setup.experiment.nodes
        self._setup, self._stage, self._clock, self._log = setup, stage, clock, log
        self._links = links
        self.lost: set[int] = set()
        self.up = set(range(nodes))
        self.left: set[int] = set()
        self._absent: set[int] = set()  # who has not been there yet
        self._freezing = any(fault.freezes for fault in setup.experiment.faults)
        self._waits = setup.experiment.algorithm.gathers
        self._hosts: dict[int, FaultyHost] = {}
        self._agenda = setup.faults.agenda()
        self._at_rounds = {rank: list(crashes) for rank, crashes in setup.faults.at_rounds.items()}
        self._noticing: dict[int, Due] = {}  # when peers take a node for dead
        self._kept: dict[int, Checkpoint] = {}
        self._made = [0] * nodes  # checkpoints, by node
        self._next: Due | None = None
        self._idle = 0  # events with nothing else to wait for, since a round was completed
        self._rounds = 0  # completed by then
        self._asked: dict[int, tuple[int, float]] = {}  # who has asked whom for a model since, and since when
        self._last = ""  # who was last to go

    # --- the hosts

    def host(self, rank: int, inner: Host) -> FaultyHost:
        """The host of a node that is about to live."""
        self._hosts[rank] = FaultyHost(
            inner, rank, self.lost, self._freezing, self._links.give_up, self._round_completed
        )
        return self._hosts[rank]

    def inbox(self, rank: int) -> Callable[[Message], None]:
        """What puts a message into a node's mailbox, whichever of its lives it is in."""
        return lambda message: self._hosts[rank].happen(lambda: self._stage.nodes[rank].deliver(message))

    # --- the schedule

    def begin(self) -> None:
        """Let happen what does at the start, before any node lives."""
        for event in self._agenda.due(0.0):
            if event.what == "join" and event.node is not None:
                self._hosts[event.node].dead = True
                self._absent.add(event.node)
                self._away(event.node, silently=True, keep=False)
                self.lost.add(event.node)
                self._log.append(event.node, "absent", f"node {event.node} is not there yet")
            else:
                self._happens(event)
        self._anybody()
        self._wait()

    def _wait(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if math.isfinite(self._agenda.next_s):
            due_ns = to_ns(self._agenda.next_s)
            self._next = self._clock.at(due_ns, Order.COMMIT, NETWORK, self._due)

    def _due(self) -> None:
        self._look_for_deadlock()
        now_s = max(self._clock.now(), self._agenda.next_s)  # which was rounded to nanoseconds
        for event in self._agenda.due(now_s):
            self._happens(event)
        self._anybody()  # nothing happens where a node that was to come is called off
        self._wait()

    def _look_for_deadlock(self) -> None:
        """Nothing is under way that could wake a node, whoever comes and goes, and no round is ever completed. (Who asks for
        a model, and goes before all that it could ask have had their time, for ever, is woken only to ask the next one.)"""
        if self._stage.rounds != self._rounds:
            self._idle, self._rounds, self._asked = 0, self._stage.rounds, {}
        faults = self._setup.faults
        if self._clock.now() < faults.settled_s:
            return  # who is yet to come may be the one that all wait for
        newcomers = sorted(self.up) if faults.asks_neighbors else []
        asks = {rank: asked for rank in newcomers if (asked := self._asks(rank)) is not None}
        for rank, (peer, since_s) in asks.items():
            self._asked[rank] = peer, self._asked.get(rank, (peer, since_s))[1]
        in_vain = faults.asks_neighbors and self._links.lasting
        if self._clock.pending <= len(self._noticing) + (len(asks) if in_vain else 0):
            self._idle += 1
        elif not in_vain:  # (else what is under way may be questions and answers that are lost)
            self._idle = 0
        if self._idle > MOST_IDLE:
            waits = {node.rank: node.waiting() for node in self._stage.nodes}
            for rank, (peer, since_s) in self._asked.items():
                waits[rank] = waits[rank] or [
                    f"the model of node {peer}, asked for in vain since {since_s:.9g} s"
                ]
            raise Deadlock(f"all nodes wait, whoever comes and goes: {describe_waits(waits)}")

    def _asks(self, rank: int) -> tuple[int, float] | None:
        """Whom a node asks for the model that it is to begin with, and since when."""
        companion = self._stage.nodes[rank].companion
        return companion.asks if isinstance(companion, Hospitality) else None

    def _happens(self, event: Event) -> None:
        rank = event.node
        if rank is None:
            self._log.append(None, event.what, event.detail)
        elif event.what == "return":
            self._returns(rank, event.start_from)
        elif rank not in self.up:
            return
        elif event.what == "crash":
            self._crashes(rank)
        elif event.what == "leave":
            self._hosts[rank].leaving = True
            if not self._stage.running(rank):
                self.departed(rank)
        elif event.what == "freeze":
            self._freezes(rank)
        elif event.what == "thaw":
            self._thaws(rank)
        else:
            self._log.append(rank, event.what, event.detail)

    def _round_completed(self, rank: int) -> None:
        """A node has completed a round; it may be its last one."""
        completed = self._stage.nodes[rank].round
        for crash in list(self._at_rounds.get(rank, ())):
            if completed >= crash.round and rank in self.up:
                self._at_rounds[rank].remove(crash)
                now_s = self._clock.now()
                self._agenda.add(Spell(now_s, now_s + crash.after_s, "crash", rank, crash.start_from))
                for event in self._agenda.due(now_s):
                    self._happens(event)
                self._wait()

    def keep(self, node: NodeRuntime) -> None:
        """Save a node that has completed a round, if that is due, for when it is started anew."""
        due = self._setup.experiment.checkpoint.due(node.round, self._clock.now())
        if due > self._made[node.rank]:
            self._made[node.rank] = due
            self._kept[node.rank] = node.checkpoint()

    # --- what happens

    def _crashes(self, rank: int) -> None:
        round = self._stage.nodes[rank].round
        self._hosts[rank].dead = True
        self._stage.cancel(rank)
        self._away(rank, silently=True, keep=False)
        self._log.append(rank, "lost", f"node {rank} crashed in round {round}")
        self._notice_later(rank)
        self._gone(f"node {rank} crashed in round {round}")

    def departed(self, rank: int) -> None:
        """A node that was to leave has completed its round: it says goodbye, behind all that it has sent."""
        node = self._stage.nodes[rank]
        self._stage.record_last(node)
        self._hosts[rank].dead = True
        self._stage.cancel(rank)
        self.left.add(rank)
        self._away(rank, silently=False, keep=True)
        self._log.append(rank, "left", f"node {rank} left after round {node.round}")
        self._links.when_landed(rank, lambda: self._lose(rank))
        self._gone(f"node {rank} left after round {node.round}")

    def leaves(self, rank: int) -> bool:
        """Whether a node was told to leave."""
        return self._hosts[rank].leaving

    def _away(self, rank: int, *, silently: bool, keep: bool) -> None:
        self.up.discard(rank)
        self._links.go(rank, silently=silently)
        self._stage.without(rank, keep=keep)
        self._stage.ended(rank)

    def _returns(self, rank: int, start_from: StartFrom) -> None:
        if rank in self.up:
            self._hosts[rank].leaving = False  # it was to leave, and is still there
            return
        before = self._stage.nodes[rank].round
        saved = self._kept.get(rank) if start_from == "checkpoint" else None
        node = self._stage.start(rank, saved, asks=start_from == "neighbor")
        joins = rank in self._absent
        # (The round that it was in is not repeated where others may have its message.)
        least = before + 1 if self._waits and not joins else max(node.round, before)
        self._absent.discard(rank)
        self.left.discard(rank)
        self._links.come(rank)
        first = self._meet(node, least, anew=True)
        self.up.add(rank)
        text = f"node {rank} takes part from round {first} on"
        self._log.append(rank, "joined" if joins else "returned", text)
        self._log.append(rank, "begins", f"node {rank} begins with {begins(start_from, saved)}")

    def _freezes(self, rank: int) -> None:
        self._hosts[rank].freeze()
        self._log.append(rank, "frozen", f"node {rank} stands still")
        self._notice_later(rank)

    def _thaws(self, rank: int) -> None:
        host = self._hosts[rank]
        if not host.frozen:
            return
        text = f"node {rank} goes on"
        if rank in self.lost:
            node = self._stage.nodes[rank]
            first = self._meet(node, node.round + 1, anew=False)
            text += f", and takes part from round {first} on"
        self._unnotice(rank)
        self._log.append(rank, "thawed", text)
        host.thaw()

    def _meet(self, node: NodeRuntime, least: int, *, anew: bool) -> int:
        """A node and the others find each other: it goes on in the round that most of them are in, and no two wait for what
        was sent when one was taken for dead; gives that round.

        Args:
            node: the node that was away.
            least: no earlier round than this one, which it is where nodes don't wait for each other.
            anew: whether it was.
        """
        self._unnotice(node.rank)
        self.lost.discard(node.rank)
        first = least
        if self._waits:
            nodes = self._stage.nodes
            first, together = meeting({rank: nodes[rank].round for rank in self.up - {node.rank}}, least)
            for rank, since in together.items():
                node.peer_found(rank, since)
                nodes[rank].peer_found(node.rank, since, anew=anew)
        node.rejoin(first)
        if anew:
            node.catch_up()
        self._stage.again(node.rank, first)
        return first

    # --- what others know

    def _notice_later(self, rank: int) -> None:
        self._unnotice(rank)
        after_s = self._setup.experiment.failures.detection_s
        self._noticing[rank] = self._clock.after(after_s, Order.TIMER, NETWORK, lambda: self._lose(rank))

    def _unnotice(self, rank: int) -> None:
        if rank in self._noticing:
            self._noticing.pop(rank).cancel()

    def _lose(self, rank: int) -> None:
        """All nodes take one for dead."""
        self._noticing.pop(rank, None)
        self.lost.add(rank)
        if rank in self.up:  # it stands still
            self._stage.without(rank, keep=True)
        for other in sorted(self.up - {rank}):
            self._hosts[other].happen(self._stage.nodes[other].peer_lost)

    def _gone(self, how: str) -> None:
        self._last = f"; the last one: {how}"
        self._anybody()

    def _anybody(self) -> None:
        """The run goes on as long as a node is there, or will be."""
        if not self.up and not any(map(self._agenda.returns, range(len(self._stage.nodes)))):
            self._stage.fail(RunFailed(f"no node is left{self._last}"))
