"""The host of a node that faults may hit: the node crashes, leaves or freezes, and cannot tell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from gossamer.config import Experiment
from gossamer.learning.computation import Computation
from gossamer.learning.mixing import Mix
from gossamer.messages.tags import Payload, Sending
from gossamer.node.host import Timer
from gossamer.runtime.simulate.host import SimContext, SimHost


class FaultyHost(SimHost):
    """The host of a node that can crash, leave and freeze.

    Args:
        context: what all nodes share.
        experiment: says after how many rounds a node has finished.
        rank: the node.
        round_ended: called with the node's rank when it has completed a round.
        lost: the ranks that count as dead, a set that changes with time.
        freezes: whether any node ever freezes.

    Attributes:
        dead: whether the node has crashed or left.
        leaving: whether the node leaves at the end of its round.
        frozen: whether the node is frozen.
    """

    def __init__(
        self,
        context: SimContext,
        experiment: Experiment,
        rank: int,
        round_ended: Callable[[int], None],
        lost: set[int],
        freezes: bool,
    ) -> None:
        super().__init__(context, experiment, rank, round_ended)
        self.compute = self._compute
        self.lost, self._freezes = lost, freezes
        self.dead = self.leaving = self.frozen = False
        self._submit = context.compute.submit
        self._held: list[Callable[[], None]] = []  # calls that wait until the node thaws
        self._thawed: asyncio.Future[None] | None = None

    # --- faults

    def freeze(self) -> None:
        """Hold back everything that would happen to the node."""
        self.frozen = True
        self._thawed = asyncio.get_running_loop().create_future()

    def thaw(self) -> None:
        """Let the node go on. First it catches up with what was held back, in order."""
        self.frozen = False
        assert self._thawed is not None
        self._thawed.set_result(None)
        held, self._held = self._held, []
        for call in held:
            call()

    def happen(self, call: Callable[[], None]) -> None:
        """Make a call on the node's behalf as soon as it is not frozen, or never if it is dead by then."""
        if self.frozen:
            self._held.append(lambda: self.happen(call))
        elif not self.dead:
            call()

    async def wait_until_thawed(self) -> None:
        """Wait until the node is not frozen."""
        while self.frozen and self._thawed is not None:
            await asyncio.shield(self._thawed)

    # --- the host

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Any:
        held = _HeldTimer(call)
        held.timer = super().timer(seconds, lambda: self.happen(held.fire), background=background)
        return held

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        if self.dead:  # its tasks are being cancelled and may still send
            return [self._links.drop(self._rank) for _ in to]
        reached = [peer for peer in to if peer not in self.lost] if self.lost else to
        sendings = super().send(reached, payload, tag) if reached else []
        if self._freezes:
            sendings = [_HeldSending(sending, self) for sending in sendings]
        if len(reached) == len(to):
            return sendings
        sent = dict(zip(reached, sendings, strict=True))
        return [sent[peer] if peer in sent else self._links.drop(self._rank) for peer in to]

    def _compute(self, computation: Computation) -> Awaitable[Any]:
        self._check_alive()
        return self._submit(computation)

    def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool) -> Awaitable[Any]:
        self._check_alive()
        return super().mix(prepare, commit, read=read)

    def finished(self, rounds: int) -> bool:
        return self.leaving or super().finished(rounds)

    async def end_round(self) -> None:
        self._check_alive()
        await super().end_round()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.dead:
            raise asyncio.CancelledError


class _HeldTimer:
    """A timer that fires only while its node is not frozen."""

    timer: Timer

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def fire(self) -> None:
        if self._call is not None:
            self._call()

    def cancel(self) -> None:
        self._call = None
        self.timer.cancel()


class _HeldSending(Sending):
    """A sent message whose acceptance a frozen node notices only after it thaws."""

    def __init__(self, sending: Sending, host: FaultyHost) -> None:
        self._sending, self._host = sending, host

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._sending.__await__()
        yield from self._host.wait_until_thawed().__await__()

    def cancel(self) -> bool:
        return self._sending.cancel()
