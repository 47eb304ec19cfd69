"""What is shown of a deployment while it goes on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from gossamer.api import Silent
from gossamer.progress import megabytes, numerals, spread
from gossamer.runtime.recording import NETWORK


class NodeLines(Silent):
    """Of one node: a line for each of its rows, on standard error."""

    def start(self, description: Mapping[str, Any]) -> None:
        """All are there."""
        self.say(f"all {description['nodes']} nodes are up")

    def row(self, row: Mapping[str, Any]) -> None:
        """Say how far it is, and how good."""
        metrics = [name for name in row if name.startswith("test_") and name != "test_loss"]
        figures = "".join(f"  {name.replace('_', ' ')} {numerals(row[name])[0]}" for name in metrics)
        self.say(
            f"round {row['round']}  time {row['time_s']:.4g} s{figures}  {megabytes(row['bytes_sent'])} sent"
        )

    def say(self, text: str) -> None:
        """Print it."""
        print(text, file=sys.stderr, flush=True)


class JsonLines(Silent):
    """Of one node: a JSON object a line on standard output, for who launched it."""

    def __init__(self) -> None:
        self._print(pid=os.getpid())

    def start(self, description: Mapping[str, Any]) -> None:
        """All are there."""
        self._print(began=True)

    def progress(self, rounds: int, time_s: float) -> None:
        """How far it is."""
        self._print(round=rounds, time_s=time_s)

    def row(self, row: Mapping[str, Any]) -> None:
        """As it is recorded."""
        self._print(row=dict(row))

    def say(self, text: str) -> None:
        """What has happened."""
        self._print(said=text)

    def _print(self, **said: Any) -> None:
        print(json.dumps(said, default=str), flush=True)


class RunLines(Silent):
    """Of all nodes: a line for each evaluation, on standard error, when all have made it or the next one has begun.

    Args:
        nodes: how many there are.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._rows: dict[int, list[Mapping[str, Any]]] = {}
        self._shown = -1

    def row(self, row: Mapping[str, Any]) -> None:
        """Keep it until there is a line to show."""
        round = row["round"]
        if row["node"] == NETWORK or round <= self._shown:
            return
        self._rows.setdefault(round, []).append(row)
        whole = [each for each, rows in self._rows.items() if each < round or len(rows) == self._nodes]
        for each in sorted(whole):
            self._show(each, self._rows.pop(each))

    def _show(self, round: int, rows: list[Mapping[str, Any]]) -> None:
        self._shown = max(self._shown, round)
        values: dict[str, list[float]] = {}
        for row in rows:
            for name, value in row.items():
                if (name.startswith("test_") or name == "train_loss") and value is not None:
                    values.setdefault(name, []).append(float(value))
        latest = max(float(row["time_s"]) for row in rows)
        sent = megabytes(sum(int(row["bytes_sent"]) for row in rows))
        self.say(f"round {round}  time {latest:.4g} s  {spread(values)}  {sent} sent by {len(rows)} nodes")

    def say(self, text: str) -> None:
        """Print it."""
        print(text, file=sys.stderr, flush=True)
