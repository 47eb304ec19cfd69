"""How a run ends."""

from __future__ import annotations

from typing import Any


class Ended(Exception):
    """The run is over: how, and if it failed, why."""

    def __init__(self, reason: str, **failure: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.failure = failure or None
