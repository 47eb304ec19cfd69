"""The tasks of a simulation's nodes, and the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from gossamer.errors import RunFailed
from gossamer.node import NodeRuntime
from gossamer.runtime.outcome import describe_failure


class NodeTasks:
    """The tasks of all nodes, and the end of the run. ``returned`` is called with the rank of a node whose protocol has
    returned.

    Attributes:
        end: why the run ended.
        running: the ranks whose protocols the run waits for.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        size: int,
        nodes: Sequence[NodeRuntime],
        returned: Callable[[int], None],
    ) -> None:
        self._loop, self._nodes, self._returned = loop, nodes, returned
        self.end: asyncio.Future[str] = loop.create_future()
        self.running = set(range(size))
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._endings: set[asyncio.Task[None]] = set()

    def begin(self, node: NodeRuntime, protocol: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a node's protocol when the events of this instant are done."""
        self.running.add(node.rank)
        task = self._tasks[node.rank] = self._loop.create_task(self._run(node, protocol))
        task.add_done_callback(self._done)

    async def _run(self, node: NodeRuntime, protocol: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a node's protocol. The tasks that it spawned go on after it returns, and may still fail."""
        try:
            await node.live(protocol())
            self._returned(node.rank)
            raise await node.failure()
        except Exception as error:
            raise describe_failure(error, node.rank, node.failure_round) from error

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def cancel(self, rank: int) -> None:
        """Cancel all tasks of a node."""
        if rank in self._tasks:
            self._tasks.pop(rank).cancel()
            self._endings.add(ending := self._loop.create_task(self._nodes[rank].end()))
            ending.add_done_callback(self._endings.discard)

    def ended(self, rank: int) -> None:
        """Stop waiting for a node. The run ends when it waits for none."""
        self.running.discard(rank)
        if not self.running:
            self.finish("rounds")

    def finish(self, reason: str) -> None:
        """End the run in order, unless it has ended."""
        if not self.end.done():
            self.end.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """End the run by a failure, unless it has ended."""
        if not self.end.done():
            self.end.set_exception(error)

    def close(self, *, interrupted: bool) -> None:
        """End all tasks: cancel them, unless the user interrupts, and close those that don't end at this instant."""
        tasks = asyncio.all_tasks(self._loop)
        if tasks and not interrupted:
            for task in tasks:
                task.cancel()
            with suppress(RunFailed):  # some don't end
                self._loop.run_until_complete(asyncio.wait(tasks))
        # Ignore what asyncio says of tasks that are destroyed while they are pending.
        self._loop.set_exception_handler(lambda loop, context: None)
        for task in asyncio.all_tasks(self._loop):
            coroutine = task.get_coro()
            assert coroutine is not None
            with suppress(Exception):  # an algorithm may raise on its way out, after the end of the run
                coroutine.close()
