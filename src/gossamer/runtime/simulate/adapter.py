"""asyncio's objects in authors' code: ``Event``, ``Queue``, ``Lock``, ``gather``, ``wait``, ``shield`` and futures.

They find the adapter as the running event loop while coroutines run, even if the simulation itself runs in an event loop,
such as that of a notebook. What their futures wake is queued with the fibers, so it resumes in the order in which it was
woken. Time is virtual, so asyncio's timers can't work, nor what waits for threads and sockets."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from traceback import walk_tb
from typing import Any, cast

from gossamer.errors import GossamerError
from gossamer.node.runtime import running_node

Ready = deque[tuple[Callable[[Any, Any], object], Any, Any]]
"""What runs next at this instant, in order: a function and its two arguments."""

_NEEDS_A_TASK = {"asyncio.taskgroups": "TaskGroup", "asyncio.timeouts": "timeout"}
"""Modules of asyncio that look for asyncio's own task, and what authors know of them."""


class Adapter:
    """As a context, the running event loop of asyncio's objects. ``ready`` is the core's queue."""

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self._outer: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> None:
        asyncio._set_running_loop(cast("asyncio.AbstractEventLoop", self))

    def __exit__(self, *_: object) -> None:
        asyncio._set_running_loop(self._outer)

    def begin(self) -> None:
        """Note the event loop that runs outside, if any."""
        try:
            self._outer = asyncio.get_running_loop()
        except RuntimeError:
            self._outer = None

    def wakes(self, future: Any, call: Callable[[Any], object]) -> bool:
        """Call a function when a future of asyncio is done. False if it is none, or none of this simulation."""
        if not asyncio.isfuture(future) or cast("object", future.get_loop()) is not self:
            return False
        future._asyncio_future_blocking = False
        future.add_done_callback(call)
        return True

    # --- what asyncio's objects ask of an event loop

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> None:
        self.ready.append((_run, copy_context() if context is None else context, (callback, args)))

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast("asyncio.AbstractEventLoop", self))

    def create_task(
        self, coroutine: Coroutine[Any, Any, Any], *, context: Context | None = None, **_: Any
    ) -> Any:
        """Run a coroutine as a task of the node whose task runs."""
        node = running_node()
        if node is None:
            coroutine.close()
            raise GossamerError(
                "a coroutine was given to asyncio outside of a node's tasks; accepted: node.spawn"
            )
        return (context or copy_context()).run(node.adopt, coroutine)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        logging.getLogger("asyncio").error(context["message"], exc_info=context.get("exception"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _refusal(f"the event loop's {name}")


def _run(context: Context, call: tuple[Callable[..., object], tuple[Any, ...]]) -> None:
    context.run(call[0], *call[1])


def _refusal(what: str) -> GossamerError:
    return GossamerError(
        f"{what} of asyncio does not work in virtual time; accepted: node.sleep, node.spawn, and timeout= of"
        " gather, receive and ask"
    )


def explained(error: BaseException) -> BaseException:
    """The refusal in place of an error by which asyncio says that it misses a task of its own."""
    if type(error) is not RuntimeError or error.__traceback__ is None:
        return error
    [(frame, _)] = deque(walk_tb(error.__traceback__), 1)
    name = _NEEDS_A_TASK.get(frame.f_globals.get("__name__", ""))
    return error if name is None else _refusal(name).with_traceback(error.__traceback__)
