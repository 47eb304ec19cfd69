"""A message that is queued later than it was sent, such as one whose encoding takes time."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from gossamer.messages.tags import Sending
from gossamer.node.host import Host
from gossamer.node.waiting import Slot, resolve


class LateSending(Sending):
    """A message that is queued later than it was sent. If it is cancelled before that, it is never queued."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._sending: Sending | None = None  # once the engine has queued the message
        self._cancelled = False
        self._waiting: list[Slot] = []

    def queued(self, sending: Sending) -> None:
        """Note that the engine has queued the message."""
        self._sending = sending
        self._wake()

    def _wake(self) -> None:
        for slot in self._waiting:
            resolve(slot)

    def __await__(self) -> Generator[Any, None, None]:
        if self._sending is None and not self._cancelled:
            slot = self._host.slot()
            self._waiting.append(slot)
            yield from slot.__await__()
        if self._sending is not None:
            yield from self._sending.__await__()

    def done(self) -> bool:
        return self._cancelled if self._sending is None else self._sending.done()

    def cancel(self) -> bool:
        if self._sending is not None:
            return self._sending.cancel()
        if not self._cancelled:
            self._cancelled = True
            self._host.counters.messages_cancelled += 1
            self._wake()
        return True
