"""The recorded rows of a run, collected into evaluations of the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.results.reading import NETWORK


class Evaluations:
    """Collects recorded rows into evaluations."""

    def __init__(self) -> None:
        self._incomplete: dict[Any, dict[str, list[float]]] = {}

    def add(self, row: Mapping[str, Any]) -> dict[str, list[float]] | None:
        """Add a row. The network's row completes its evaluation, which is returned: for each column, the
        values of the nodes, or that of the network if no node has one."""
        # At a common instant, nodes are in different rounds.
        moment = f"round {row['round']}" if row["moment"] == "round" else row["moment"]
        values = self._incomplete.setdefault(moment, {})
        for name, value in row.items():
            of_nodes = row["node"] == NETWORK and name in values
            if isinstance(value, int | float) and name not in ("node", "round") and not of_nodes:
                values.setdefault(name, []).append(float(value))
        return self._incomplete.pop(moment) if row["node"] == NETWORK else None
