"""The host of a node that faults may hit: it dies, goes or stands still, and its node can't tell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from torch import Tensor

from gossamer.learning.computation import Computation
from gossamer.learning.mixing import Mix
from gossamer.messages.tags import Payload, Sending, Traffic
from gossamer.node.host import Host


class FaultyHost:
    """A host whose node can die, go and stand still; all else is the host's that it stands before.

    Args:
        host: the node's side of the simulator.
        rank: the node.
        lost: the ranks that are taken for dead, a set that changes with time.
        freezes: whether nodes stand still at times.
        give_up: gives what becomes of a message of some node that is lost at once.
        round_completed: called with its rank when the node has completed a round.

    Attributes:
        dead: whether it is.
        leaving: whether it goes at its round's end.
        frozen: whether it stands still.
    """

    def __init__(
        self,
        host: Host,
        rank: int,
        lost: set[int],
        freezes: bool,
        give_up: Callable[[int], Sending],
        round_completed: Callable[[int], None],
    ) -> None:
        self._host, self._rank, self._freezes = host, rank, freezes
        self._give_up, self._round_completed = give_up, round_completed
        self.lost = lost
        self.dead = self.leaving = self.frozen = False
        self._held: list[Callable[[], None]] = []  # what would have happened while it stood still
        self._thawed: asyncio.Future[None] | None = None

    # --- what becomes of it

    def freeze(self) -> None:
        """Nothing happens to the node from now on."""
        self.frozen = True
        self._thawed = asyncio.get_running_loop().create_future()

    def thaw(self) -> None:
        """It goes on: with what should have happened meanwhile, in that order."""
        self.frozen = False
        assert self._thawed is not None
        self._thawed.set_result(None)
        held, self._held = self._held, []
        for call in held:
            call()

    def happen(self, call: Callable[[], None]) -> None:
        """Make a call on the node's behalf, as soon as it doesn't stand still; never if it is dead by then."""
        if self.frozen:
            self._held.append(lambda: self.happen(call))
        elif not self.dead:
            call()

    async def wait_until_thawed(self) -> None:
        """Until the node doesn't stand still."""
        while self.frozen and self._thawed is not None:
            await asyncio.shield(self._thawed)

    # --- the host

    @property
    def traffic(self) -> Traffic:
        return self._host.traffic

    @property
    def counters(self) -> Traffic:
        return self._host.counters

    def now(self) -> float:
        return self._host.now()

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> _Alarm:
        return _Alarm(self, seconds, call, self._host, background)

    def store(self, vector: Tensor) -> Tensor:
        return self._host.store(vector)

    def is_stored(self, tensor: Tensor) -> bool:
        return self._host.is_stored(tensor)

    def fresh(self, length: int) -> Tensor:
        return self._host.fresh(length)

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        if self.dead:  # what is left of its tasks says this while they are cancelled
            return [self._give_up(self._rank) for _ in to]
        reached = [peer for peer in to if peer not in self.lost] if self.lost else to
        sendings = self._host.send(reached, payload, tag) if reached else []
        if self._freezes:
            sendings = [_Patient(sending, self) for sending in sendings]
        if len(reached) == len(to):
            return sendings
        sent = dict(zip(reached, sendings, strict=True))
        return [sent[peer] if peer in sent else self._give_up(self._rank) for peer in to]

    def compute(self, computation: Computation) -> Awaitable[Any]:
        self._live()
        return self._host.compute(computation)

    def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool) -> Awaitable[Any]:
        self._live()
        return self._host.mix(prepare, commit, read=read)

    def settle(self, vector: Tensor) -> None:
        self._host.settle(vector)

    def finished(self, rounds: int) -> bool:
        return self.leaving or self._host.finished(rounds)

    async def end_round(self) -> None:
        self._live()
        await self._host.end_round()
        self._round_completed(self._rank)
        self._live()

    def secret(self, n: int) -> bytes:
        return self._host.secret(n)

    def _live(self) -> None:
        if self.dead:
            raise asyncio.CancelledError


class _Alarm:
    """A timer of a mortal node."""

    def __init__(
        self, host: FaultyHost, seconds: float, call: Callable[[], None], inner: Host, background: bool
    ) -> None:
        self._call: Callable[[], None] | None = call
        self._timer = inner.timer(seconds, lambda: host.happen(self._ring), background=background)

    def _ring(self) -> None:
        if self._call is not None:
            self._call()

    def cancel(self) -> None:
        """Don't make the call."""
        self._call = None
        self._timer.cancel()


class _Patient(Sending):
    """A message of a node that may stand still when it is accepted."""

    def __init__(self, sending: Sending, host: FaultyHost) -> None:
        self._sending, self._host = sending, host

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._sending.__await__()
        yield from self._host.wait_until_thawed().__await__()

    def done(self) -> bool:
        return self._sending.done() and not self._host.frozen

    def cancel(self) -> bool:
        return self._sending.cancel()
