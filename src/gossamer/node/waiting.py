"""What runs at a node, and what it waits for. The engine provides both, as asyncio's tasks and futures or as its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import Any, Protocol, TypeVar, runtime_checkable

NONE: frozenset[Any] = frozenset()
"""An empty set for many nodes: each new one takes 216 bytes."""

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class NodeTask(Protocol[T_co]):
    """A coroutine that runs concurrently: what :meth:`Node.spawn` and :meth:`Node.answer` return.

    Awaiting it gives the coroutine's result, or raises its exception. If a task is cancelled while it awaits another
    one, that one is cancelled too."""

    def done(self) -> bool:
        """Whether the coroutine has ended."""

    def cancel(self) -> bool:
        """Raise asyncio.CancelledError in the coroutine, at the call that it awaits, when this task runs next. False if
        it has ended."""

    def cancelled(self) -> bool:
        """Whether it has ended by its cancellation."""

    def result(self) -> T_co:
        """What the coroutine has returned. Raises its exception, or asyncio.InvalidStateError while it runs."""

    def exception(self) -> BaseException | None:
        """The exception that ended the coroutine, None if it has returned. CancelledError if it was cancelled, and
        asyncio.InvalidStateError while it runs."""

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        """Call a function with this task when it has ended, before the tasks that are woken later run."""

    def __await__(self) -> Generator[Any, None, T_co]: ...


@runtime_checkable
class Slot(Protocol):
    """A place for a result that one task waits for. If that task is cancelled, the slot is done."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


def resolve(slot: Slot) -> None:
    """Wake the task that waits for a slot, unless it was cancelled or woken already."""
    if not slot.done():
        slot.set_result(None)


async def all_ended(new_slot: Callable[[], Slot], tasks: Collection[NodeTask[Any]]) -> None:
    """Wait until all of some tasks have ended, however they end."""
    running = {task for task in tasks if not task.done()}
    if not running:
        return
    over = new_slot()

    def ended(task: NodeTask[Any]) -> None:
        running.discard(task)
        if not running:
            resolve(over)

    for task in tuple(running):
        task.add_done_callback(ended)
    await over
