"""One node, one process: the node's side of the engine ``processes``."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer import checkpoint
from gossamer.engines.cuts import NodeCuts, made, sent_here
from gossamer.engines.events import begins
from gossamer.engines.muster import Moment
from gossamer.engines.newcomer import come_back, meet_again, newcomer
from gossamer.engines.processes.channel import AsyncChannel
from gossamer.engines.processes.cutting import Cutting
from gossamer.engines.processes.memory import FINAL, SNAPSHOTS, SharedModels, one_of, private_bytes
from gossamer.engines.processes.rehearsal import Stage
from gossamer.engines.processes.shaping import Shaper
from gossamer.engines.processes.transport import Transport
from gossamer.engines.recording import Usage, is_due, node_row
from gossamer.engines.setup import Setup
from gossamer.engines.timeline import timeline_log
from gossamer.errors import BadInput, cause
from gossamer.experiment import Processes
from gossamer.faults import StartFrom
from gossamer.learning.computation import Computation, Kind, execute
from gossamer.learning.memory import trim
from gossamer.learning.mixing import Mix
from gossamer.messages import Message, Payload, Sending, Traffic
from gossamer.node import Node
from gossamer.payload import encode, wire_bytes
from gossamer.results.checkpoints import CheckpointFolder, Cut, highest
from gossamer.results.folder import RunFolder, atomic
from gossamer.results.rewind import drop_rounds

PROGRESS_S = 0.2
"""Seconds between two reports of a node's progress."""
ALIVE_S = 1.0
"""Seconds between two signs of life of a node that waits, or judges its last model."""
NODES_HEARD_A_SECOND = 256
"""How many waiting nodes may say so in a second."""
SHORTEST_S = 0.001
"""Seconds that a node sleeps at least: its clock may stand still meanwhile."""
LAST_CUT_S = 20.0
"""Seconds in which the last checkpoint of a run has to be written, before its nodes end without it."""
FLUSH_S = 5.0
"""Seconds in which the next bytes of a node's last round have to leave before its last row is written without them."""


class Overseer(Protocol):
    """Whom a node's process tells how it is doing, and who tells it what to do: the supervisor, through a channel, or
    what does without one (standalone.py)."""

    def send(self, *message: Any) -> None:
        """Take a message: what it is about, and what there is to say."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a node's process finds what it shares with the others.

    Args:
        listener: its listening socket.
        channel: its end of the channel to the supervisor, if it has one.
        addresses: (host, port) of every rank.
        token: what the nodes of this run know each other by.
        memory: descriptor of the shared file: models, and the places to compute in.
        at_once: how many nodes may compute at the same time.
        trims: hand memory back after computing.
        life: how often the node was started before.
        crashes: rounds after which it is to kill itself.
        oversee: gives who is told in place of a supervisor; it tells the node what to do by calling a function.
        connect: makes the node's transport.
        progress_s: seconds between two reports of its progress.
    """

    listener: socket.socket
    channel: socket.socket | None
    addresses: Sequence[tuple[str, int]]
    token: bytes
    memory: int
    at_once: int
    trims: bool
    life: int = 0
    crashes: tuple[int, ...] = ()
    oversee: Callable[[Callable[[list[Any]], None]], Overseer] | None = None
    connect: Callable[..., Transport] = Transport
    progress_s: float = PROGRESS_S


@dataclass(frozen=True, eq=False)
class Arrival:
    """How a node takes part that comes, or comes back, while the others live.

    Args:
        first: the round that it begins with.
        together: rank and round: from when on it and another node wait for each other.
        start_from: the model that it begins with.
        tick: the first instant of the grid of time at which it is recorded.
        traffic: what its counters were in its last row.
        meet: whom it asks for the round to begin with, where nobody has told it.
    """

    first: int
    together: Sequence[Sequence[int]]
    start_from: StartFrom
    tick: int
    traffic: Mapping[str, int]
    meet: Sequence[int] | None = None


