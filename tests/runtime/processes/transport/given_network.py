"""A network for tests of shaped links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gossamer.network import Conditions, Network


class Given(Network):
    """A network whose conditions and changes a test sets."""

    at: Any
    later: tuple[Any, ...] = ()

    def conditions(self, nodes: int, seed: int) -> Conditions:
        return self.at

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        return iter(self.later)
