"""An asyncio event loop whose time is a virtual clock's.

asyncio's own tasks and futures run, so that authors may use whatever asyncio builds of them. Its timers do not, because they
wake ties in heap order, which an unrelated timer changes. Where a real loop would wait for sockets, this one lets virtual
time advance."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, NoReturn

from gossamer.errors import RunFailed
from gossamer.runtime.simulate.clock import Clock

_Call = tuple[Callable[..., object], tuple[Any, ...], Context]


class VirtualLoop(asyncio.BaseEventLoop):
    """Serves coroutines, tasks and futures of one thread, but no timers, sockets or executors."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._ready: deque[_Call] = deque()
        self.time = clock.now  # type: ignore[method-assign]

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> None:
        """Call when the present callback has returned. Without a handle: tasks and futures never cancel such a call."""
        self._ready.append((callback, args, copy_context() if context is None else context))

    def call_at(self, *_: object, **__: object) -> NoReturn:
        raise RunFailed("an asyncio timer is set, which virtual time does not know; accepted: node.sleep()")

    def _run_once(self) -> None:
        """Make all calls that are due; if there are none, let virtual time advance first."""
        ready = self._ready
        if ready:
            self._clock.count_turn()
        else:
            self._clock.advance()
        for _ in range(len(ready)):
            callback, args, context = ready.popleft()
            context.run(callback, *args)
