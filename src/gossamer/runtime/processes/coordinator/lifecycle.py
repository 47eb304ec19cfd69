"""The decisions in a run of real processes: events go in, commands come out.

:class:`Lifecycle` knows no process, socket, file or clock. It takes what nodes and their processes say
(``protocol.FromProcess``), each with the time at which it was heard, and returns typed commands (:data:`Command`) for the
coordinator to carry out. It decides which faults happen and when, which nodes are taken for dead, which are restarted, in
which round a node that starts or returns meets the others, whether the run can go on, and when and why it ends.

A node that starts late, or returns, is introduced: the others are told, and answer with their rounds (``At``). Then the node
is told where to begin, and it and each of the others from which round on they wait for each other. Nodes are introduced one
at a time.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossamer.config import Processes
from gossamer.faults import FaultEvent, FaultInterval, RoundCrash, StartFrom
from gossamer.node.rejoin import meeting
from gossamer.runtime.outcome import describe_waits
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.protocol import Find, Finish, Fork, Lost, Meet, Say, Signal, Tell
from gossamer.runtime.recording import end_is_due, returned_early
from gossamer.runtime.setup import Setup

UNREACHABLE_S = 5.0
"""Seconds after which a peer that was reported unreachable, but is alive, is given up."""
END_S = 30.0
"""Seconds without a message after which nodes that should end are killed."""
SAY_S = 10.0
"""Seconds after which the user is told which nodes the others wait for; then after twice as many, and so on."""
MOST_NAMED = 5
STEP_S = 1.0
"""Seconds that count at most between two looks at a stopped node: a coordinator that was itself stopped, perhaps with all of
its nodes, blames no node."""


@dataclass(frozen=True, slots=True)
class Without:
    """Wait for nothing more of a node. What it gave for incomplete evaluation points counts if ``keep``; it may return by
    itself if ``alive``."""

    rank: int
    keep: bool
    alive: bool


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Let a node take part (again) from round ``first`` on, and with each of the others from a round. A process that was
    started later begins with the model ``start_from``; None is one that was only taken for dead."""

    rank: int
    first: int
    together: list[tuple[int, int]]
    start_from: StartFrom | None


@dataclass(frozen=True, slots=True)
class Record:
    """Record an event; show it if ``show``."""

    rank: int | None
    event: str
    text: str
    show: bool = True


@dataclass(frozen=True, slots=True)
class End:
    """The run is over; ``failure`` has the arguments of :class:`~gossamer.errors.RunFailed`."""

    reason: str
    failure: dict[str, Any] | None = None


Command = Fork | Signal | Tell | Without | Rejoin | Record | Say | End


@dataclass(eq=False)
class NodeState:
    """The newest process of a node."""

    rank: int
    incarnation: int = 0
    start_from: StartFrom = "initial"
    restarts: int = 0  # that the experiment does not ask for
    round: int = 0  # rounds that it has completed, as far as is known
    ready: bool = False
    done: bool = False  # its protocol has returned
    final: bool = False  # it has handed in its last model
    idle: protocol.Idle | None = None  # its report, if nothing but a message could wake it
    idle_reports: int = 0
    planned: bool = False  # it dies because the experiment says so
    leaving: bool = False  # it was told to leave
    frozen: bool = False  # the schedule has stopped it
    stopped: bool = False  # it was stopped from outside
    arriving: bool = False  # it is away, has been heard, and is to be introduced


@dataclass(eq=False)
class _Introduction:
    """A node and the others learn each other's rounds. A node that is silent at the deadline is taken for dead."""

    node: NodeState
    restarted: bool
    awaited: set[int]
    deadline: float
    rounds: dict[int, int] = field(default_factory=dict)


