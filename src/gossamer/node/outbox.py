"""A node's messages on the way to its engine. A message whose encoding takes time is queued after that
time."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gossamer.messages.tags import Payload, Sending
from gossamer.node.setup import Counters

if TYPE_CHECKING:
    from gossamer.node.runtime import NodeRuntime


class LateSending(Sending):
    """A message that is queued later than it was sent. If it is cancelled before that, it is never queued."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._queued: asyncio.Future[Sending | None] = asyncio.get_running_loop().create_future()

    def queued(self, sending: Sending) -> None:
        """Note that the engine has queued the message."""
        self._queued.set_result(sending)

    def __await__(self) -> Generator[Any, None, None]:
        sending = yield from asyncio.shield(self._queued).__await__()
        if sending is not None:
            yield from sending.__await__()

    def done(self) -> bool:
        return self._queued.done() and ((sending := self._queued.result()) is None or sending.done())

    def cancel(self) -> bool:
        if self._queued.done():
            return (sending := self._queued.result()) is None or sending.cancel()
        self._queued.set_result(None)
        self._counters.messages_cancelled += 1
        return True


class Outbox:
    """Sends a node's messages in order. If computations take the time given by the compute profile, so does
    encoding: a message waits until it and every earlier message is encoded."""

    def __init__(self, runtime: NodeRuntime) -> None:
        self._runtime = runtime
        self._charged = 0  # number of encodings whose time has passed

    def send(self, ranks: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        """Queue a frozen payload for some ranks."""
        runtime, steps = self._runtime, 0.0
        host, own = runtime.host, runtime.own
        if runtime.coder is not None and host.paced:
            encoded, self._charged = runtime.coder.encoded - self._charged, runtime.coder.encoded
            steps = encoded * runtime.setup.experiment.compute.steps_per_encoding
        if not steps and (own.encoding is None or own.encoding.done()):
            return host.send(ranks, payload, tag)
        late = {rank: LateSending(host.counters) for rank in ranks}
        own.encoding = runtime.spawn(self._send_later(own.encoding, steps, late, payload, tag))
        return list(late.values())

    def withhold(self) -> Sending:
        """A message that is cancelled before it is queued."""
        sending = LateSending(self._runtime.host.counters)
        sending.cancel()
        return sending

    async def _send_later(
        self,
        previous: asyncio.Task[None] | None,
        steps: float,
        late: Mapping[int, LateSending],
        payload: Payload,
        tag: tuple[str | int, ...],
    ) -> None:
        if previous is not None:
            await asyncio.wait((previous,))
        if steps:
            await self._runtime.own.encode(self._runtime.node.step, steps)
        waiting = [rank for rank, sending in late.items() if not sending.done()]
        for rank, sending in zip(waiting, self._runtime.host.send(waiting, payload, tag), strict=True):
            late[rank].queued(sending)
