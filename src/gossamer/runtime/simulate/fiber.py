"""Coroutines that the core steps, and the slots that they wait for.

A fiber that is woken is one entry of the queue of what is ready, so fibers resume in the order in which they were woken, as
asyncio's tasks do."""

from __future__ import annotations

from asyncio import CancelledError, InvalidStateError
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from gossamer.runtime.simulate.adapter import Adapter, Ready

T = TypeVar("T")


class SimSlot:
    """The simulator's :class:`~gossamer.node.waiting.Slot`."""

    __slots__ = ("_done", "_error", "_fiber", "_ready", "_result")

    def __init__(self, ready: Ready) -> None:
        self._ready = ready
        self._done = False
        self._fiber: Fiber[Any] | None = None  # the one that waits
        self._error: BaseException | None = None
        self._result: Any  # if it is done without an error

    def done(self) -> bool:
        return self._done

    def set_result(self, result: Any, /) -> None:
        if self._done:
            raise InvalidStateError("the slot is done already")
        self._done, self._result = True, result
        if self._fiber is not None:
            self._ready.append((step, self._fiber, None))

    def set_exception(self, error: BaseException, /) -> None:
        self.set_result(None)
        self._error = error

    def cancel(self) -> bool:
        if self._done:
            return False
        self.set_exception(CancelledError())
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._done:
            yield self
        if self._error is not None:
            raise self._error
        return self._result


class Fiber(Generic[T]):
    """A coroutine that runs concurrently: the simulator's :class:`~gossamer.node.waiting.NodeTask`.

    It is a future for asyncio's functions too, so that they can wait for it."""

    __slots__ = (
        "_adapter",
        "_callbacks",
        "_cancels",
        "_context",
        "_coroutine",
        "_done",
        "_error",
        "_result",
        "_waits_for",
        "watched",
    )
    # What asyncio's functions expect of a task besides its methods.
    _asyncio_future_blocking = False
    _cancel_message = None
    _log_destroy_pending = property(lambda fiber: False, lambda fiber, value: None)

    def __init__(self, adapter: Adapter, coroutine: Coroutine[Any, Any, T]) -> None:
        self._adapter, self._coroutine, self._context = adapter, coroutine, copy_context()
        self._done = self._cancels = False
        self._waits_for: Any = None  # what has to be done before it continues
        # What becomes ready when it ends: a function, and its first argument. The second one is the fiber.
        self._callbacks: list[tuple[Callable[[Any, Any], object], Any]] = []
        self._result: Any = None
        self._error: BaseException | None = None
        self.watched = False
        """Whether anyone but its owner has waited for its end. The owner's callback is the first one."""
        adapter.ready.append((step, self, None))

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return isinstance(self._error, CancelledError)

    def cancel(self, msg: object = None) -> bool:
        """See :class:`~gossamer.node.waiting.NodeTask`; ``msg`` is what asyncio passes, and has no effect."""
        if self._done:
            return False
        if self._waits_for is None or not self._waits_for.cancel():
            self._cancels = True
        return True

    def result(self) -> T:
        if not self._done:
            raise InvalidStateError("the task has not ended")
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result

    def exception(self) -> BaseException | None:
        if not self._done or self.cancelled():
            self.result()  # raises
        return self._error

    def add_done_callback(self, call: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        self._when_done(_call_back, (call, context))

    def remove_done_callback(self, call: Callable[[Any], object], /) -> int:
        kept = [entry for entry in self._callbacks if entry[0] is not _call_back or entry[1][0] != call]
        removed, self._callbacks = len(self._callbacks) - len(kept), kept
        return removed

    def get_loop(self) -> Any:
        return self._adapter

    def _make_cancelled_error(self) -> CancelledError:
        return CancelledError()

    def set_name(self, name: object) -> None:
        """Do nothing: only asyncio's debugger shows names."""

    def close(self) -> None:
        """End a coroutine that can't go on."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            yield self
        return self.result()

    def _when_done(self, call: Callable[[Any, Any], object], first: Any) -> None:
        if self._done:
            self._adapter.ready.append((call, first, self))
        else:
            self._callbacks.append((call, first))

    def _wait(self, awaited: Any) -> None:
        """Wait for what the coroutine has yielded: a slot, a fiber, a future of asyncio, or None, which lets others run."""
        if type(awaited) is SimSlot and awaited._fiber is None:
            awaited._fiber = self
        elif awaited is None:
            self._adapter.ready.append((step, self, None))
            return
        elif type(awaited) is Fiber and awaited is not self:
            awaited._when_done(_step_after, self)
        elif not self._adapter.wakes(awaited, partial(_step_after, self)):
            error = RuntimeError(f"a task awaits {awaited!r}, which nothing in this simulation can end")
            self._adapter.ready.append((step, self, error))
            return
        self._waits_for = awaited
        if self._cancels and awaited.cancel():
            self._cancels = False

    def _end(self, result: Any, error: BaseException | None) -> None:
        self._done, self._result, self._error = True, result, error
        self.watched = len(self._callbacks) > 1
        for call, first in self._callbacks:
            self._adapter.ready.append((call, first, self))
        self._callbacks = []


def step(fiber: Fiber[Any], error: BaseException | None) -> None:
    """Let a fiber run until it next waits. An error is raised where it waits."""
    if fiber._cancels:
        fiber._cancels, error = False, CancelledError()
    fiber._waits_for = None
    coroutine, run = fiber._coroutine, fiber._context.run
    try:
        awaited = run(coroutine.send, None) if error is None else run(coroutine.throw, error)
    except StopIteration as end:
        fiber._end(end.value, None)
    except (KeyboardInterrupt, SystemExit) as ended:
        fiber._end(None, ended)
        raise
    except BaseException as ended:  # noqa: BLE001 - an author's coroutine may raise anything; its node reports it
        fiber._end(None, ended)
    else:
        fiber._wait(awaited)


def _step_after(fiber: Fiber[Any], awaited: object) -> None:
    """Let a fiber run after another one, or a future of asyncio, is done."""
    step(fiber, None)


def _call_back(call: tuple[Callable[[Any], object], Context | None], fiber: Fiber[Any]) -> None:
    function, context = call
    if context is None:
        function(fiber)
    else:
        context.run(function, fiber)