class Lifecycle:
    """The decisions of one run. All times are seconds of one clock.

    Args:
        setup: what is run.
        has_room: whether there is a slot for the process of a node now.
        rounds: that nodes had completed at the checkpoint from which the run goes on (others were lost); None is the start.

    Attributes:
        nodes: the newest process of each node, by rank.
        alive: the ranks whose process has not ended.
        away: the ranks that are not there, or taken for dead, and why.
    """

    def __init__(
        self,
        setup: Setup,
        has_room: Callable[[int], bool] = lambda rank: True,
        rounds: Mapping[int, int] | None = None,
    ) -> None:
        experiment = setup.experiment
        assert isinstance(experiment.engine, Processes)
        self._setup, self._options, self._has_room = setup, experiment.engine, has_room
        self._size, self._rounds = experiment.nodes, rounds
        self._waits = experiment.algorithm.gathers
        self._lost_peer = experiment.gather.lost_peer
        self._detection_s = experiment.failures.detection_s
        self._agenda = setup.faults.event_queue()
        self._at_rounds: dict[int, list[RoundCrash]] = {
            rank: list(crashes) for rank, crashes in setup.faults.at_rounds.items()
        }
        self.nodes: dict[int, NodeState] = {}
        self.alive: set[int] = set()
        self.away: dict[int, str] = {}
        self._commands: list[Command] = []
        self._began: float | None = None
        self._start_deadline = math.inf
        self._now = self._heard_at = 0.0
        self._early: list[FaultEvent] = []
        self._lost_before = [] if rounds is None else [r for r in range(self._size) if r not in rounds]
        self._restarting: dict[int, StartFrom] = {}  # as soon as their last process has ended
        self._queue: deque[tuple[NodeState, bool]] = deque()  # to be introduced
        self._introduction: _Introduction | None = None
        self._noticed: dict[int, float] = {}  # when a stopped node is taken for dead
        self._looked = math.inf
        self._since: dict[int, float] = {}  # when those that are away were first seen to be
        self._say_after_s = SAY_S
        self._suspects: dict[
            tuple[int, int], tuple[float, str]
        ] = {}  # a node, a peer: since when, why not reached
        self._wiped = False  # messages may have been lost with a node: their numbers say nothing any more
        self._due: str | None = None
        self._ending = False

    # --- the driver's side

    def start(self, now: float) -> list[Command]:
        """Start the nodes that are there from the beginning."""
        self._now = now
        self._start_deadline = now + self._options.start_timeout_s
        for fault in self._agenda.due(0.0):
            if fault.what == "join" and fault.node is not None:
                self.away[fault.node] = "not there yet"
            else:
                self._early.append(fault)
        for rank in range(self._size):
            if rank not in self.away and rank not in self._lost_before:
                self._start_node(rank)
                self.nodes[rank].round = 0 if self._rounds is None else self._rounds[rank]
        for rank in self._lost_before:
            self._without(rank, keep=False)
        return self._done()

    @property
    def up(self) -> bool:
        """Whether all nodes that were started are ready."""
        return all(node.ready for node in self.nodes.values())

    def begin(self, now: float) -> list[Command]:
        """All nodes are up: let them go."""
        self._now = self._began = self._looked = now
        for rank, why in sorted(self.away.items()):
            self._tell_lost(rank, why)
        self._tell_all(sorted(self.alive), protocol.Go(now))
        for rank in self._lost_before:
            self._tell_lost(rank, f"node {rank} was lost before the run was resumed")
        for rank, why in sorted(self.away.items()):
            self._do(Record(rank, "absent", f"node {rank} is {why}"))
            self._without(rank, keep=False)
        for fault in self._early:
            self._happens(fault)
        return self._done()

    def timeout(self, now: float, longest: float) -> float:
        """Seconds until something is due, but no more than ``longest``."""
        if self._began is None:
            return longest
        due = min([self._began + self._agenda.next_s, *self._noticed.values()])
        return min(max(due - now, 0.0), longest)

    def look(self, now: float) -> list[Command]:
        """Let happen what is due, once all messages until now were taken."""
        self._now = now
        if self._due is not None:
            self._do(End(self._due))
        elif self._began is not None:
            self._look_at_nodes(now - self._began)
        elif now > self._start_deadline:
            late = [node.rank for node in self.nodes.values() if not node.ready]
            self._fail(
                f"nodes {late} were not up within engine.start_timeout_s = {self._options.start_timeout_s}"
            )
        return self._done()

    def _look_at_nodes(self, now_s: float) -> None:
        for fault in self._agenda.due(now_s):
            self._happens(fault)
        self._look_at_stopped()
        if self._waits and self._lost_peer == "wait":
            self._look_at_away()
        for rank in [rank for rank in self._restarting if rank not in self.alive and self._has_room(rank)]:
            self._start_node(rank, self._restarting.pop(rank))
        if self._introduction is not None and self._now > self._introduction.deadline:
            for rank in sorted(self._introduction.awaited):
                self._lose(rank, f"node {rank} is silent", keep=True)
            self._introduce_next()
        self._look_at_the_end()

    def end(self, reason: str) -> None:
        """The run is to end in order: "time", "target" or "stopped"."""
        self._due = self._due or reason

    def take(self, rank: int, message: protocol.FromProcess, now: float) -> list[Command]:
        """A node has said something, or something happened to its process."""
        self._now, node = now, self.nodes[rank]
        match message:
            case protocol.Stood(still=still):
                self._stands(node, still=still)
            case protocol.Exited(how=how):
                self._exited(node, how)
            case protocol.NotStarted(why=why):
                self.alive.discard(rank)
                text = f"node {rank} can't be started: {why}"
                if self._began is None:
                    self._fail(text)
                else:
                    self._do(Record(rank, "not-restarted", text))
            case _:
                self._heard_at = now
                if rank in self.away and self._began is not None and node.ready:
                    self._heard(node)
                self._said(node, message)
        return self._done()

    def _said(self, node: NodeState, message: protocol.FromProcess) -> None:
        match message:
            case protocol.Ready():
                node.ready = True
                if self._began is not None:
                    self._arrives(node, restarted=True)
            case protocol.Progress(round=round):
                node.round = max(node.round, round)
            case protocol.Row(row=row):
                node.round = max(node.round, row["round"])
            case protocol.TimeUp():
                self.end("time")
            case protocol.Done(round=round):
                node.done, node.round = True, round
                if node.leaving:
                    self._tell(node.rank, Finish("left"))
            case protocol.Final(round=round):
                node.final, node.round = True, round
                if node.leaving and not self._ending:
                    self._left(node)
            case protocol.At(rank=about, round=round):
                self._is_at(node, about, round)
            case protocol.Crash(number=number):
                crash = self._at_rounds[node.rank].pop(number)
                node.planned = True
                now_s = self._now - (self._began or self._now)
                self._agenda.add(
                    FaultInterval(now_s, now_s + crash.after_s, "crash", node.rank, crash.start_from)
                )
            case protocol.Idle(waits=waits):
                node.idle = None if waits is None else message
                node.idle_reports = 0 if waits is None else node.idle_reports + 1
            case protocol.Unreachable(rank=peer, why=None):
                self._suspects.pop((node.rank, peer), None)
            case protocol.Unreachable(rank=peer, why=str(why)) if not self._ending:
                if self._lost_peer == "fail":
                    self._suspects.setdefault((node.rank, peer), (self._now, why))
                else:
                    self._doubt(node, peer, why)
            case protocol.Failed(text=text, round=round, trace=trace):
                where = f"in round {round}" if self._began is not None else "at start"
                said = f"node {node.rank} failed {where}: {text}"
                self._fail(said, node=node.rank, round=round, traceback=trace)

    # --- ending

    def finish(self, reason: str, checkpoint: int | None, now: float) -> list[Command]:
        """Have every node end in order, with a last checkpoint if it has a number, after :class:`End` without a failure."""
        self._now = self._heard_at = now
        self._ending = True
        there = [self.nodes[rank] for rank in self.awaited()]
        rounds = {node.rank: node.round for node in there if not (node.leaving and node.done)}
        for rank in sorted(self.alive):
            self._thaw(self.nodes[rank])
        row = end_is_due(self._setup, reason, rounds)
        for rank in sorted(self.alive):
            self._tell(rank, Finish(reason, checkpoint, row))
        if reason == "rounds" and (early := returned_early(self._setup, rounds)) is not None:
            self._do(Record(None, "ended-early", early))
        return self._done()

    def over(self, now: float) -> bool:
        """Whether all nodes that are awaited have handed in their last model, or have been silent for too long."""
        waiting = [rank for rank in self.awaited() if not self.nodes[rank].final]
        return not waiting or now > self._heard_at + END_S

    def give_up(self) -> list[Command]:
        """Kill the nodes that do not end with the others; the others' outcome stands."""
        for rank in sorted(self.alive):
            if not self.nodes[rank].final:
                self._do(Signal(rank, signal.SIGKILL))
                self._do(Say(f"node {rank} did not end with the others, and was killed"))
                self._exited(self.nodes[rank], "killed by SIGKILL")
        return self._done()

    def awaited(self) -> list[int]:
        """The nodes whose rounds the run waits for: those that are there, or will be again. A node that was stopped, and not
        by the schedule, may stay so for good."""
        return [
            rank
            for rank in sorted(self.alive)
            if rank not in self.away or self.nodes[rank].frozen or self.nodes[rank].arriving
        ]

    def _look_at_the_end(self) -> None:
        """Whether the run is over, or can't go on."""
        awaited = self.awaited()
        if awaited and all(self.nodes[rank].done for rank in awaited):
            self._do(End("rounds"))
        elif not self.alive and not self._expects():
            self._fail(f"no node is left: {'; '.join(self.away.values())}")
        else:
            self._look_at_suspects()
            self._look_for_deadlock()

    def _look_at_suspects(self) -> None:
        """A peer that could not be reached is dead, which its process says, or is given up after a while."""
        for (reporter, rank), (since, why) in list(self._suspects.items()):
            if rank in self.alive and self._now - since < UNREACHABLE_S:
                continue
            del self._suspects[reporter, rank]
            if rank in self.alive and reporter in self.alive:
                text = f"node {reporter} can't reach node {rank}: {why}"
                self._do(Record(reporter, "unreachable", text, show=False))
                self._fail(text, node=reporter)

    def _look_for_deadlock(self) -> None:
        """All nodes wait for messages, none is on its way, and no end of time is set: they wait forever. (Not while a peer
        may be given up: that may be what they wait for, and is the better reason.)"""
        timed = self._setup.experiment.stop.time_s is not None
        if self._suspects or timed or self._wiped or len(self.alive) < self._size:
            return
        nodes = [node for _, node in sorted(self.nodes.items())]
        idle = {node.rank: node.idle for node in nodes if node.idle is not None and node.idle_reports >= 2}
        under_way = sum(each.sent - each.received for each in idle.values())
        if len(idle) < self._size or under_way:
            return
        waits = {rank: each.waits or [] for rank, each in idle.items()}
        returned = {node.rank: node.round for node in nodes if node.done}
        self._fail(f"all nodes wait and nothing is under way: {describe_waits(waits, returned)}")

    def _fail(self, message: str, **details: Any) -> None:
        self._do(End("failed", {"message": message, **details}))

    # --- faults

    def _expects(self) -> bool:
        """Whether a node may still start or return."""
        return bool(self._restarting) or any(map(self._agenda.returns, range(self._size)))

    def _happens(self, fault: FaultEvent) -> None:
        rank = fault.node
        if rank is None:
            self._do(Record(None, fault.what, fault.detail))
            return
        node = self.nodes.get(rank)
        if fault.what == "return":
            self._bring_back(rank, fault.start_from)
        elif node is None or rank not in self.alive:
            return
        elif fault.what == "crash":
            node.planned = True
            self._do(Signal(rank, signal.SIGKILL))
        elif fault.what == "leave":
            node.leaving = True
            self._tell(rank, protocol.Leave())
            if node.done:
                self._tell(rank, Finish("left"))
        elif fault.what == "freeze":
            self._do(Signal(rank, signal.SIGSTOP))
            node.frozen = True
            self._notice(rank, f"node {rank} stands still")
        elif fault.what == "thaw":
            self._thaw(node)
        else:
            self._do(Record(rank, fault.what, fault.detail))

    def _thaw(self, node: NodeState) -> None:
        if node.frozen:
            node.frozen = False
            self._do(Signal(node.rank, signal.SIGCONT))
            self._goes_on(node.rank)

    def _bring_back(self, rank: int, start_from: StartFrom) -> None:
        """Restart a node, as soon as its last process has ended."""
        node = self.nodes.get(rank)
        if rank not in self.alive or node is None or node.planned or node.leaving:
            self._restarting[rank] = start_from

    def _start_node(self, rank: int, start_from: StartFrom = "initial") -> None:
        before = self.nodes.get(rank)
        node = self.nodes[rank] = NodeState(rank, start_from=start_from)
        if before is not None:
            node.incarnation = before.incarnation + 1
            node.round, node.restarts = before.round, before.restarts
        self.alive.add(rank)
        self._do(Fork(rank, node.incarnation, [crash.round for crash in self._at_rounds.get(rank, ())]))

    # --- nodes that were stopped

    def _stands(self, node: NodeState, *, still: bool) -> None:
        """A process was stopped, or goes on; what the schedule does is known."""
        if still and not node.frozen:
            node.stopped = True
            self._notice(node.rank, f"node {node.rank} stands still: it was stopped")
        elif not still and node.stopped:
            node.stopped = False
            self._goes_on(node.rank)

    def _notice(self, rank: int, text: str) -> None:
        self._noticed[rank] = self._now + self._detection_s
        self._do(Record(rank, "frozen", text))

    def _goes_on(self, rank: int) -> None:
        self._noticed.pop(rank, None)
        self._do(Record(rank, "thawed", f"node {rank} goes on"))

    def _look_at_stopped(self) -> None:
        passed, self._looked = self._now - self._looked, self._now
        for rank, due in list(self._noticed.items()):
            self._noticed[rank] = due = due + max(passed - STEP_S, 0.0)
            if due > self._now:
                continue
            del self._noticed[rank]
            node, text = self.nodes[rank], f"node {rank} stands still"
            if rank not in self.alive:
                continue
            if node.stopped and self._lost_peer == "fail":
                self._fail(f"{text}: it was stopped", node=rank, round=node.round)
            else:
                self._lose(rank, text, keep=True)

    # --- nodes that are away

    def _look_at_away(self) -> None:
        """Tell the user which nodes the others wait for, ever more rarely."""
        self._since = {rank: self._since.get(rank, self._now) for rank in sorted(self.away)}
        longest_s = self._now - min(self._since.values(), default=self._now)
        if not self._since:
            self._say_after_s = SAY_S
        elif longest_s >= self._say_after_s:
            self._say_after_s = 2 * longest_s
            named = [
                f"node {rank} (away for {self._now - since:.0f} s)" for rank, since in self._since.items()
            ]
            more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
            least = min((self.nodes[rank].round for rank in self._present()), default=0)
            waited = f"{', '.join(named[:MOST_NAMED])}{more}"
            self._do(Say(f"waiting for {waited}; the others are in round {least} or later"))

    def _exited(self, node: NodeState, how: str) -> None:
        self.alive.discard(node.rank)
        if node.final and (self._ending or node.leaving):
            return
        text = f"node {node.rank} {'crashed' if node.planned else 'died'} in round {node.round}: {how}"
        self._do(Record(node.rank, "lost", text, show=False))
        if self._ending:
            return
        again = self._options.restart == "always" and node.restarts < self._options.restart_limit
        if self._began is None or (self._lost_peer == "fail" and not (node.planned or again)):
            self._fail(text, node=node.rank, round=node.round)
            return
        self._do(Say(text))
        self._gone(node, text, keep=False)
        if again and not node.planned:
            node.restarts += 1
            self._bring_back(node.rank, "checkpoint")
        if not self.alive and not self._expects():
            self._fail(f"every node died; the last one: {text}")

    def _left(self, node: NodeState) -> None:
        """A node has left in order."""
        why = f"node {node.rank} left after round {node.round}"
        self._do(Record(node.rank, "left", why))
        self._gone(node, why, keep=True)

    def _gone(self, node: NodeState, why: str, *, keep: bool) -> None:
        """A process is over."""
        self._noticed.pop(node.rank, None)
        node.stopped = False
        self._queue = deque(each for each in self._queue if each[0] is not node)
        if self._introduction is not None and self._introduction.node is node:
            self._introduction = None
        self._lose(node.rank, why, keep=keep, incarnation=node.incarnation)
        self._introduce_next()

    def _doubt(self, node: NodeState, rank: int, why: str) -> None:
        """A node has not reached another one for so long that what it sent there is lost. If that one runs, it is
        introduced again as soon as it is heard."""
        if rank in self.alive and node.rank not in self.away:
            text = f"node {node.rank} can't reach node {rank}: {why}"
            if rank not in self.away:
                self._do(Record(node.rank, "unreachable", text))
            self._lose(rank, text, keep=True)
            self._introduce_next()

    def _lose(self, rank: int, why: str, *, keep: bool, incarnation: int | None = None) -> None:
        """No node waits for this one any more, or sends it anything."""
        if self._introduction is not None:
            self._introduction.awaited.discard(rank)
            self._introduction.rounds.pop(rank, None)
        if rank not in self.away:
            self.away[rank] = why
            self._tell_lost(rank, why, incarnation)
            self._without(rank, keep=keep)

    def _tell_lost(self, rank: int, why: str, incarnation: int | None = None) -> None:
        self._tell_all(self._present(), Lost(rank, why, incarnation))

    def _without(self, rank: int, *, keep: bool) -> None:
        self._wiped = True
        self._do(Without(rank, keep, rank in self.alive and not self.nodes[rank].leaving))

    def _present(self) -> list[int]:
        return [rank for rank in sorted(self.alive) if rank not in self.away]

    # --- introductions

    def _heard(self, node: NodeState) -> None:
        """A node that was taken for dead has said something."""
        if not node.arriving and not node.leaving and not node.planned:
            self._arrives(node, restarted=False)

    def _arrives(self, node: NodeState, *, restarted: bool) -> None:
        node.arriving = True
        self._queue.append((node, restarted))
        self._introduce_next()

    def _is_at(self, node: NodeState, about: int, round: int) -> None:
        """A node has said which round it is in."""
        introduction = self._introduction
        if introduction is not None and introduction.node.rank == about and node.rank in introduction.awaited:
            introduction.awaited.discard(node.rank)
            introduction.rounds[node.rank] = round
            self._introduce_next()

    def _introduce_next(self) -> None:
        """Finish the current introduction, if all nodes have answered; begin the next one."""
        if self._introduction is not None:
            if self._introduction.awaited:
                return
            introduction, self._introduction = self._introduction, None
            self._introduce(introduction)
        if not self._queue:
            return
        node, restarted = self._queue.popleft()
        for rank, why in sorted(self.away.items()):
            if rank != node.rank:
                self._tell(node.rank, Lost(rank, why))
        asked = self._present() if restarted else [*self._present(), node.rank]
        self._tell_all(asked, Find(node.rank, restarted))
        self._introduction = _Introduction(node, restarted, set(asked), self._now + self._detection_s)
        self._introduce_next()

    def _introduce(self, introduction: _Introduction) -> None:
        node, rounds, restarted = introduction.node, introduction.rounds, introduction.restarted
        own = rounds.pop(node.rank, node.round)
        least = own + 1 if not restarted or (self._waits and node.incarnation) else own
        first, together = meeting(rounds, least) if self._waits else (least, dict.fromkeys(sorted(rounds), 0))
        del self.away[node.rank]
        node.arriving = False
        for rank, since in together.items():
            self._tell(rank, Meet([(node.rank, since)]))
        self._do(Rejoin(node.rank, first, list(together.items()), node.start_from if restarted else None))
        kind = "returned" if node.incarnation or not restarted else "joined"
        self._do(Record(node.rank, kind, f"node {node.rank} takes part from round {first} on"))

    # --- commands

    def _tell(self, rank: int, message: protocol.ToNode) -> None:
        self._do(Tell(rank, message))

    def _tell_all(self, ranks: Iterable[int], message: protocol.ToNode) -> None:
        for rank in ranks:
            self._tell(rank, message)

    def _do(self, command: Command) -> None:
        self._commands.append(command)

    def _done(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands
