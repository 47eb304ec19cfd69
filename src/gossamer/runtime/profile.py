"""Measures how a run spends its real time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

MUCH, LONG_S = 0.5, 10.0
"""Evaluation is worth a remark if it takes this share of a run of this many seconds, or more."""


class Profile:
    """Seconds spent in named parts; a part inside another one is not counted twice.

    Attributes:
        seconds: name -> seconds so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._outer: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time inside counts for this part."""
        self._stop()
        self._outer.append(name)
        try:
            yield
        finally:
            self._stop()
            self._outer.pop()

    def remark(self, wall_s: float) -> str | None:
        """How much of a run of this many seconds was evaluation, if that is most of it."""
        share = self.seconds.get("evaluate", 0.0) / max(wall_s, 1e-9)
        if share < MUCH or wall_s < LONG_S:
            return None
        return (
            f"evaluation took {share:.0%} of the wall time; evaluation.nodes, evaluation.samples and"
            " evaluation.every_rounds (or every_s) say how much is evaluated"
        )

    def _stop(self) -> None:
        now = time.perf_counter()
        if self._outer:
            part = self._outer[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now
