"""Signals that ask a run to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ending_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run in order, with its results; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, before[each])
        stop()

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])
