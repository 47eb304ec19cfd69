"""What a node without a supervisor records of itself and of its peers, beside its rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from gossamer.results.folder import RunFolder
from gossamer.runtime.processes.security.guard import Ration
from gossamer.runtime.recording import GraphLog, Observer
from gossamer.runtime.setup import Setup


class NodeRecord:
    """The events and the graphs of one node's record.

    Args:
        rank: this node.
        setup: what is run.
        folder: where it is recorded.
        observer: told of rows and events.
        times: gives the node's time and real time by now, in seconds; both are 0 before it goes.
    """

    def __init__(
        self,
        rank: int,
        setup: Setup,
        folder: RunFolder,
        observer: Observer,
        times: Callable[[], tuple[float, float]],
    ) -> None:
        self._observer, self._times = observer, times
        self._events = folder.segment("events", rank)
        self._graph_rows = folder.segment("graphs", rank)
        self._graphs = GraphLog(setup.topology, self._graph_rows)
        self._ration = Ration(time.monotonic, "losses and returns")
        self._unnoted: dict[int, tuple[str, str]] = {}  # by rank, what was left out last

    def row(self, row: Mapping[str, Any]) -> None:
        """The node has a row."""
        self._graphs.completed(row["round"])
        self._observer.row(row)

    def event(self, rank: int, kind: str, text: str) -> None:
        """Something has happened to a node."""
        time_s, wall_s = self._times()
        self._events.append({"time_s": time_s, "wall_s": wall_s, "node": rank, "event": kind, "detail": text})
        self._observer.say(text)

    def note(self, rank: int, kind: str, text: str) -> None:
        """A peer has gone, or is back; one that does so all the time must not fill the record."""
        more = self._ration.take(f"rank {rank}")
        if more is None:
            self._unnoted[rank] = kind, text
        else:
            self._unnoted.pop(rank, None)
            self.event(rank, kind, text + more)

    def close(self) -> None:
        """Nothing more is recorded."""
        for rank, (kind, text) in sorted(self._unnoted.items()):  # it is to say who is there at the end
            self.event(rank, kind, text)
        self._events.close()
        self._graph_rows.close()
