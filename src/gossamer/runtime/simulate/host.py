"""The simulator's side of a node: its :class:`~gossamer.node.host.Host`, with or without faults, and
tasks."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gossamer.errors import GossamerError, RunFailed
from gossamer.learning.computation import Computation
from gossamer.learning.mixing import InboxJob
from gossamer.learning.rows import Rows
from gossamer.messages.tags import Payload, Sending, Traffic
from gossamer.node import NodeRuntime
from gossamer.node.expectations import Form
from gossamer.node.host import Presence
from gossamer.node.waiting import NONE, Slot, all_ended, resolve
from gossamer.randomness import generator
from gossamer.results.observer import Observer
from gossamer.runtime.outcome import describe_failure
from gossamer.runtime.recording import Profile
from gossamer.runtime.setup import Setup
from gossamer.runtime.simulate.adapter import explained
from gossamer.runtime.simulate.compute import Compute, Executor
from gossamer.runtime.simulate.core import MAX_PASSES, Core, Order
from gossamer.runtime.simulate.fiber import Fiber
from gossamer.runtime.simulate.links import Links
from gossamer.runtime.simulate.mixing import Mixer
from gossamer.runtime.simulate.presence import SimPresence

Protocol = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, eq=False)
class SimContext:
    """The objects that all parts of a simulation share."""

    setup: Setup
    observer: Observer
    profile: Profile
    core: Core
    rows: Rows
    links: Links
    executor: Executor
    compute: Compute
    mixing: Mixer
    event: Callable[[int, str, str], None]  # records an event: rank, kind, text

    @cached_property
    def calls(self) -> tuple[Any, ...]:
        """The functions that nodes call and that are the same for all of them. Each is bound once: a method bound for every
        node takes 64 bytes, and one that is bound at each call takes time."""
        core, rows = self.core, self.rows
        of_rows = rows.store, rows.owns, rows.vector, self.mixing.settle_for
        return core.now, self.links.network_bytes, core.slot, core.spawn, *of_rows, self.compute.submit


MAX_ROUNDS = 1_000  # of a node at one instant, if nothing but time ends the run


class SimHost:
    """The host of one node. ``round_ended`` is called with the node's rank when it has completed a round;
    ``secrets`` is the number of secrets that the node has requested."""

    __slots__ = (
        *("_core", "_event", "_instant_ns", "_last", "_links", "_mixing", "_most_rounds"),
        *("_rank", "_round_ended", "_rounds", "_seed", "_submit", "compute", "counters"),
        *("fresh", "is_stored", "lost", "network_bytes", "now", "paced", "presence", "secrets"),
        *("settle", "slot", "spawn", "store"),
    )
    slot: Callable[[], Slot]
    compute: Callable[[Computation], Awaitable[Any]]
    _submit: Callable[[Computation], Awaitable[Any]]

    def __init__(self, context: SimContext, rank: int, round_ended: Callable[[int], None]) -> None:
        experiment = context.setup.experiment
        self._core, self._links, self._mixing = context.core, context.links, context.mixing
        self._seed, self._last, self._rank = experiment.seed, experiment.stop.rounds, rank
        self._round_ended, self._event = round_ended, context.event
        self.lost: Set[int] = NONE
        self.presence: Presence | None = None
        self.paced = True
        self.secrets = 0
        self._instant_ns, self._rounds = -1, 0
        self._most_rounds = MAX_PASSES if experiment.stop.ends_without_time else MAX_ROUNDS
        self.counters = context.links.counters(rank)
        self.now, self.network_bytes, self.slot, self.spawn, *of_rows, self.compute = context.calls
        self.store, self.is_stored, self.fresh, self.settle = of_rows
        self._submit = self.compute

    @property
    def traffic(self) -> Traffic:
        return self._links.traffic(self._rank)

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Any:
        return self._core.after(seconds, Order.TIMER, self._rank, call, background=background)

    def send(
        self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...], form: Form | None = None
    ) -> list[Sending]:
        return self._links.send(self._rank, to, payload, tag, form)

    def mix(self, step: InboxJob, *, read: bool) -> Awaitable[Any]:
        return self._mixing.submit(self._rank, step, read=read)

    def event(self, kind: str, text: str) -> None:
        self._event(self._rank, kind, text)

    def finished(self, rounds: int) -> bool:
        return self._last is not None and rounds >= self._last

    async def end_round(self) -> None:
        self._round_ended(self._rank)
        if self._core.now_ns != self._instant_ns:
            self._instant_ns, self._rounds = self._core.now_ns, 0
        self._rounds += 1
        if self._rounds > self._most_rounds:
            raise GossamerError(
                f"it completed {self._most_rounds} rounds at {self.now()} s without letting time pass (does anything"
                " in its rounds take time?)"
            )

    def secret(self, n: int) -> bytes:
        self.secrets += 1
        return generator(self._seed, "secret", self._rank, self.secrets).bytes(n)

    def sign(self, data: bytes) -> bytes:
        return b""

    def verify(self, rank: int, data: bytes, signature: bytes) -> bool:
        return not signature


class FaultyHost(SimHost):
    """The host of a node that can crash, leave and freeze.

    Attributes:
        dead: whether the node has crashed or left.
        leaving: whether the node is to leave at the end of its round.
        leaves: whether the node has noticed this, so that its rounds are over.
        frozen: whether everything that would happen to the node is held back."""

    def __init__(
        self, context: SimContext, rank: int, round_ended: Callable[[int], None], presence: SimPresence
    ) -> None:
        super().__init__(context, rank, round_ended)
        self.presence, self.lost, self._freezes = presence, presence.lost, context.setup.faults.freezes
        self.dead = self.leaving = self.leaves = False
        self.frozen = False
        self._waiting: list[Slot] = []  # of tasks that wait until the node thaws
        self.compute = self._compute_alive  # an override would be hidden by the bound method
        self._held: list[Callable[[], None]] = []  # calls that wait until the node thaws

    def freeze(self) -> None:
        """Hold back everything that would happen to the node."""
        self.frozen = True

    def thaw(self) -> None:
        """Let the node continue. First, the calls that were held back are made, in order."""
        waiting, self._waiting, self.frozen = self._waiting, [], False
        for slot in waiting:
            resolve(slot)
        held, self._held = self._held, []
        for call in held:
            self.happen(call)

    def thaws(self) -> Slot:
        """A new slot that is done when the node thaws."""
        self._waiting.append(slot := self.slot())
        return slot

    def happen(self, call: Callable[[], None]) -> None:
        """Make a call on the node's behalf once it is not frozen, or never if it is dead by then."""
        if self.frozen:
            self._held.append(call)
        elif not self.dead:
            call()

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Any:
        return super().timer(seconds, lambda: self.happen(call), background=background)

    def send(
        self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...], form: Form | None = None
    ) -> list[Sending]:
        # The tasks of a dead node are being cancelled and may still send.
        if self.dead or not self.lost.isdisjoint(to):
            reached = [] if self.dead else [peer for peer in to if peer not in self.lost]
            sent = dict(
                zip(reached, super().send(reached, payload, tag, form) if reached else (), strict=True)
            )
            sendings = [sent[peer] if peer in sent else self._links.drop(self._rank) for peer in to]
        else:
            sendings = super().send(to, payload, tag, form)
        return [_HeldSending(sending, self) for sending in sendings] if self._freezes else sendings

    def _compute_alive(self, computation: Computation) -> Awaitable[Any]:
        self._check_alive()
        return self._submit(computation)

    def mix(self, step: InboxJob, *, read: bool) -> Awaitable[Any]:
        self._check_alive()
        return super().mix(step, read=read)

    def finished(self, rounds: int) -> bool:
        self.leaves = self.leaves or self.leaving
        return self.leaves or super().finished(rounds)

    async def end_round(self) -> None:
        self._check_alive()
        await super().end_round()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.dead:
            raise CancelledError


