"""A node's clock."""

from __future__ import annotations

import asyncio
import gc
import weakref

from gossamer.runtime.processes.node_process.host import Clock


def test_a_timer_that_was_due_leaves_nothing_to_the_collector() -> None:
    """Nodes make some every second or two, and run for days."""

    async def main() -> None:
        clock, called = Clock(), asyncio.Event()
        timer = weakref.ref(clock.timer(0.001, called.set, background=False))
        await called.wait()
        assert clock.quiet
        await asyncio.sleep(0)  # the loop lets go of what it has just called
        assert timer() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