def main(
    rank: int, setup: Setup, place: Place, stage: Stage, folder: RunFolder, cut: Cut | None = None
) -> int:
    """A node's whole life (or, from a checkpoint on, the rest of it), in a process that was just forked; gives its exit
    code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the launcher, which ends the run in order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return asyncio.run(live(rank, setup, place, stage, folder, cut))


async def live(
    rank: int, setup: Setup, place: Place, stage: Stage, folder: RunFolder, cut: Cut | None = None
) -> int:
    """A node's whole life; gives the exit code of its process."""
    return await _Worker(rank, setup, place, stage, folder, cut).live()


class _Timer:
    """A call that is due later, noted among a node's timers until then."""

    def __init__(self, pending: set[_Timer], seconds: float, call: Callable[[], None]) -> None:
        self._pending, self._call = pending, call
        self._handle = asyncio.get_running_loop().call_later(seconds, self._due)
        pending.add(self)

    def _due(self) -> None:
        self._pending.discard(self)
        self._call()

    def cancel(self) -> None:
        """Don't make the call."""
        self._pending.discard(self)
        self._handle.cancel()


class _Busy:
    """How long something was under way; entered in one thread, and read from any.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state: tuple[float, float | None] = 0.0, None  # seconds so far, and since when it computes

    def __enter__(self) -> None:
        self._state = self._state[0], self._clock()

    def __exit__(self, *_: object) -> None:
        self._state = self.seconds(), None

    def restore(self, seconds: float) -> None:
        """It was so long under way already."""
        self._state = seconds, None

    def seconds(self) -> float:
        """So far."""
        total, since = self._state
        return total if since is None else total + self._clock() - since


class _Worker:
    """The node's :class:`~gossamer.host.Host`, and its conversation with the supervisor."""

    def __init__(
        self, rank: int, setup: Setup, place: Place, stage: Stage, folder: RunFolder, cut: Cut | None = None
    ) -> None:
        self._rank, self._setup, self._place = rank, setup, place
        self.lost: set[int] = set()
        self._rows, self._trainer, self._evaluator = stage.rows, stage.trainer, stage.evaluator
        experiment = setup.experiment
        assert isinstance(experiment.engine, Processes)
        self._pace = experiment.engine.pace
        self._models = SharedModels(
            place.memory, experiment.nodes, setup.layout.size, setup.layout.buffer_size
        )
        self._metrics = folder.segment("metrics", rank)
        self._timeline = timeline_log(experiment, folder, rank)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._turn = asyncio.Lock()  # computations of this node, first come first served
        self._node = Node(setup.node(rank, stage.initial(rank)), self)
        self._start = self._wall_start = time.monotonic()
        self._paused_s = 0.0
        self._pauses: list[float] = []  # since when evaluations go on
        self._said = 0.0
        self._evaluations = 0
        self._consumed = 0
        self._freed = asyncio.Event()
        self._timers: set[_Timer] = set()
        self._computing = 0
        self._computations = 0
        self._slow = 0  # computations that took longer than the compute profile says
        self._shaper: Shaper | None
        self._busy = _Busy(time.monotonic)  # the node's thread
        self._paced = _Busy(self.now)  # computations that take the compute profile's time
        self._usage = Usage()
        self._saved = None if cut is None else cut.read(rank, self._keep)
        self._wall_before_s = 0.0 if cut is None else cut.wall_s
        self._deliver = self._node.deliver
        self._cuts: NodeCuts | None = None
        self._cutting: Cutting | None = None
        self._sent_before: dict[int, int] = {}  # by each source, when the run was resumed
        self._last_cut: int | None = None
        # Who oversees itself has nobody who puts checkpoints together.
        if place.oversee is None and not experiment.mortal and (experiment.checkpoint.on or cut is not None):
            self._make_cuts(folder, cut)
        self._leaving = False
        self._arrival: Arrival | None = None
        self._crashes = list(place.crashes)
        self._saves = experiment.checkpoint.on and (experiment.mortal or place.oversee is not None)
        self._saves_made = 0  # checkpoints that were due so far
        self._folder = folder
        self._restart_file = folder.restart(rank)
        self._transport: Transport
        self._channel: Overseer
        self._go: asyncio.Future[None]
        self._finish: asyncio.Future[str]

    # --- life

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        self._go, self._finish = loop.create_future(), loop.create_future()
        if self._place.oversee is not None:
            self._channel = self._place.oversee(self._hear)
        else:
            assert self._place.channel is not None
            self._channel = AsyncChannel(self._place.channel, self._hear, lambda: os._exit(1))
        experiment = self._setup.experiment
        self._shaper = Shaper.of(self._rank, self._setup.network, experiment.nodes, experiment.seed, loop)
        self._transport = self._place.connect(
            self._rank,
            self._place.listener,
            self._place.addresses,
            self._place.token,
            limit=self._setup.message_limit,
            deliver=self._deliver,
            lost=lambda rank, why: self._channel.send("unreachable", rank, why),
            event=lambda kind, text: self._channel.send("event", kind, text),
            now=self.now,
            failed=self._node.fail,
            watch=None if self._timeline is None else partial(self._timeline.sent, self._rank),
            shaper=self._shaper,
            heartbeat_s=experiment.failures.heartbeat_s,
            detection_s=experiment.failures.detection_s,
            found=lambda rank: self._channel.send("reachable", rank),
            marked=None if self._cutting is None else self._cutting.marked,
            told=None if self._cutting is None else self._cutting.told,
            relinked=None if self._cutting is None else self._cutting.relinked,
            incarnation=self._place.life,
        )
        if self._cutting is not None:
            self._begin_cuts(self._cutting)
        try:
            await self._transport.start()
            self._channel.send("ready")
            await asyncio.wait((self._go, self._finish), return_when=asyncio.FIRST_COMPLETED)
            if self._go.done():
                await self._protocol()
            self._leave()
        except Exception as error:  # noqa: BLE001 - an algorithm may raise anything; the supervisor is told
            text = "".join(traceback.format_exception(error))
            self._channel.send("failed", cause(error), self._node.round, text)
            await self._finish
            return 1
        await self._node.end()
        await self._transport.close()
        self._metrics.close()
        if self._timeline is not None:
            self._timeline.close()
        return 0

    async def _protocol(self) -> None:
        evaluation = self._setup.experiment.evaluation
        if evaluation.every_rounds is not None and self._saved is None and self._arrival is None:
            await self._record(0)
        beside = [asyncio.ensure_future(self._watch())]
        if evaluation.every_s:
            beside.append(asyncio.ensure_future(self._ticks(evaluation.every_s)))
        if (time_s := self._setup.experiment.stop.time_s) is not None:
            beside.append(asyncio.ensure_future(self._say_when(time_s)))
        for task in beside:
            task.add_done_callback(self._beside_ended)
        life = asyncio.ensure_future(self._life())
        await asyncio.wait((life, self._finish), return_when=asyncio.FIRST_COMPLETED)
        for task in (life, *beside):
            task.cancel()
        if life.done() and not life.cancelled():
            life.result()  # its failure
        reason = await self._finish
        stop = self._setup.experiment.stop.rounds
        if reason in ("time", "target") and (stop is None or self._node.round < stop):
            alive = asyncio.ensure_future(self._say_alive())
            await self._record("end")
            alive.cancel()
        elif reason == "left":
            await self._flush()
            if not is_due(self._setup, self._node.round):
                await self._record("end")
        if self._cutting is not None and self._last_cut is not None:
            await self._cutting.last(self._last_cut, LAST_CUT_S)

    # --- checkpoints

    def _make_cuts(self, folder: RunFolder, cut: Cut | None) -> None:
        experiment = self._setup.experiment
        self._cuts = NodeCuts(self._node.deliver, self.now, experiment.algorithm.gathers, self._ignore)
        self._cutting = Cutting(
            experiment.checkpoint,
            self._cuts,
            CheckpointFolder(folder.checkpoints, experiment),
            lambda *message: self._channel.send(*message),
            0 if cut is None else made(experiment.checkpoint, cut),
            highest(folder.checkpoints) + 1,
        )
        if self._saved is not None:
            self._node.restore(self._saved)
            self._cuts.restore(self._saved)
            self._sent_before = sent_here(self._saved)
            self._usage.restore(self._saved.engine["usage"])
            self._busy.restore(self._saved.engine["computing_s"])
            self._paced.restore(self._saved.engine["computing_s"])
            self._start -= self._saved.time_s
        self._deliver = self._number

    def _keep(self, tensor: Tensor) -> Tensor:
        """Where a node keeps what was read from a file."""
        row = tensor.dtype is torch.float32 and tensor.shape == (self._setup.layout.size,)
        return self._rows.store(tensor) if row else tensor

    def _number(self, message: Message) -> None:
        """A message has come in: its number goes on where those of its sender were when the run was resumed."""
        assert self._cuts is not None
        before = self._sent_before.get(message.source, 0)
        self._cuts.deliver(replace(message, number=message.number + before) if before else message)

    def _ignore(self, message: Message) -> None:
        """A message is one that the node had before the run was resumed: it does not count again."""
        self.counters.messages_received -= 1
        self.counters.bytes_received -= wire_bytes(message.tag, message.payload)

    def _begin_cuts(self, cutting: Cutting) -> None:
        cutting.use(self._transport, self._sent_before)
        if self._saved is None:
            self._checkpoint(cutting)
            return
        self._transport.traffic = Traffic(**self._saved.engine["traffic"])
        cutting.round_ended(self._saved)
        for arrival in self._saved.arriving:  # whatever was on its way has had the time since
            self.counters.messages_received += 1
            self.counters.bytes_received += wire_bytes(arrival.message.tag, arrival.message.payload)
            assert self._cuts is not None
            self._cuts.deliver(arrival.message)

    def _checkpoint(self, cutting: Cutting) -> None:
        engine = {
            "traffic": asdict(self._transport.saved_traffic()),
            "computing_s": (self._paced if self._pace else self._busy).seconds(),
            "sending_s": 0.0 if self._shaper is None else self._shaper.sending_seconds(),
            "usage": self._usage.saved(),
            "drawn": {},
            "secrets": 0,
        }
        cutting.round_ended(self._node.checkpoint(**engine))

    def _leave(self) -> None:
        if self._slow:
            text = (
                f"{self._slow} of {self._computations} computations took longer than the compute profile says"
            )
            self._channel.send("event", "slow", text)
        self._models.write(FINAL, self._rank, self._node.model)
        self._channel.send("final", self._node.round, private_bytes())

    async def _say_alive(self) -> None:
        """The last evaluation may take long; the supervisor is to know that it goes on."""
        while True:
            self._report(final=True)
            await asyncio.sleep(ALIVE_S)

    async def _watch(self) -> None:
        """Tell the supervisor when nothing but a message could wake this node, and what it waits for."""
        before = None
        # A thousand nodes that say every second that they wait would keep a core busy.
        every_s = max(ALIVE_S, self._setup.experiment.nodes / NODES_HEARD_A_SECOND)
        while True:
            await asyncio.sleep(every_s)
            traffic = self._transport.traffic
            counts = (traffic.messages_sent - self._transport.lost_on_the_way, traffic.messages_received)
            idle = not (self._computing or self._timers or self._pauses or self._transport.busy)
            if idle and counts == before:
                self._channel.send("idle", *counts, self._node.waiting())
            elif before is not None:
                self._channel.send("idle", -1, -1, [])
            before = counts if idle else None

    async def _life(self) -> None:
        run, arrival = self._setup.experiment.algorithm.run, self._arrival
        if arrival is None:
            await self._node.live(run(self._node))
        else:
            asks = self._setup.experiment.failures.detection_s if arrival.start_from == "neighbor" else None
            meet = None if arrival.meet is None else partial(self._come_back, arrival.meet)
            await self._node.live(newcomer(run, self._node, asks, meet))
        self._report(final=True)
        if self._cuts is not None:
            self._cuts.over()
        self._channel.send("done", self._node.round)
        raise await self._node.failure()

    async def _come_back(self, others: Sequence[int]) -> None:
        """Find the others without a supervisor; of the rounds that will be run again the record keeps nothing."""
        await come_back(self._node, others, self._setup.experiment.failures.detection_s)
        self._metrics.close()
        drop_rounds(self._folder, self._node.round)
        self._metrics = self._folder.segment("metrics", self._rank)
        text = f"node {self._rank} takes part from round {self._node.round} on"
        self._channel.send("event", "returned", text)

    def _beside_ended(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._node.fail(error)

    async def _ticks(self, every_s: float) -> None:
        first = 0 if self._arrival is None else self._arrival.tick
        for number in count(math.ceil(self.now() / every_s) if self._saved is not None else first):
            await self._until(number * every_s)
            await self._record(("tick", number))

    async def _say_when(self, time_s: float) -> None:
        """The run ends when the first node's clock says so."""
        await self._until(time_s)
        self._channel.send("time")

    async def _until(self, time_s: float) -> None:
        """Wait for an instant of the node's clock, which stands still while the node is judged."""
        while (left := time_s - self.now()) > 0:
            await asyncio.sleep(max(left, SHORTEST_S))

    def _hear(self, message: list[Any]) -> None:
        what, *rest = message
        if what == "go":
            self._start = rest[0] - (0.0 if self._saved is None else self._saved.time_s)
            self._wall_start = rest[0] - self._wall_before_s
            if len(rest) > 1:
                self._arrive(Arrival(*rest[1]))
            if self._shaper is not None:
                self._shaper.start(self._start)
            self._go.set_result(None)
        elif what == "finish" and not self._finish.done():
            self._last_cut = rest[1] if len(rest) > 1 else None
            self._finish.set_result(rest[0])
            self._freed.set()
        elif what == "lost":
            self.lost.add(rest[0])
            if rest[1] is not None:  # else the transport knows, and looks for it
                self._transport.mark_lost(*rest)
            self._node.peer_lost()
            if self._cutting is not None:
                self._cutting.lost(rest[0])
        elif what == "cut" and self._cutting is not None:
            self._cutting.cut(rest[0])
        elif what == "expect" and self._cutting is not None:
            self._cutting.expect(rest[0], rest[1])
        elif what == "kept" and self._cutting is not None:
            self._cutting.kept(rest[0])
        elif what == "drop" and self._cutting is not None:
            self._cutting.drop(rest[0])
        elif what == "found":
            self.lost.discard(rest[0])
            self._transport.mark_found(rest[0])
        elif what == "meet-again":
            self._node.spawn(meet_again(self._node, rest[0], self._setup.experiment.failures.detection_s))
        elif what == "leave":
            self._leaving = True
        elif what == "find":
            self._find(rest[0], anew=rest[1])
        elif what == "meet":
            self._node.peer_found(rest[0], rest[1], anew=False)
        elif what == "met":
            self._meet(rest[1])
            self._node.rejoin(rest[0])
        elif what == "consumed":
            self._consumed += 1
            self._freed.set()

    def _find(self, rank: int, *, anew: bool) -> None:
        """A node comes, or comes back, perhaps this one: say which round this one is in."""
        if rank != self._rank:
            self.lost.discard(rank)
            self._transport.mark_found(rank)
            # Until it's known which round it begins with, it's in none that this node is in.
            waits = self._setup.experiment.algorithm.gathers
            self._node.peer_found(rank, self._node.round + 1 if waits else 0, anew=anew)
        self._channel.send("at", rank, self._node.round)

    def _meet(self, together: Sequence[Sequence[int]]) -> None:
        for rank, since in together:
            self.lost.discard(rank)
            self._transport.mark_found(rank)
            self._node.peer_found(rank, since, anew=False)

    def _arrive(self, arrival: Arrival) -> None:
        self._arrival = arrival
        saved = None
        if arrival.start_from == "checkpoint" and self._restart_file.exists():
            try:
                saved = checkpoint.read(self._restart_file)
                self._node.restore(saved)
            except BadInput as error:
                saved = None
                self._channel.send("event", "checkpoint", f"it is of no use: {error}")
            self._saves_made = self._setup.experiment.checkpoint.due(self._node.round, self.now())
        text = f"node {self._rank} begins with {begins(arrival.start_from, saved)}"
        self._channel.send("event", "begins", text)
        self._transport.traffic = Traffic(**arrival.traffic)
        self._usage.restore([self.now(), 0.0, 0.0])
        self._meet(arrival.together)
        self._node.rejoin(arrival.first)
        self._node.catch_up()

    # --- the host

    @property
    def traffic(self) -> Traffic:
        return replace(self.counters)

    @property
    def counters(self) -> Traffic:
        return self._transport.traffic

    def now(self) -> float:
        # While a snapshot is judged, the clock stands still.
        now = self._pauses[0] if self._pauses else time.monotonic()
        return now - self._start - self._paused_s

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> _Timer:
        return _Timer(set() if background else self._timers, seconds, call)

    def store(self, vector: Tensor) -> Tensor:
        return self._rows.store(vector)

    def is_stored(self, tensor: Tensor) -> bool:
        return self._rows.owns(tensor)

    def fresh(self, length: int) -> Tensor:
        return self._rows.vector(length)

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        encoded = encode(payload)
        return [self._transport.send(rank, encoded, tag) for rank in to]

    async def compute(self, computation: Computation) -> Any:
        self._computing += 1
        try:
            return await self._compute(computation)
        finally:
            self._computing -= 1

    async def _compute(self, computation: Computation) -> Any:
        async with self._turn:
            if not self._pace:
                return await self._carry_out(computation)
            began = self.now()
            try:
                with self._paced:
                    return await self._carry_out(computation)
            finally:
                if self._timeline is not None:
                    self._timeline.computed(self._rank, computation.kind, began, self.now())

    async def _carry_out(self, computation: Computation) -> Any:
        began = self.now()
        job = computation.prepare()
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._execute, computation, job)
        if self._timeline is not None and not self._pace:
            running.add_done_callback(partial(self._note_computed, computation.kind))
        try:
            result, seconds = await asyncio.shield(running)
        except asyncio.CancelledError:
            # The thread can't be stopped; what it finds is not committed, and the next one waits behind
            # it.
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        if self._pace and computation.kind is not Kind.APPLY:
            await self._keep_pace(computation, began)
        elif (factor := self._setup.faults.factor(self._rank, began)) > 1:
            await asyncio.sleep((factor - 1) * seconds)
        return computation.commit(result)

    async def _keep_pace(self, computation: Computation, began: float) -> None:
        """Wait until a computation that began then is due by the compute profile."""
        profile, seed = self._setup.compute, self._setup.experiment.seed
        seconds = profile.seconds(seed, self._rank, computation.first_step, computation.work, began)
        due = began + float(seconds)
        self._computations += 1
        self._slow += self.now() > due
        while (left := due - self.now()) > 0:
            await asyncio.sleep(max(left, SHORTEST_S))

    def _note_computed(self, kind: Kind, done: asyncio.Future[tuple[Any, float]]) -> None:
        if self._timeline is not None and not done.cancelled() and done.exception() is None:
            now, (_, seconds) = self.now(), done.result()
            self._timeline.computed(self._rank, kind, now - seconds, now)

    def _execute(self, computation: Computation, job: Any) -> tuple[Any, float]:
        """In the node's thread; gives the result and the seconds that it took."""
        before_s = self._busy.seconds()
        with one_of(self._place.memory, self._place.at_once, self._rank), self._busy:
            [result] = execute(computation.kind, [job], self._trainer, self._evaluator)
        if self._place.trims:
            trim()
        return result, self._busy.seconds() - before_s

    async def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool) -> Any:
        # What was spawned before gets its turn first, as in the simulator, where mixing comes last of an
        # instant.
        await asyncio.sleep(0)
        return commit(prepare().run(self.fresh))

    def settle(self, vector: Tensor) -> None:
        """Nothing is put off here."""

    def finished(self, rounds: int) -> bool:
        last = self._setup.experiment.stop.rounds
        return self._leaving or (last is not None and rounds >= last)

    async def end_round(self) -> None:
        self._report()
        if is_due(self._setup, self._node.round):
            await self._record(self._node.round)
        else:
            await asyncio.sleep(0)  # a round that waits for nothing still lets the others speak
        if self._cutting is not None:
            self._checkpoint(self._cutting)

        if self._saves:
            self._save_if_due()
        if self._crashes:
            self._crash_if_due()

    def _save_if_due(self) -> None:
        """Save the node, if that is due, for when it is started anew; a kill at any instant leaves the file before."""
        due = self._setup.experiment.checkpoint.due(self._node.round, self.now())
        if due > self._saves_made:
            self._saves_made = due
            try:
                self._restart_file.parent.mkdir(exist_ok=True)
                with atomic(self._restart_file) as temporary:
                    checkpoint.write(self._node.checkpoint(), temporary, "")
            except OSError as error:  # a full disk is no reason to end; the file before is still there
                self._channel.send("event", "checkpoint", f"it could not be written: {error}")

    def _crash_if_due(self) -> None:
        for number, round in enumerate(self._crashes):
            if self._node.round >= round:
                self._report(final=True)
                self._channel.send("crash", number)
                os.kill(os.getpid(), signal.SIGKILL)

    def secret(self, n: int) -> bytes:
        return os.urandom(n)

    # --- recording

    def _report(self, final: bool = False) -> None:
        now = time.monotonic()
        if final or now - self._said > self._place.progress_s:
            self._said = now
            self._channel.send("progress", self._node.round, self.now())

    async def _record(self, moment: Moment) -> None:
        """Judge a snapshot, off the node's clock, and record it."""
        node, setup = self._node, self._setup
        if self._rank not in setup.judged and node.round == 0 and node.samples == 0:
            return  # it has no part in the algorithm
        model, time_s = node.model, self.now()
        last = moment == "end" or node.round == setup.experiment.stop.rounds
        with self._pause():
            if last and not (self._shaper and moment == "end"):
                await self._flush()
            computing_s = (self._paced if self._pace else self._busy).seconds()
            sending_s = None if self._shaper is None else self._shaper.sending_seconds()
            shares = self._usage.shares(time_s, computing_s, sending_s)
            row = node_row(node, moment, self.traffic, time_s, time.monotonic() - self._wall_start, shares)
            if self._rank in setup.evaluated:
                judged = asyncio.get_running_loop().run_in_executor(self._thread, self._judge, model)
                row |= {f"test_{name}": value for name, value in (await judged).items()}
            self._metrics.append(row)
            slot = await self._slot(last) if self._rank in setup.judged else None
        if slot is not None:
            self._models.write(slot, self._rank, model)
        if (view := node.view) is not None:
            self._channel.send("view", moment, node.round, view)
        self._channel.send("row", moment, row, slot)

    async def _flush(self) -> None:
        """Wait for what was sent, which is counted when it has left, as long as something leaves."""
        sent = -1
        while sent < self.traffic.bytes_sent:
            sent = self.traffic.bytes_sent
            with suppress(TimeoutError):
                await self._transport.flush(FLUSH_S)
                return

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._pauses.append(time.monotonic())
        try:
            yield
        finally:
            began = self._pauses[0]
            self._pauses.pop()
            if not self._pauses:
                self._paused_s += time.monotonic() - began

    async def _slot(self, last: bool) -> int | None:
        """A place for a snapshot, free again when the supervisor has taken its last one up. A node waits for that where
        the network's rows are all there is, and for the last of them; else it goes on without."""
        average = self._setup.experiment.evaluation.nodes == "average"
        while self._evaluations - self._consumed >= SNAPSHOTS:
            if not (average or last) or self._finish.done():
                return None
            self._freed.clear()
            await self._freed.wait()
        self._evaluations += 1
        return (self._evaluations - 1) % SNAPSHOTS

    def _judge(self, model: Any) -> dict[str, float]:
        with one_of(self._place.memory, self._place.at_once, self._rank):
            values = self._evaluator.test(model)
        trim()  # it takes more memory than a step, and seldom
        return values
