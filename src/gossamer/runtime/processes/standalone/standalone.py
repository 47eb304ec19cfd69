"""A node's process without a supervisor: what a supervisor does for it, done with what it hears from the others.

Every node stays connected with the next rank that lives, going round, besides whom its algorithm talks to. So all hear of
one another however its topology changes, and every node is watched by one at least. On these connections
heartbeats carry reports (:mod:`gossamer.runtime.processes.standalone.roster`), at once where something changed.

A node goes when it has heard of all and is connected with its neighbours of the first round. One that is started again goes
on from its checkpoint, or begins with a neighbour's model, in the round that most of the others are in
(:mod:`gossamer.runtime.rejoin`). It ends when it is done and all others are, have left or are lost, as far as it or one of
them knows; when its clock, or another's that it hears of, has reached the end of the run's time; or when it is asked to stop.
Before it closes its connections it waits until those it is connected with have heard so.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gossamer.config import Processes
from gossamer.errors import RunFailed, cause
from gossamer.messages import FrameError
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.standalone.record import NodeRecord
from gossamer.runtime.processes.standalone.roster import Report, Roster, State
from gossamer.runtime.processes.transport.transport import Transport
from gossamer.runtime.recording import Observer, end_is_due, returned_early
from gossamer.runtime.setup import Setup

PUSH_S = 0.05
"""Seconds in which changes are collected before they are reported."""
PROGRESS_S = 0.2
"""Seconds between two reports of progress to the observer."""
FAREWELL_S = 5.0
"""Seconds that a node waits at its end for those it is connected with to have heard of it."""
WAITED_S, WAITED_AGAIN_S = 5.0, 30.0
"""Seconds after which a node says whom it waits for at the start (half of ``engine.start_timeout_s``, if that is less), and
after which it says so again."""
_WORDS = {State.LOST: "is lost", State.LEFT: "has left"}

Hear = Callable[[protocol.ToNode], None]


@dataclass(frozen=True)
class Past:
    """What the record says of a node that goes on from its checkpoint.

    Args:
        start_unix_s: when the node first went, by its machine's clock, seconds since 1970.
        traffic: what its counters were in its last row.
        time_s: at which second its time goes on, as soon as all are up, where no node of the run has lived meanwhile; None
            where others may have, and time went on.
    """

    start_unix_s: float
    traffic: Mapping[str, int]
    time_s: float | None = None

    def spent_s(self) -> float:
        """The run's seconds so far."""
        return max(time.time() - self.start_unix_s, 0.0) if self.time_s is None else self.time_s


