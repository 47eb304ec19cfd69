"""A node's life: its tasks, from its protocol's start until the last of them has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gossamer.errors import GossamerError

T = TypeVar("T")


class Life:
    """The tasks of one node. The first failure in any of them is the node's.

    Args:
        retire: called when its protocol has returned and no task is left; perhaps more than once.
    """

    def __init__(self, retire: Callable[[], None]) -> None:
        self._retire = retire
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beside: set[asyncio.Task[Any]] = set()  # those that the protocol knows nothing of
        self._failure: asyncio.Future[BaseException] | None = None
        self._failed: BaseException | None = None
        self._over = False

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of the node."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._retire_if_over()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def owns(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is one of the node's."""
        return task in self._tasks

    def fail(self, error: BaseException) -> None:
        """Something of this node has failed; only the first failure counts."""
        if self._failed is None:
            self._failed = error
            if self._failure is not None and not self._failure.done():
                self._failure.set_result(error)

    async def live(self, protocol: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]) -> None:
        """Run the node's protocol until it returns; the node's first failure is raised.

        Args:
            protocol: what the node does.
            beside: what runs as long as the node is there, whatever its protocol does.
        """
        self._failure = asyncio.get_running_loop().create_future()
        if self._failed is not None:  # by a message that came before the start
            self._failure.set_result(self._failed)
        self._beside.update(map(self.spawn, beside))
        main = self.spawn(protocol)
        await asyncio.wait((main, self._failure), return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            raise self._failure.result()
        if main.cancelled():
            raise GossamerError("CancelledError: it awaited a task that was cancelled")
        main.result()
        self._over = True
        self._retire_if_over()

    def _retire_if_over(self) -> None:
        if self._over and self._tasks <= self._beside:
            self._retire()

    async def failure(self) -> BaseException:
        """Wait for a task of this node to fail, after its protocol has returned."""
        assert self._failure is not None, "live() comes first"
        return await self._failure

    async def end(self) -> None:
        """Cancel every task and wait until it has ended."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            # Done callbacks run after wait() returns; a task is forgotten here in any case.
            self._tasks.difference_update(tasks)
