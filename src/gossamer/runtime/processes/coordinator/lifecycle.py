"""The decisions in a run of real processes, which the coordinator executes. :mod:`gossamer.runtime.life` has the rules
that a simulation shares.

:class:`Lifecycle` uses no process, socket, file or clock, and calls nothing that does. It takes messages from
nodes and about their processes, each with its time of arrival, and returns what is to be done. It decides which
faults happen and when, which nodes are considered dead, which are restarted, in which round a node that starts or
returns meets the others, whether the run can continue, and when and why it ends.

A node that starts late or returns is introduced. The others are notified, and answer with their rounds. Then
the node learns its first round, and it and each of the others learn from which round on they wait for each
other. Nodes are introduced one at a time.

Two nodes that the coordinator hears, and that can't reach each other, take part without each other: that is a fact about
the pair. Both try again, and as soon as each has reached the other one they are brought together like a node that
returns, except that nobody else is concerned."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from gossamer.config import Processes
from gossamer.errors import RunFailed
from gossamer.faults import FaultEvent, StartFrom
from gossamer.node.rejoin import rejoin_round
from gossamer.results.formatting import some
from gossamer.runtime import life
from gossamer.runtime.outcome import describe_waits
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.protocol import (
    Find,
    Finish,
    Fork,
    Lost,
    Meet,
    Signal,
    Tell,
    ToPool,
    Violation,
    report_every_s,
)
from gossamer.runtime.recording import EARLY, end_is_due, ended_early
from gossamer.runtime.setup import Setup

END_S = 30.0
"""Seconds without a message after which nodes that should end are killed."""
LAST_S = 3_600.0
"""Seconds without a row, a file or a last model after which such nodes are killed, although they say that they are alive:
a last evaluation may take long."""
CHECK_SILENCE_S = 1.0
"""Seconds between two checks for silent nodes."""
MAX_PAIR_EVENTS = 1_000
"""Events of pairs of nodes that are recorded and shown."""
REPORT_WAITS_S = 30.0
"""Seconds without a completed round after which the user is told, repeatedly, what nodes wait for."""


@dataclass(frozen=True)
class RecordEvent:
    """Write an event of a node, or of the run (None), and show it to the user unless ``show`` is False."""

    rank: int | None
    event: str
    text: str
    show: bool = True


@dataclass(frozen=True)
class Show:
    """Show a text to the user."""

    text: str


@dataclass(frozen=True)
class Without:
    """Stop waiting for a node. Its values for incomplete evaluation points count only if ``keep``. A node that is not
    ``gone`` is frozen or unreachable, and its last value counts for the target."""

    rank: int
    keep: bool
    gone: bool = True


@dataclass(frozen=True)
class Rejoin:
    """Let a node take part (again) from round ``first`` on. ``together`` gives, for each other node, the round from
    which on the two wait for each other. A new process begins with the model ``start_from``, which is None for a
    process that was only considered dead."""

    rank: int
    first: int
    together: list[tuple[int, int]]
    start_from: StartFrom | None


@dataclass(frozen=True)
class HoldCheckpoints:
    """Make no checkpoint for now: two nodes take part without each other."""

    why: str


@dataclass(frozen=True)
class ReleaseCheckpoints:
    """Make checkpoints again."""


@dataclass(frozen=True)
class End:
    """End the run gracefully: "rounds", "time", "bytes", "target", "diverged" or "stopped"."""

    reason: str


@dataclass(frozen=True)
class Fail:
    """End the run, which can't continue."""

    error: RunFailed


Decision = ToPool | RecordEvent | Show | Without | Rejoin | HoldCheckpoints | ReleaseCheckpoints | End | Fail
"""What the coordinator executes. Nothing after an end or a failure counts."""


@dataclass(eq=False)
class NodeState:
    """The newest process of a node."""

    rank: int
    incarnation: int
    start_from: StartFrom
    restarts: int  # restarts beyond those in the experiment
    round: int  # completed rounds, as last reported
    address: tuple[str, int] | None = None  # once it is ready
    waits: list[str] | None = None  # what it waits for, as last reported
    met: bool = False  # it has taken part
    done: bool = False  # its protocol has returned
    final: bool = False  # it has delivered its last model
    planned: bool = False  # its death is planned by the experiment
    leaving: bool = False  # it was told to leave
    returns: StartFrom | None = (
        None  # it was told to stay after all; the model to start from if that was too late
    )
    frozen: bool = False  # the schedule has stopped it
    arriving: bool = False  # it waits to be introduced
    crashing: bool = False  # it has said that it kills itself
    silent_s: float = (
        0.0  # since it last did what is expected of it, as far as the coordinator was not busy itself
    )