class Standalone:
    """The overseer (see ``Place``) of a process that has no supervisor.

    Args:
        rank: this node.
        setup: what is run.
        roster: what it knows of all nodes.
        folder: where its events are recorded.
        observer: told of its rows and of what happens.
        began: called when the node goes.
        past: what there was before, where it goes on from its checkpoint.
        transport: what its :class:`~gossamer.runtime.processes.transport.transport.Transport` is to know besides, by name.

    Attributes:
        failure: why it failed, if it did.
        reason: how it ended.
        rounds: that it has completed.
    """

    def __init__(
        self,
        rank: int,
        setup: Setup,
        roster: Roster,
        folder: RunFolder,
        observer: Observer,
        *,
        began: Callable[[], None],
        past: Past | None = None,
        **transport: Any,
    ) -> None:
        experiment = setup.experiment
        assert isinstance(experiment.engine, Processes)
        self._rank, self._setup, self._roster, self._observer = rank, setup, roster, observer
        self._start_timeout_s = experiment.engine.start_timeout_s
        self._loss_fails = experiment.gather.lost_peer == "fail"
        self._waits = experiment.algorithm.gathers
        self._began, self._past, self._options = began, past, transport
        self._record = NodeRecord(rank, setup, folder, observer, self._times)
        self._start: float | None = None
        self._first: set[int] = set()  # neighbours in the first round
        self._reports: dict[int, Report] = {}  # the last one of each that this node is connected with
        self._away: dict[int, int] = {}  # whom the node takes for lost, and in which of its lives
        self._unreached: set[int] = set()  # those of them that it tried to reach itself
        self._not_there: dict[int, str] = {}  # whom the node could not reach before it went, and why
        self._changed = asyncio.Event()
        self._push: asyncio.TimerHandle | None = None
        self._ending = False
        self._shown = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: Transport
        self._hear: Hear
        self.failure: RunFailed | None = None
        self.reason = "failed"
        self.rounds = 0
        self._now: Callable[[], float] = lambda: 0.0

    def oversee(self, hear: Hear) -> Standalone:
        """Begin to tell the node, through a function, what to do."""
        self._hear = hear
        return self

    def connect(self, *arguments: Any, **options: Any) -> Transport:
        """Make the node's transport."""
        options["heartbeat_s"] = options["heartbeat_s"] or options["detection_s"] / 5
        options |= {"status": self._status, "heard": self._heard, **self._options}
        self._now = options["now"]
        make: Callable[..., Transport] = Transport
        self._transport = make(*arguments, **options)
        return self._transport

    @property
    def incarnation(self) -> int:
        """Of this process."""
        return self._roster.own.incarnation

    def close(self) -> None:
        """Close what it writes."""
        self._record.close()

    def stop(self) -> None:
        """The node was asked to stop. Where a run does not bear a loss, that ends it for all nodes."""
        if self._loss_fails:
            self._end("stopped")
        else:
            self._roster.say(state=State.LEFT)
            self._leave("stopped")

    # --- what the node says

    def send(self, message: protocol.FromNode) -> None:
        """Take what the node has to say to its supervisor."""
        match message:
            case protocol.Ready():
                self._spawn(self._await_others())
            case protocol.Progress(round=round, time_s=time_s):
                self.rounds = round
                self._roster.say(round=round)  # to the round: who joins begins with the next one
                if time.monotonic() > self._shown + PROGRESS_S:
                    self._shown = time.monotonic()
                    self._observer.progress(round, time_s)
            case protocol.Row(row=row, slot=slot):
                self._record.row(row)
                if slot is not None:
                    self._hear(protocol.Consumed())
            case protocol.Done(round=round):
                self._roster.say(state=State.DONE, round=round)
                if (early := returned_early(self._setup, {self._rank: round})) is not None:
                    self._record.event(self._rank, "ended-early", early)
                self._look_around()
            case protocol.TimeUp():
                self._end("time")
            case protocol.Final(round=round):
                self.rounds = round
            case protocol.Event(kind=kind, text=text):
                self._record.event(self._rank, kind, text)
            case protocol.Unreachable(rank=rank, why=why):
                self._lose(rank, why)
            case protocol.Reachable(rank=rank):
                self._found(rank)
            case protocol.Failed(text=text, round=round, trace=trace):
                where = f"in round {round}" if self._start is not None else "at start"
                self._fail(f"node {self._rank} failed {where}: {text}", trace)
            case _:  # Idle: whether all wait for ever, no node can tell by itself
                pass

    # --- starting

    async def _await_others(self) -> None:
        graph = self._setup.topology.graph(0)
        self._first = {
            *graph.neighbors(self._rank, "in" if graph.directed else "both"),
            *graph.neighbors(self._rank, "out" if graph.directed else "both"),
        }
        now = time.monotonic()
        deadline, say_at = now + self._start_timeout_s, now + min(WAITED_S, self._start_timeout_s / 2)
        self._look_around()
        while late := self._not_up():
            now = time.monotonic()
            if now >= deadline:
                within = f"engine.start_timeout_s = {self._start_timeout_s}"
                self._fail(f"nodes {late} were not up within {within} ({self._why(late)})")
                return
            if now >= say_at:
                self._observer.say(f"waiting for nodes {late} ({self._why(late)})")
                say_at = now + WAITED_AGAIN_S
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(deadline, say_at) - now):
                    await self._changed.wait()
        before_s = 0.0 if self._past is None else self._past.spent_s()
        self._start = time.monotonic() - before_s
        self._began()
        comes_later = self._past is not None or self._roster.again
        self._roster.go()
        for rank, why in self._not_there.items():  # the transport does not say it again
            self._lose(rank, why)
        if self._loss_fails and self._away:
            self._fail(f"nodes {sorted(self._away)} were lost before node {self._rank} went")
        self._look_around()
        if self.failure is not None:
            return
        self._hear(protocol.Go(self._start, self._arrival(before_s) if comes_later else None))

    def _why(self, late: Sequence[int]) -> str:
        said = "; ".join(f"node {rank}: {self._not_there.get(rank, 'not heard of')}" for rank in late[:8])
        return said + (f"; and {len(late) - 8} more" if len(late) > 8 else "")

    def _arrival(self, now_s: float) -> protocol.Arrival:
        """How it takes part that was there before; see ``Arrival``."""
        every_s = self._setup.experiment.evaluation.every_s
        tick = 0 if every_s is None else int(now_s / every_s) + 1
        if self._past is None:
            return protocol.Arrival(0, [], "neighbor", tick, {}, self._others())
        meet = self._others() if self._waits else []
        return protocol.Arrival(0, [], "checkpoint", tick, dict(self._past.traffic), meet)

    def _others(self) -> list[int]:
        """Those who are there and may wait for this node, or it for them."""
        there = self._roster.of_state(State.RUNNING, State.DONE)
        return [rank for rank in there if rank != self._rank]

    def _not_up(self) -> list[int]:
        """The ranks that this node waits for before it starts."""
        ended = self._roster.of_state(State.LOST, State.LEFT, State.DONE)
        unconnected = self._first - self._reports.keys() - set(ended)
        return sorted({*self._roster.unheard(), *unconnected})

    # --- what the others say

    def _status(self) -> bytes:
        return self._roster.report().pack()

    def _heard(self, rank: int, data: bytes) -> None:
        """A heartbeat of a peer."""
        try:
            report = Report.unpack(data, self._setup.experiment.nodes)
        except FrameError as error:
            self._transport.refuse(rank, str(error))
            return
        own = self._roster.report().digest
        if report.digest != own:  # (nodes of another experiment have another token)
            self._transport.refuse(
                rank, f"runs another experiment ({report.digest.hex()[:8]}, not {own.hex()[:8]})"
            )
            return
        try:
            changed = self._roster.take(report, rank)
        except FrameError as error:
            self._transport.refuse(rank, str(error))
            return
        news = rank not in self._reports
        self._reports[rank] = report
        if self._roster.superseded:
            self._fail(f"another process of node {self._rank} was started later")
            return
        for each, state in changed.items():
            self._hear_of(each, state, rank)
        if news or changed or report.end is not None:
            self._look_around()
        self._changed.set()

    def _hear_of(self, rank: int, state: State, by: int) -> None:
        """Another node says that a node is doing otherwise."""
        if state in _WORDS:
            if state is State.LOST and rank != by and rank in self._reports:
                return  # not to this node, which is connected with it
            text = f"node {rank} {_WORDS[state]}" + ("" if rank == by else f", says node {by}")
            self._take_for_lost(rank, "leave" if state is State.LEFT else "lost", text)
        elif rank in self._away and rank not in self._unreached:
            self._take_for_found(rank)

    def _lose(self, rank: int, why: str) -> None:
        """A connection with a peer could not be made, or has failed for good."""
        self._reports.pop(rank, None)
        if self._start is None:  # the transport goes on trying
            self._not_there[rank] = why
            return
        self._unreached.add(rank)
        entry = self._roster[rank]
        if entry is not None and entry.state in (State.DONE, State.LEFT):
            self._hear(protocol.Lost(rank, None))
        else:
            self._roster.lose(rank)
            self._take_for_lost(rank, "lost", f"node {rank} can't be reached: {why}")
        self._look_around()

    def _found(self, rank: int) -> None:
        """A peer that was lost is connected again, or has started anew."""
        self._unreached.discard(rank)
        self._not_there.pop(rank, None)
        if rank in self._away:
            self._take_for_found(rank)

    def _take_for_lost(self, rank: int, kind: str, text: str) -> None:
        if rank in self._away or self._roster.end is not None:
            return
        self._away[rank] = self._life(rank)
        self._record.note(rank, kind, text)
        if self._loss_fails and self._start is not None:
            self._fail(text)
            return
        self._hear(protocol.Lost(rank, None))

    def _take_for_found(self, rank: int) -> None:
        before = self._away.pop(rank)
        self._not_there.pop(rank, None)
        self._record.note(rank, "found", f"node {rank} is back")
        self._hear(protocol.Found(rank))
        if self._waits and self._start is not None and self._life(rank) == before:
            self._hear(protocol.MeetAgain(rank))  # (one that was started anew does so itself)

    def _life(self, rank: int) -> int:
        """The newest incarnation of a peer that was heard of."""
        entry = self._roster[rank]
        return max(0 if entry is None else entry.incarnation, self._transport.incarnation_of(rank) or 0)

    # --- watching, and ending

    def _look_around(self) -> None:
        """Something is otherwise than before: report it, watch who is to be watched, and see whether all is over."""
        self._changed.set()
        if self._push is None:
            self._push = asyncio.get_running_loop().call_later(PUSH_S, self._report)
        if not self._ending:
            following = self._roster.next_living(self._unreached)
            watched = set() if following is None else {following}
            self._transport.keep(watched if self._start is not None else watched | self._first)
        if self._roster.over() or self._roster.end is not None:
            self._end(self._roster.end or "rounds")

    def _report(self) -> None:
        self._push = None
        self._transport.beat()

    def _end(self, reason: str) -> None:
        """The run is over, for all."""
        self._roster.end = self._roster.end or reason
        self._leave(self._roster.end)

    def _leave(self, reason: str) -> None:
        if not self._ending:
            self._ending, self.reason = True, reason
            self._spawn(self._bid_farewell(reason))

    async def _bid_farewell(self, reason: str) -> None:
        """Go when those that this node is connected with have heard of it, or don't answer."""
        self._report()
        try:
            async with asyncio.timeout(FAREWELL_S):
                while not all(self._knows(rank, report) for rank, report in self._reports.items()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # who does not answer finds the connection closed
        self._hear(protocol.Finish(reason, None, end_is_due(self._setup, reason, self._roster.rounds())))

    def _knows(self, rank: int, report: Report) -> bool:
        own, other = report.entries.get(self._rank), report.entries.get(rank)
        goes_on = self._roster.end == "rounds" and other is not None and other.state is State.RUNNING
        return (
            (goes_on or report.end == self._roster.end)
            and own is not None
            and own.state >= self._roster.own.state
        )

    def _fail(self, message: str, trace: str = "") -> None:
        if self.failure is None:
            self.failure = RunFailed(message, node=self._rank, round=self.rounds, traceback=trace)
            self._ending, self.reason = True, "failed"
            self._roster.say(state=State.LOST)
            self._report()
            self._hear(protocol.Finish("failed"))

    def _times(self) -> tuple[float, float]:
        """The node's time and real time since it went; 0 before."""
        return (0.0, 0.0) if self._start is None else (self._now(), time.monotonic() - self._start)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"node {self._rank}: {cause(error)}", "".join(traceback.format_exception(error)))