class _HeldSending(Sending):
    """A sent message whose acceptance a frozen node notices only after it thaws."""

    def __init__(self, sending: Sending, host: FaultyHost) -> None:
        self._sending, self._host = sending, host

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._sending.__await__()
        while self._host.frozen:
            yield from self._host.thaws().__await__()

    def done(self) -> bool:
        return self._sending.done() and not self._host.frozen

    def cancel(self) -> bool:
        return self._sending.cancel()


class NodeTasks:
    """The tasks of all nodes, and the end of the run. ``returned`` is called with the rank of a node whose
    protocol has returned.

    Attributes:
        end: why the run ended.
        running: the ranks whose protocols the run waits for."""

    def __init__(
        self,
        core: Core,
        size: int,
        nodes: Sequence[NodeRuntime],
        returned: Callable[[int], None],
    ) -> None:
        self._core, self._nodes, self._returned = core, nodes, returned
        self.end = core.slot()
        self.running = set(range(size))
        self._tasks: dict[int, Fiber[None]] = {}
        self._endings: dict[Fiber[None], NodeRuntime] = {}  # of nodes that have crashed or left

    def begin(self, node: NodeRuntime, protocol: Protocol) -> None:
        self.running.add(node.rank)
        self._tasks[node.rank] = self._core.spawn(self._run(node, protocol))

    async def _run(self, node: NodeRuntime, protocol: Protocol) -> None:
        """Run a node's protocol. The tasks that it spawned continue after it returns, and may still fail."""
        try:
            await node.live(protocol)
            self._returned(node.rank)
            raise await node.failure()
        except Exception as error:  # noqa: BLE001 - an author's protocol may raise anything
            failure = describe_failure(explained(error), node.rank, node.failure_round)
            failure.__cause__ = error
            self.fail(failure)

    def cancel(self, rank: int) -> None:
        if rank in self._tasks:
            self._tasks.pop(rank).cancel()
            node = self._nodes[rank]
            self._endings[ending := self._core.spawn(node.end())] = node
            ending.add_done_callback(self._endings.pop)

    def ended(self, rank: int) -> None:
        self.running.discard(rank)
        if not self.running:
            self.finish("rounds")

    def finish(self, reason: str) -> None:
        if not self.end.done():
            self.end.set_result(reason)

    def fail(self, error: BaseException) -> None:
        if not self.end.done():
            self.end.set_exception(error)

    def close(self, *, interrupted: bool) -> None:
        """Cancel all tasks, unless the user interrupts, and close those that don't end at this instant."""
        if not interrupted:
            for task in (tasks := self._unended()):
                task.cancel()
            with suppress(RunFailed):  # some tasks don't end
                self._core.run(all_ended(self._core.slot, tasks))
        for task in self._unended():
            with suppress(Exception):  # an algorithm may raise on its way out, after the end of the run
                task.close()

    def _unended(self) -> list[Any]:
        of_nodes = [task for node in (*self._nodes, *self._endings.values()) for task in node.tasks]
        return [task for task in (*self._tasks.values(), *self._endings, *of_nodes) if not task.done()]
