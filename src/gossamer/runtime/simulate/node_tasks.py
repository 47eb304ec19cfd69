"""The lives of a simulation's nodes: how each begins and ends, and how the run ends with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gossamer.node import NodeRuntime
from gossamer.runtime.outcome import describe_failure


class NodeTasks:
    """The tasks in which nodes live, and the end of the run.

    Args:
        loop: runs them.
        size: the number of nodes.
        nodes: all of them by rank, in the life that each is in; filled before one begins.
        returned: called with the rank of a node whose protocol has returned.

    Attributes:
        end: why the run ended.
        running: the ranks that the run waits for.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        size: int,
        nodes: Sequence[NodeRuntime],
        returned: Callable[[int], None],
    ) -> None:
        self._nodes, self._returned = nodes, returned
        self.end: asyncio.Future[str] = loop.create_future()
        self.running = set(range(size))
        self._node_tasks: dict[int, asyncio.Future[None]] = {}
        self._endings: set[asyncio.Future[None]] = set()

    def begin(self, node: NodeRuntime, protocol: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let a node live, from when this instant's events are done."""
        life = self._node_tasks[node.rank] = asyncio.ensure_future(self._live(node, protocol))
        life.add_done_callback(self._ended)

    async def _live(self, node: NodeRuntime, protocol: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A node's protocol; afterwards its spawned tasks go on answering, and may still fail."""
        try:
            await node.live(protocol())
            self._returned(node.rank)
            raise await node.failure()
        except Exception as error:
            raise describe_failure(error, node.rank, node.round) from error

    def _ended(self, life: asyncio.Future[None]) -> None:
        if not life.cancelled() and (error := life.exception()) is not None:
            self.fail(error)

    def cancel(self, rank: int) -> None:
        """End all tasks of a node."""
        if rank in self._node_tasks:
            self._node_tasks.pop(rank).cancel()
            self._endings.add(ending := asyncio.ensure_future(self._nodes[rank].end()))
            ending.add_done_callback(self._endings.discard)

    def finish(self, reason: str) -> None:
        """End the run in order, if it has not ended."""
        if not self.end.done():
            self.end.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """End the run by a failure, if it has not ended."""
        if not self.end.done():
            self.end.set_exception(error)

    def abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of all tasks of all nodes, none of which runs again: one that never waits would go on for ever."""
        loop.set_exception_handler(lambda loop, context: None)  # each was pending, as it should
        for task in asyncio.all_tasks(loop):
            task.cancel()
            if (protocol := task.get_coro()) is not None:
                protocol.close()

    async def close(self) -> None:
        """End all tasks of all nodes."""
        lives = asyncio.all_tasks() - {asyncio.current_task()}
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        for node in self._nodes:
            await node.end()
