"""Faults among real processes: the supervisor kills, stops, starts and introduces nodes as the schedule says.

A node that comes, or comes back, is introduced: the others are told, and say which round they are in; then it is told
where to begin, and everybody from which round on to wait for whom. One is introduced at a time.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from gossamer.faults import Event, RoundCrash, Spell, StartFrom
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.node_state import NodeState
from gossamer.runtime.processes.protocol import Find, Finish, Leave, Lost, Meet, Met, ToNode
from gossamer.runtime.rejoin import meeting
from gossamer.runtime.setup import Setup

SAID_S = 10.0
"""Seconds after which it's said for whom the others wait; then after twice as many, and so on."""
MOST_NAMED = 5
STEP_S = 1.0
"""Seconds that count at most between two looks at one that stands still: a supervisor that was itself stopped, perhaps with
all of its nodes, blames nobody."""


@dataclass(eq=False)
class _Introduction:
    """A node and the others find each other.

    Args:
        child: the node.
        anew: whether it was started anew.
        awaited: who has not said yet which round it is in.
        deadline: when those are taken for dead who have not.
        rounds: what the others have said.
    """

    child: NodeState
    anew: bool
    awaited: set[int]
    deadline: float
    rounds: dict[int, int] = field(default_factory=dict)


@runtime_checkable
class Hands(Protocol):
    """What the supervisor does for its faults."""

    nodes: dict[int, NodeState]
    alive: set[int]

    def fork(self, rank: int, start_from: StartFrom) -> bool:
        """Restart a node; False where no worker has room for it yet."""

    def signal(self, rank: int, number: int) -> None:
        """Send the process of a node a signal."""

    def say(self, rank: int | None, event: str, text: str) -> None:
        """Write an event down, and show it."""

    def show(self, text: str) -> None:
        """Show what is no event."""

    def without(self, rank: int, *, keep: bool) -> None:
        """Nobody waits for a node any more; what it gave for moments that are not complete counts if it is to be kept."""

    def go(self, child: NodeState, first: int, together: Sequence[tuple[int, int]]) -> None:
        """Let a node live that was started anew, from this round on, and with each of the others from one."""

    def again(self, rank: int, first: int) -> None:
        """A node that takes part from a round on is recorded again."""

    def tell(self, rank: int, message: ToNode) -> None:
        """Send a node a message."""


