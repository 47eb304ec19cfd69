"""Observers of a run, such as a progress display."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("gossamer")


class Observer:
    """Base class of observers of a run. A subclass overrides the methods for the events that it needs. By
    default, messages go to the log.

    Attributes:
        stopping: set it to True to end the run cleanly, as Ctrl-C does. The engine checks it after each call
            of :meth:`progress`, about once a second or more often."""

    stopping = False

    def start(self, description: Mapping[str, Any]) -> None:
        """The run starts; see ``Setup.description``."""

    def progress(self, rounds: int, time_s: float) -> None:
        """All nodes together have completed ``rounds`` rounds by ``time_s`` on the engine's clock. Nodes that
        are gone count like the mean of the others. Called from time to time, even while no round ends."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A row was recorded."""

    def say(self, text: str) -> None:
        """A message for the user."""
        log.info(text)
