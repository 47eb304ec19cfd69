"""One node's end of all its connections: who it is to the others, and what these connections share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gossamer.messages import BEGIN_BYTES, CHUNK_BYTES
from gossamer.messages.tags import Message, Traffic
from gossamer.runtime.processes.security.guard import Guard
from gossamer.runtime.processes.security.trust import Security
from gossamer.runtime.processes.transport.link import Link
from gossamer.runtime.processes.transport.shaper import Shaper

RECEIVE_BYTES = 64 * 1024
"""Bytes that the kernel holds of a connection, and that are read at a time."""


class Endpoint:
    """One node's end; see :class:`~gossamer.runtime.processes.transport.transport.Transport`, whose arguments these are.

    Attributes:
        traffic: what has been sent and received by now.
        connections: those that are open.
        closing: whether nothing is to be begun any more.
        received: where what comes in is read to: filled and read to its end within one callback of the loop, so that all
            connections can share it.
        opened: the same for what TLS makes of it.
        guard: watches over those who have not said who they are.
    """

    def __init__(
        self,
        rank: int,
        addresses: list[tuple[str, int]],
        token: bytes,
        *,
        incarnation: int,
        limit: int,
        deliver: Callable[[Message], None],
        event: Callable[[str, str], None],
        shaper: Shaper | None,
        security: Security | None,
    ) -> None:
        self.rank, self.addresses, self.token, self.incarnation = rank, addresses, token, incarnation
        self.limit, self.deliver = limit, deliver
        self.shaper, self.security = shaper, security
        self.loop = asyncio.get_running_loop()
        self.traffic = Traffic()
        self.connections: set[Link] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing = False
        # What is shaped is read chunk by chunk.
        self.received = memoryview(bytearray(RECEIVE_BYTES if shaper is None else BEGIN_BYTES + CHUNK_BYTES))
        self.opened = memoryview(bytearray(0 if security is None else len(self.received)))
        hosts = [host for host, *_ in addresses]
        self.guard = Guard(hosts, lambda line: event("refused", line), self.loop.time)
        self._changed = asyncio.Event()
        if shaper is not None:
            shaper.changed = self.wake

    @property
    def size(self) -> int:
        """How many nodes there are."""
        return len(self.addresses)

    def wake(self) -> None:
        """Something changed that somebody may wait for."""
        self._changed.set()

    async def changed(self) -> None:
        """Wait until something changed; the caller checks its condition right before and right after."""
        self._changed.clear()
        await self._changed.wait()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside, until it is done or all is closed."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task