class FaultRunner:
    """Carries the schedule of a run out, on the real clock.

    Args:
        setup: what is run.
        hands: the supervisor.
    """

    def __init__(self, setup: Setup, hands: Hands) -> None:
        self._setup, self._hands = setup, hands
        self._nodes = setup.experiment.nodes
        self._waits = setup.experiment.algorithm.gathers
        self._detection_s = setup.experiment.failures.detection_s
        self._agenda = setup.faults.agenda()
        self._at_rounds: dict[int, list[RoundCrash]] = {
            rank: list(crashes) for rank, crashes in setup.faults.at_rounds.items()
        }
        self.away: dict[int, str] = {}
        """Who is not there, or taken for dead, and why."""
        self._start = math.inf
        self._coming: dict[int, StartFrom] = {}  # who is to be started anew as soon as it has ended
        self._queue: deque[tuple[NodeState, bool]] = deque()  # who is to be introduced
        self._introduction: _Introduction | None = None
        self._noticed: dict[int, float] = {}  # when one that stands still is taken for dead
        self._stopped: set[NodeState] = set()  # from outside
        self._looked = math.inf
        self._since: dict[int, float] = {}  # when those that are away were first seen to be
        self._say_after_s = SAID_S
        self._early: list[Event] = []

    def crash_rounds(self, rank: int) -> tuple[int, ...]:
        """After which rounds a node that is started now is to kill itself."""
        return tuple(crash.round for crash in self._at_rounds.get(rank, ()))

    # --- time

    def absent(self) -> set[int]:
        """Who is not there at the start; asked once, before anything is started."""
        absent = set()
        for event in self._agenda.due(0.0):
            if event.what == "join" and event.node is not None:
                absent.add(event.node)
                self.away[event.node] = "not there yet"
            else:
                self._early.append(event)
        return absent

    def begin(self, start: float) -> None:
        """The run starts, at this instant of the monotonic clock."""
        self._start = start
        for rank, why in sorted(self.away.items()):
            self._hands.say(rank, "absent", f"node {rank} is {why}")
            self._hands.without(rank, keep=False)
        for event in self._early:
            self._happens(event)

    def timeout(self, longest: float) -> float:
        """Seconds until something happens, at most so many."""
        due = min([self._start + self._agenda.next_s, *self._noticed.values()])
        return min(max(due - time.monotonic(), 0.0), longest)

    def look(self) -> None:
        """Let happen what is due."""
        now = time.monotonic()
        for event in self._agenda.due(now - self._start):
            self._happens(event)
        self._look_at_still(now)
        if self._waits and self._setup.experiment.gather.lost_peer == "wait":
            self._look_at_away(now)
        for rank, start_from in list(self._coming.items()):
            if rank not in self._hands.alive and self._hands.fork(rank, start_from):
                del self._coming[rank]
        if self._introduction is not None and now > self._introduction.deadline:
            for rank in sorted(self._introduction.awaited):
                self._lose(rank, f"node {rank} is silent", keep=True)
            self._go_on()

    def _look_at_still(self, now: float) -> None:
        passed, self._looked = now - self._looked, now
        for rank, due in list(self._noticed.items()):
            self._noticed[rank] = due = due + max(passed - STEP_S, 0.0)
            if due > now:
                continue
            del self._noticed[rank]
            if rank not in self._hands.alive:
                continue
            child, text = self._hands.nodes[rank], f"node {rank} stands still"
            if child in self._stopped and self._setup.experiment.gather.lost_peer == "fail":
                raise Ended("failed", message=f"{text}: it was stopped", node=rank, round=child.round)
            self._lose(rank, text, keep=True)

    def _look_at_away(self, now: float) -> None:
        """Those who wait say nothing, perhaps for long."""
        gone_s = {rank: now - self._since.get(rank, now) for rank in sorted(self.away)}
        self._since = {rank: now - seconds for rank, seconds in gone_s.items()}
        if not gone_s:
            self._say_after_s = SAID_S
        elif max(gone_s.values()) >= self._say_after_s:
            self._say_after_s = 2 * max(gone_s.values())
            named = [f"node {rank} (away for {seconds:.0f} s)" for rank, seconds in gone_s.items()]
            more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
            least = min((self._hands.nodes[rank].round for rank in self._present()), default=0)
            self._hands.show(
                f"waiting for {', '.join(named[:MOST_NAMED])}{more}; the others are in round {least} or later"
            )

    def expects(self) -> bool:
        """Whether somebody will come, or come back."""
        return bool(self._coming) or any(map(self._agenda.returns, range(self._nodes)))

    # --- the schedule

    def _happens(self, event: Event) -> None:
        rank = event.node
        if rank is None:
            self._hands.say(None, event.what, event.detail)
            return
        child = self._hands.nodes.get(rank)
        if event.what == "return":
            self.bring_back(rank, event.start_from)
        elif child is None or rank not in self._hands.alive:
            return
        elif event.what == "crash":
            child.planned = True
            self._hands.signal(rank, signal.SIGKILL)
        elif event.what == "leave":
            child.leaving = True
            self._hands.tell(rank, Leave())
            if child.done:
                self._hands.tell(rank, Finish("left"))
        elif event.what == "freeze":
            self._hands.signal(rank, signal.SIGSTOP)
            child.frozen = True
            self._noticed[rank] = time.monotonic() + self._detection_s
            self._hands.say(rank, "frozen", f"node {rank} stands still")
        elif event.what == "thaw":
            self._thaws(child)
        else:
            self._hands.say(rank, event.what, event.detail)

    def _thaws(self, child: NodeState) -> None:
        if not child.frozen:
            return
        child.frozen = False
        self._noticed.pop(child.rank, None)
        self._hands.signal(child.rank, signal.SIGCONT)
        self._hands.say(child.rank, "thawed", f"node {child.rank} goes on")

    def stands(self, child: NodeState, *, still: bool) -> None:
        """A node's process was stopped, or goes on; what the schedule does is known."""
        if still and not child.frozen:
            self._stopped.add(child)
            self._noticed[child.rank] = time.monotonic() + self._detection_s
            self._hands.say(child.rank, "frozen", f"node {child.rank} stands still: it was stopped")
        elif not still and child in self._stopped:
            self._stopped.discard(child)
            self._noticed.pop(child.rank, None)
            self._hands.say(child.rank, "thawed", f"node {child.rank} goes on")

    def thaw_all(self) -> None:
        """The run ends: nobody stands still any more."""
        for rank in sorted(self._hands.alive):
            self._thaws(self._hands.nodes[rank])

    def crashes_itself(self, child: NodeState, number: int) -> None:
        """A node has completed the round of one of its crashes, and kills itself now."""
        crash = self._at_rounds[child.rank].pop(number)
        child.planned = True
        now_s = time.monotonic() - self._start
        self._agenda.add(Spell(now_s, now_s + crash.after_s, "crash", child.rank, crash.start_from))

    def bring_back(self, rank: int, start_from: StartFrom) -> None:
        """Start a node anew, as soon as its last life is over."""
        child = self._hands.nodes.get(rank)
        if rank in self._hands.alive and child is not None and not (child.planned or child.leaving):
            return
        self._coming[rank] = start_from

    def not_forked(self, rank: int, why: str) -> None:
        """A node could not be restarted."""
        self._hands.say(rank, "not-restarted", f"node {rank} can't be started anew: {why}")

    # --- who is away

    def died(self, child: NodeState, why: str) -> None:
        """A node's process is gone, and not as it should."""
        self._noticed.pop(child.rank, None)
        self._stopped.discard(child)
        self._queue = deque(each for each in self._queue if each[0] is not child)
        if self._introduction is not None and self._introduction.child is child:
            self._introduction = None
        self._lose(child.rank, why, keep=False, life=child.incarnation)
        self._go_on()

    def left(self, child: NodeState) -> None:
        """A node has left in good order."""
        why = f"node {child.rank} left after round {child.round}"
        self._hands.say(child.rank, "left", why)
        self._lose(child.rank, why, keep=True, life=child.incarnation)
        self._go_on()

    def doubt(self, child: NodeState, rank: int, why: str) -> None:
        """A node has not reached another one for so long that what it sent there is lost. If that one lives, it is
        introduced anew as soon as it is heard of."""
        if rank in self._hands.alive and child.rank not in self.away:
            text = f"node {child.rank} can't reach node {rank}: {why}"
            if rank not in self.away:
                self._hands.say(child.rank, "unreachable", text)
            self._lose(rank, text, keep=True)
            self._go_on()

    def _lose(self, rank: int, why: str, *, keep: bool, life: int | None = None) -> None:
        """Nobody waits for a node any more, or sends it anything.

        Args:
            rank: the node.
            why: the cause.
            keep: whether what it gave for moments that are not complete counts.
            life: which of its lives is over; None where it may live.
        """
        if self._introduction is not None:
            self._introduction.awaited.discard(rank)
            self._introduction.rounds.pop(rank, None)
        if rank in self.away:
            return
        self.away[rank] = why
        for other in self._present():
            self._hands.tell(other, Lost(rank, why, life))
        self._hands.without(rank, keep=keep)

    def _present(self) -> list[int]:
        return [rank for rank in sorted(self._hands.alive) if rank not in self.away]

    # --- introductions

    def ready(self, child: NodeState) -> None:
        """A node that was started anew can be introduced."""
        self._queue.append((child, True))
        self._go_on()

    def heard(self, child: NodeState) -> None:
        """A node that was taken for dead has said something."""
        if not child.arriving and not child.leaving and not child.planned:
            child.arriving = True
            self._queue.append((child, False))
            self._go_on()

    def told(self, child: NodeState, about: int, round: int) -> None:
        """A node has said which round it is in."""
        introduction = self._introduction
        if (
            introduction is not None
            and introduction.child.rank == about
            and child.rank in introduction.awaited
        ):
            introduction.awaited.discard(child.rank)
            introduction.rounds[child.rank] = round
            self._go_on()

    def _go_on(self) -> None:
        """Finish the introduction that goes on, if all has been said; begin the next one."""
        if self._introduction is not None:
            if self._introduction.awaited:
                return
            self._introduce(self._introduction)
            self._introduction = None
        if not self._queue:
            return
        child, anew = self._queue.popleft()
        others = set(self._present())
        for rank, why in sorted(self.away.items()):
            if rank != child.rank:
                self._hands.tell(child.rank, Lost(rank, why))
        for rank in sorted(others):
            self._hands.tell(rank, Find(child.rank, anew))
        if not anew:
            self._hands.tell(child.rank, Find(child.rank, anew))
            others.add(child.rank)
        self._introduction = _Introduction(child, anew, others, time.monotonic() + self._detection_s)
        self._go_on()

    def _introduce(self, introduction: _Introduction) -> None:
        child, rounds, anew = introduction.child, introduction.rounds, introduction.anew
        own = rounds.pop(child.rank, child.round)
        least = own + 1 if not anew or (self._waits and child.incarnation) else own
        first, together = meeting(rounds, least) if self._waits else (least, dict.fromkeys(sorted(rounds), 0))
        del self.away[child.rank]
        child.arriving = False
        for rank, since in together.items():
            self._hands.tell(rank, Meet(child.rank, since))
        if anew:
            self._hands.go(child, first, list(together.items()))
            kind = "returned" if child.incarnation else "joined"
        else:
            self._hands.tell(child.rank, Met(first, list(together.items())))
            kind = "returned"
        self._hands.again(child.rank, first)
        self._hands.say(child.rank, kind, f"node {child.rank} takes part from round {first} on")
