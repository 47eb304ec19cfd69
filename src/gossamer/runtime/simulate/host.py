"""What the simulator gives one node: its :class:`~gossamer.node.host.Host`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.config import Experiment
from gossamer.errors import GossamerError
from gossamer.learning.mixing import Mix
from gossamer.learning.rows import Rows
from gossamer.messages.tags import Payload, Sending, Traffic
from gossamer.randomness import generator
from gossamer.runtime.simulate.clock import MAX_PASSES, Clock, Order
from gossamer.runtime.simulate.compute import Compute
from gossamer.runtime.simulate.links import Links
from gossamer.runtime.simulate.mixing import Mixing


@dataclass(frozen=True, eq=False)
class SimContext:
    """The parts of the simulator that all nodes share.

    Args:
        clock: virtual time.
        rows: the pool of parameter vectors.
        links: carry messages.
        compute: runs computations.
        mixing: runs mixing steps.
    """

    clock: Clock
    rows: Rows
    links: Links
    compute: Compute
    mixing: Mixing


class SimHost:
    """The host of one node.

    Args:
        context: what all nodes share.
        experiment: says after how many rounds a node has finished.
        rank: the node.
        round_ended: called with the node's rank when it has completed a round.

    Attributes:
        secrets: how many secrets the node has asked for.
    """

    def __init__(
        self, context: SimContext, experiment: Experiment, rank: int, round_ended: Callable[[int], None]
    ) -> None:
        self._clock, self._links, self._mixing = context.clock, context.links, context.mixing
        self._seed, self._last, self._rank = experiment.seed, experiment.stop.rounds, rank
        self._round_ended = round_ended
        self.lost: set[int] = set()
        self.secrets = 0
        self._instant_ns, self._rounds = -1, 0
        # Methods that don't depend on the node are bound once, which saves a call each time.
        self.now = context.clock.now
        self.store, self.is_stored, self.fresh = context.rows.store, context.rows.owns, context.rows.vector
        self.compute, self.settle = context.compute.submit, context.mixing.settle_for

    @property
    def traffic(self) -> Traffic:
        return self._links.traffic(self._rank)

    @property
    def counters(self) -> Traffic:
        return self._links.counters(self._rank)

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Any:
        return self._clock.after(seconds, Order.TIMER, self._rank, call, background=background)

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        return self._links.send(self._rank, to, payload, tag)

    def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool) -> Awaitable[Any]:
        return self._mixing.submit(self._rank, prepare, commit, read=read)

    def finished(self, rounds: int) -> bool:
        return self._last is not None and rounds >= self._last

    async def end_round(self) -> None:
        self._round_ended(self._rank)
        if self._clock.now_ns != self._instant_ns:
            self._instant_ns, self._rounds = self._clock.now_ns, 0
        self._rounds += 1
        if self._rounds > MAX_PASSES:
            raise GossamerError(
                f"it completed {MAX_PASSES} rounds at {self.now()} s without letting time pass (nothing in its rounds"
                " takes time?)"
            )

    def secret(self, n: int) -> bytes:
        self.secrets += 1
        return generator(self._seed, "secret", self._rank, self.secrets).bytes(n)