@dataclass(eq=False)
class CutPair:
    """Two nodes that take part without each other."""

    why: str
    unreached: set[int]  # those of the two that have yet to reach the other one
    rounds: dict[int, int] = field(default_factory=dict)  # of those that were asked since both have


class Lifecycle:
    """The decisions of one run, in seconds of one clock. ``rounds`` holds the nodes' completed rounds at the
    checkpoint from which the run resumes; nodes that it lacks were lost."""

    def __init__(self, setup: Setup, rounds: Mapping[int, int] | None = None) -> None:
        experiment = self._experiment = setup.experiment
        assert isinstance(experiment.engine, Processes)
        self._setup, self._options = setup, experiment.engine
        self._decisions: list[Decision] = []  # since the last call
        self._rounds = dict.fromkeys(range(experiment.nodes), 0) if rounds is None else rounds
        self._gathers = experiment.algorithm.gathers
        self._needs_all = experiment.gather.lost_peer == "fail"
        self._waits = self._gathers and experiment.gather.lost_peer == "wait"
        self._fault_queue = setup.faults.event_queue()
        self._at_rounds = {rank: list(crashes) for rank, crashes in setup.faults.at_rounds.items()}
        self.nodes: dict[int, NodeState] = {}  # the newest process of each node, by rank
        self.presence = life.Membership(())
        self.alive = self.presence.up  # the ranks whose process has not ended
        self._lost = self.presence.lost
        self.killed = False  # whether a process has ended without its last model
        self._began: float | None = None
        self._start_deadline = math.inf
        self._now = self._last_message_at = self._last_result_at = self._last_progress_at = 0.0
        self._silence_checked_at = 0.0
        # A worker that is out of reach keeps its nodes for detection_s; many nodes report rarely.
        self._longest_silence_s = max(
            self._options.start_timeout_s,
            experiment.failures.detection_s,
            10 * report_every_s(experiment.nodes),
        )
        # A node that is heard more often than this takes part, even if another one can't reach it.
        self._unheard_s = max(
            experiment.failures.detection_s / 2, 2 * report_every_s(experiment.nodes) + CHECK_SILENCE_S
        )
        self._cut: dict[frozenset[int], CutPair] = {}
        self._pair_events = 0
        self._meeting: dict[
            frozenset[int], int
        ] = {}  # pairs until both have come to the round from which they wait
        self._unplanned: dict[int, str] = {}  # why ranks were lost or unreachable, if no fault planned it
        self._initial_faults: list[FaultEvent] = []
        self._restarts = self.presence.restarts
        self._frozen: dict[int, float] = {}  # when a node that the schedule has stopped is considered dead
        self._queue: deque[NodeState] = deque()  # nodes to introduce
        self._newcomer: NodeState | None = None  # the node that is being introduced
        self._awaited: set[int] = set()  # ranks that have yet to report their rounds
        self._reported_rounds: dict[int, int] = {}  # by rank
        self._end_reason: str | None = None
        self._ending = False

    # --- events

    def start(self, now: float) -> list[Decision]:
        """Start the nodes that are present from the beginning."""
        self._now = now
        self._start_deadline = now + self._options.start_timeout_s
        self._initial_faults = list(self._fault_queue.due(0.0))
        for fault in self._initial_faults:
            if fault.what == "join" and fault.node is not None:
                self.presence.keep_away(fault.node, life.absent(fault.node).text)
        for rank in range(self._experiment.nodes):
            if rank not in self._rounds:
                self.presence.keep_away(rank, life.missing_since_checkpoint(rank).text)
            if rank in self._lost:
                self._decide(Without(rank, keep=False))
            else:
                self._start_node(rank, "initial")
        return self._decided()

    def begin(self, now: float) -> list[Decision]:
        """All nodes are up."""
        self._now = self._began = self._last_progress_at = self._silence_checked_at = now
        for rank, why in sorted(self.presence.why.items()):
            self._tell_all(self._present(), Lost(rank, why))
            self._record(rank, "absent", why)
        for node in self.nodes.values():
            node.met = True
        self._tell_all(sorted(self.alive), self._addresses())
        self._tell_all(sorted(self.alive), protocol.Go(now))
        for fault in self._initial_faults:
            self._execute(fault)
        return self._decided()

    def run_due(self, now: float) -> list[Decision]:
        """Decide what is due. Must be called after all messages that have arrived were taken."""
        self._now = now
        if self._end_reason is not None:
            self._decide(End(self._end_reason))
        elif self._began is not None:
            self._check_nodes(now - self._began)
        elif now > self._start_deadline:
            limit = f"engine.start_timeout_s = {self._options.start_timeout_s}"
            self._fail(f"nodes {self.not_up} were not up within {limit}")
        return self._decided()

    def restart(self, rank: int, now: float) -> list[Decision]:
        """There is room for the new process of a node that is :attr:`to_restart`."""
        self._now = now
        self._start_node(rank, self._restarts.pop(rank))
        return self._decided()

    def _check_nodes(self, now_s: float) -> None:
        for fault in self._fault_queue.due(now_s):
            self._execute(fault)
        for rank in [rank for rank, due in self._frozen.items() if due <= self._now]:
            del self._frozen[rank]
            self._lose(rank, life.frozen(rank).text, keep=True)
        self._check_silence()
        self._report_waits()
        self._check_end()

    def _check_silence(self) -> None:
        """A node that says nothing for too long has crashed, and so has one that does not end when it was killed, or does not
        answer when a node is introduced. Silence is not counted by the clock: a coordinator that was itself stopped blames
        no node."""
        if (passed_s := self._now - self._silence_checked_at) < CHECK_SILENCE_S:
            return
        self._silence_checked_at = self._now
        for node in [self.nodes[rank] for rank in sorted(self.alive)]:
            node.silent_s += 0.0 if node.frozen else min(passed_s, 2 * CHECK_SILENCE_S)
            if node.silent_s > self._unheard_s and node.rank not in self._lost:
                for pair in [pair for names, pair in self._cut.items() if node.rank in names][:1]:
                    self._unplanned[node.rank] = pair.why
                    self._lose(node.rank, pair.why, keep=True)
            if node.silent_s > self._longest_silence_s:
                what = "was not up within" if node.address is None else "did not answer for"
                self._decide(Signal(node.rank, signal.SIGKILL))
                self._exited(node, f"it {what} {self._longest_silence_s:g} s (engine.start_timeout_s)")

    def end(self, reason: str) -> None:
        """End the run gracefully, for this reason: "time", "bytes", "target", "diverged" or "stopped"."""
        self._end_reason = self._end_reason or reason

    def take(self, rank: int, message: protocol.FromProcess, now: float) -> list[Decision]:
        """A message from a node, or about its process, has arrived."""
        self._now, node = now, self.nodes[rank]
        if isinstance(message, protocol.Exited):
            self._exited(node, message.how)
        else:
            self._heard(node, message)
        return self._decided()

    def _heard(self, node: NodeState, message: protocol.FromNode) -> None:
        rank, self._last_message_at = node.rank, self._now
        if not (node.planned or rank in self._awaited):
            node.silent_s = 0.0
        if not isinstance(message, protocol.Progress):
            self._last_result_at = self._now
        # A node that was considered dead, and is not about to leave, has sent a message.
        back = rank in self._lost and node.met
        if back and not (node.arriving or node.leaving or node.planned):
            self._arrive(node)
        self._handle(node, message)

    def check(self, rank: int, message: protocol.FromProcess) -> None:
        """Raise Violation for a message that a node does not send in its state."""
        node = self.nodes[rank]
        match message:
            case protocol.Row() | protocol.Done() | protocol.Crashing() if not node.met:
                raise Violation(f"{type(message).__name__} of node {rank}, which does not take part yet")
            case protocol.Row() | protocol.FinalModel() if node.final:
                raise Violation(f"{type(message).__name__} of node {rank} after its last model")
            case _ if node.crashing and not isinstance(message, protocol.Exited):
                raise Violation(f"{type(message).__name__} of node {rank}, which had crashed")
            case protocol.Crashing(number=number) if number >= len(self._at_rounds.get(rank, ())):
                raise Violation(f"crash {number} of node {rank}, which is not planned")

    def _handle(self, node: NodeState, message: protocol.FromNode) -> None:
        match message:
            case protocol.Ready(host=host, port=port) if node.address is None:
                node.address = host, port
                if self._began is not None:
                    self._tell(node.rank, self._addresses())
                    self._tell_all(self.alive - {node.rank}, protocol.Addresses([(node.rank, host, port)]))
                    self._arrive(node)
            case protocol.Progress(round=round, time_s=time_s, waits=waits):
                self._completed(node, round)
                node.waits = waits
                if (stop_s := self._experiment.stop.time_s) is not None and time_s >= stop_s:
                    self.end("time")
            case protocol.Row(values=values):
                self._completed(node, values.round)
            case protocol.Done(round=round, leaves=leaves):
                node.done, node.round = True, round
                self._release_checkpoints()
                if leaves and not node.leaving and node.returns:  # it was too late to stay
                    node.leaving = True
                    self._restarts[node.rank] = node.returns
                if node.leaving:
                    self._tell(node.rank, Finish("left"))
            case protocol.FinalModel(round=round):
                node.final = True
                if node.met:
                    node.round = round
                if node.leaving and not self._ending:
                    left = life.left(node.rank, node.round)
                    self._record(*left)
                    self._gone(node, left.text, keep=True)
            case protocol.CurrentRound(rank=about, round=round) if (
                pair := self._cut.get(frozenset((node.rank, about)))
            ) is not None:
                if not pair.unreached:
                    pair.rounds[node.rank] = round
                    self._bring_together(pair)
            case protocol.CurrentRound(rank=about, round=round):
                if self._newcomer is not None and self._newcomer.rank == about and node.rank in self._awaited:
                    self._awaited.discard(node.rank)
                    node.silent_s = 0.0
                    self._reported_rounds[node.rank] = round
                    self._introduce_next()
            case protocol.Crashing(number=number):
                crash = self._at_rounds[node.rank].pop(number)
                node.planned = node.crashing = True
                now_s = self._now - (self._began or self._now)
                self._fault_queue.add(crash.now(now_s))
            case protocol.Unreachable(rank=peer, why=why) if not self._ending:
                self._unreachable(node, peer, f"node {node.rank} can't reach node {peer}: {why}")
            case protocol.Reached(rank=peer) if not self._ending:
                self._reached(node, peer)
            case protocol.Failed(text=text, round=failed_in, traceback=trace):
                self._fail(text, node=node.rank, round=failed_in, traceback=trace)

    def _addresses(self) -> protocol.Addresses:
        nodes = self.nodes.values()
        return protocol.Addresses([(node.rank, *node.address) for node in nodes if node.address is not None])

    def _completed(self, node: NodeState, round: int) -> None:
        if round > node.round:
            node.round, self._last_progress_at = round, self._now
            self._release_checkpoints()

    # --- what the driver asks

    @property
    def up(self) -> bool:
        return not self.not_up

    @property
    def not_up(self) -> list[int]:
        """The nodes that do not accept connections yet."""
        return [node.rank for node in self.nodes.values() if node.address is None]

    @property
    def to_restart(self) -> list[int]:
        """The nodes that need a new process, now that their last one has ended."""
        return [rank for rank in self._restarts if rank not in self.alive]

    def timeout(self, now: float, longest: float) -> float:
        if self._began is None:
            return longest
        due = min([self._began + self._fault_queue.next_s, *self._frozen.values()])
        return min(max(due - now, 0.0), longest)

    # --- ending

    def finish(self, reason: str, checkpoint: int | None, now: float) -> list[Decision]:
        """After :class:`End`: tell every node to end, with ``checkpoint`` as the last one if given."""
        self._now = self._last_message_at = self._last_result_at = now
        self._ending = True
        nodes = [self.nodes[rank] for rank in self.awaited()]
        rounds = {node.rank: node.round for node in nodes if not (node.leaving and node.done)}
        for rank in sorted(self.alive):
            self._thaw(self.nodes[rank])
        self._tell_all(
            sorted(self.alive), Finish(reason, checkpoint, end_is_due(self._setup, reason, rounds))
        )
        if reason == "rounds" and ended_early(self._setup, rounds):
            self._record(None, "ended-early", EARLY)
        return self._decided()

    def over(self, now: float) -> bool:
        """Whether all awaited nodes have delivered their last model, or have been silent for too long."""
        waiting = [rank for rank in self.awaited() if not self.nodes[rank].final]
        silent = now > self._last_message_at + END_S
        return not waiting or silent or now > self._last_result_at + LAST_S

    def give_up(self) -> list[Decision]:
        """Kill the nodes that did not end with the others. The others' outcome stands."""
        for rank in sorted(self.alive):
            if not self.nodes[rank].final:
                self._decide(Signal(rank, signal.SIGKILL))
                self._decide(Show(f"node {rank} did not end with the others, and was killed"))
                self._exited(self.nodes[rank], "killed by SIGKILL")
        return self._decided()

    def awaited(self) -> list[int]:
        """The nodes whose rounds the run waits for: those that are present or will return."""
        return [
            rank
            for rank in sorted(self.alive)
            if rank not in self._lost or self.nodes[rank].frozen or self.nodes[rank].arriving
        ]

    def missed(self) -> RunFailed | None:
        """The failure of a run in which nodes were lost or unreachable before they completed a round, which no fault had
        planned."""
        missed = [
            rank
            for rank, node in sorted(self.nodes.items())
            if rank in self._unplanned and rank in self._lost and not node.round and not node.planned
            if self._setup.takes_part(rank, 0)
        ]
        if not missed:
            return None
        named = f"node{'s' * (len(missed) > 1)} {some([*map(str, missed)])}"
        why = some([*dict.fromkeys(self._unplanned[rank] for rank in missed)])
        return RunFailed(f"{named} completed no round: {why}", node=missed[0], round=0)

    def _report_waits(self) -> None:
        if self._now >= self._last_progress_at + REPORT_WAITS_S:
            self._last_progress_at = self._now
            nodes = [self.nodes[rank] for rank in self._present()]
            if waits := {node.rank: node.waits for node in nodes if node.waits and not node.done}:
                returned = {node.rank: node.round for node in nodes if node.done}
                self._decide(
                    Show(f"no round has ended for {REPORT_WAITS_S:g} s: {describe_waits(waits, returned)}")
                )

    def _check_end(self) -> None:
        awaited = self.awaited()
        # A node that is about to leave has returned early; it may be the last one, or come back.
        if awaited and all(self.nodes[rank].done and not self.nodes[rank].leaving for rank in awaited):
            self._decide(End("rounds"))
        elif (failure := self.presence.nobody(self._fault_queue)) is not None:
            self._decide(Fail(failure))

    # --- faults

    def _state(self, rank: int) -> life.State:
        if rank not in self.alive:
            return "away"
        node = self.nodes[rank]
        if node.planned or (node.leaving and node.done):
            return "going"
        return "leaving" if node.leaving else "here"

    def _execute(self, fault: FaultEvent) -> None:
        if (rank := fault.node) is None:
            self._record(None, fault.what, fault.detail)
            return
        match self.presence.take(fault, self._state(rank)):
            case "record":
                self._record(rank, fault.what, fault.detail)
            case "crash":
                self.nodes[rank].planned, self.nodes[rank].returns = True, None
                self._decide(Signal(rank, signal.SIGKILL))
            case "leave":
                node = self.nodes[rank]
                node.leaving, node.returns = True, None
                self._tell(rank, protocol.Command("leave"))
                if node.done:
                    self._tell(rank, Finish("left"))
            case "stay":  # the node may have ended its rounds, and then says so
                node = self.nodes[rank]
                node.leaving, node.returns = False, fault.start_from
                self._tell(rank, protocol.Command("stay"))
            case "freeze":
                self.nodes[rank].frozen = True
                self._frozen[rank] = self._now + self._experiment.failures.detection_s
                self._decide(Signal(rank, signal.SIGSTOP))
                self._record(*life.frozen(rank))
            case "thaw":
                self._thaw(self.nodes[rank])

    def _thaw(self, node: NodeState) -> None:
        if node.frozen:
            node.frozen = False
            self._frozen.pop(node.rank, None)
            self._decide(Signal(node.rank, signal.SIGCONT))
            self._record(*life.thawed(node.rank))

    def _start_node(self, rank: int, start_from: StartFrom) -> None:
        node = NodeState(rank, 0, start_from, 0, self._rounds.get(rank, 0))
        if (before := self.nodes.get(rank)) is not None:
            incarnation = before.incarnation + 1
            node = NodeState(rank, incarnation, start_from, before.restarts, before.round)
        self.nodes[rank] = node
        self.alive.add(rank)
        self._decide(Fork(rank, node.incarnation, [crash.round for crash in self._at_rounds.get(rank, ())]))

    # --- nodes that are away

    def _exited(self, node: NodeState, how: str) -> None:
        self.alive.discard(node.rank)
        if node.final and (self._ending or node.leaving):
            return
        self.killed = True
        lost = life.lost(node.rank, node.round, how, planned=node.planned)
        self._decide(RecordEvent(*lost, show=False))
        text = lost.text
        if not node.planned:
            self._unplanned[node.rank] = text
        if self._ending:
            return
        restart = self._options.restart == "always" and node.restarts < self._options.restart_limit
        if self._began is None or (self._needs_all and not (node.planned or restart)):
            self._fail(text, node=node.rank, round=node.round)
            return
        self._decide(Show(text))
        self._gone(node, text, keep=False)
        if restart and not (node.planned or node.leaving):  # a fault takes it away
            node.restarts += 1
            self._restarts[node.rank] = "checkpoint"

    def _gone(self, node: NodeState, why: str, *, keep: bool) -> None:
        self._frozen.pop(node.rank, None)
        self._queue = deque(queued for queued in self._queue if queued is not node)
        if self._newcomer is node:
            self._newcomer, self._awaited = None, set()
        self._lose(node.rank, why, keep=keep, incarnation=node.incarnation)

    def _unreachable(self, node: NodeState, rank: int, text: str) -> None:
        """A node has failed to reach a peer for so long that its messages to it are lost. If the peer is heard here, the two
        are cut off from each other. Otherwise it counts as dead, and is introduced again as soon as it sends a message."""
        if rank not in self.alive or not self._lost.isdisjoint((rank, node.rank)):
            return
        peer, names = self.nodes[rank], frozenset((rank, node.rank))
        if peer.leaving or peer.planned or peer.frozen:  # planned by the experiment
            return
        if (pair := self._cut.get(names)) is not None:  # again, or in the other direction
            if not pair.unreached:  # they were being brought together
                self._part(pair, names)
            pair.unreached.add(node.rank)
            return
        if self._needs_all:
            self._record(node.rank, "unreachable", text)
            self._fail(text, node=node.rank)
        elif peer.silent_s > self._unheard_s:
            self._record(node.rank, "unreachable", text)
            self._unplanned[rank] = text
            self._lose(rank, text, keep=True)
        else:
            self._record_pair(life.apart(node.rank, text, waits=self._waits))
            pair = self._cut[names] = CutPair(text, set())
            self._part(pair, names)

    def _part(self, pair: CutPair, names: frozenset[int]) -> None:
        """Let two nodes go on without each other."""
        pair.unreached, pair.rounds = set(names), {}
        for rank, other in permutations(sorted(names)):
            self._tell(rank, Lost(other, pair.why, apart=True))
        self._decide(HoldCheckpoints("nodes {} and {} can't reach each other".format(*sorted(names))))

    def _reached(self, node: NodeState, rank: int) -> None:
        """A node has reached a peer that it was cut off from. If the peer has reached it too, ask both for their rounds."""
        if (pair := self._cut.get(names := frozenset((rank, node.rank)))) is None or not pair.unreached:
            return
        pair.unreached.discard(node.rank)
        if not pair.unreached:
            for asked, other in permutations(sorted(names)):
                self._tell(asked, Find(other, restarted=False))

    def _bring_together(self, pair: CutPair) -> None:
        """Let two nodes wait for each other again, once both have said in which round they are."""
        if len(pair.rounds) < 2:
            return
        del self._cut[frozenset(pair.rounds)]
        since = max(pair.rounds.values()) + 1 if self._gathers else 0
        first, second = sorted(pair.rounds)
        for rank, other in permutations((first, second)):
            self._tell(rank, Meet([(other, since)]))
        self._record_pair(life.together(first, second, since if self._gathers else None))
        self._meeting[frozenset(pair.rounds)] = since
        self._release_checkpoints()

    def _release_checkpoints(self) -> None:
        """Make checkpoints again once no node takes part without another one. Earlier ones would not tell from which round
        on two nodes wait for each other."""
        held = bool(self._meeting)
        for names, since in list(self._meeting.items()):
            if all(self.nodes[rank].done or self.nodes[rank].round >= since for rank in names):
                del self._meeting[names]
        if held and not (self._meeting or self._cut):
            self._decide(ReleaseCheckpoints())

    def _lose(self, rank: int, why: str, *, keep: bool, incarnation: int | None = None) -> None:
        """Make the other nodes stop waiting for a node and sending to it."""
        self._awaited.discard(rank)
        self._reported_rounds.pop(rank, None)
        if self._cut or self._meeting:
            self._forget_pairs(rank)
        if self.presence.lose(rank, why):
            self._tell_all(self._present(), Lost(rank, why, incarnation))
            self._decide(Without(rank, keep, gone=incarnation is not None))
        elif (
            incarnation is not None
        ):  # the others already go on without it, but its last value counted until now
            self._decide(Without(rank, keep))
        self._introduce_next()

    def _forget_pairs(self, rank: int) -> None:
        """A node is away from all others now."""
        self._cut = {names: pair for names, pair in self._cut.items() if rank not in names}
        self._meeting = {names: since for names, since in self._meeting.items() if rank not in names}
        if not (self._cut or self._meeting):
            self._decide(ReleaseCheckpoints())

    def _present(self) -> list[int]:
        return sorted(self.alive - self._lost)

    # --- introductions

    def _arrive(self, node: NodeState) -> None:
        node.arriving = True
        self._queue.append(node)
        self._introduce_next()

    def _introduce_next(self) -> None:
        """Finish the current introduction, if all nodes have answered, and begin the next one."""
        while not self._awaited:
            if self._newcomer is not None:
                newcomer, self._newcomer = self._newcomer, None
                self._introduce(newcomer, self._reported_rounds)
            if not self._queue:
                return
            newcomer = self._newcomer = self._queue.popleft()
            asked = [*self._present(), newcomer.rank] if newcomer.met else self._present()
            self._awaited, self._reported_rounds = set(asked), {}
            self._tell_all(asked, Find(newcomer.rank, not newcomer.met))

    def _introduce(self, node: NodeState, rounds: dict[int, int]) -> None:
        round = rounds.pop(node.rank, node.round)
        joins = node.rank in self.presence.absent
        earliest = life.earliest(
            round,
            self._experiment.stop.rounds,
            gathers=self._gathers,
            joins=joins,
            restarted=not node.met,
        )
        first, together = (
            rejoin_round(rounds, earliest) if self._gathers else (earliest, dict.fromkeys(sorted(rounds), 0))
        )
        self.presence.find(node.rank)
        self._unplanned.pop(node.rank, None)
        node.arriving = False
        for rank, why in sorted(self.presence.why.items()):  # including nodes lost during the introduction
            self._tell(node.rank, Lost(rank, why))
        for rank, since in together.items():
            self._tell(rank, Meet([(node.rank, since)]))
        start_from = None if node.met else node.start_from
        self._decide(Rejoin(node.rank, first, list(together.items()), start_from))
        self._record(*life.back(node.rank, first, joins=joins))
        node.met = True

    # --- decisions

    def _decide(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def _decided(self) -> list[Decision]:
        """The decisions since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def _record(self, rank: int | None, event: str, text: str) -> None:
        self._decide(RecordEvent(rank, event, text))

    def _record_pair(self, event: life.LifeEvent) -> None:
        """Record an event of two nodes: between two machines, there may be a quarter of a million of such pairs."""
        self._pair_events += 1
        if self._pair_events <= MAX_PAIR_EVENTS:
            self._record(*event)
        elif self._pair_events == MAX_PAIR_EVENTS + 1:
            only = (
                f"only the first {MAX_PAIR_EVENTS:,} events of pairs that can't reach each other are recorded"
            )
            self._record(None, "left-out", only)

    def _fail(self, text: str, **where: Any) -> None:
        self._decide(Fail(RunFailed(text, **where)))

    def _tell(self, rank: int, message: protocol.ToNode) -> None:
        self._decide(Tell(rank, message))

    def _tell_all(self, ranks: Iterable[int], message: protocol.ToNode) -> None:
        for rank in ranks:
            self._tell(rank, message)
