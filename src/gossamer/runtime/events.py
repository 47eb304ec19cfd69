"""The event log and the timeline: what happened to nodes, and when they computed and sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gossamer.config import Experiment, Timeline
from gossamer.learning.computation import ComputationKind
from gossamer.results.folder import RunFolder
from gossamer.results.segment import Segment

PRESENCE = ("absent", "joined", "lost", "left", "returned", "found", "frozen", "thawed")
"""The events after which a node takes part, or no longer does."""


class EstimatedClock:
    """Estimates the nodes' clock: the newest timestamp in their reports, plus the real time since that
    report. (The nodes' clock may be paused while real time passes.)"""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: tuple[float, float | None] = 0.0, None  # newest timestamp, real time of its report
        self._last = 0.0

    def update(self, time_s: float, *, runs: bool = True) -> None:
        """Take a timestamp from a node's clock; ``runs`` tells whether that clock runs yet."""
        if self._newest[1] is None or time_s >= self._newest[0]:
            self._newest = time_s, self._clock() if runs else None

    def now(self) -> float:
        time_s, since = self._newest
        self._last = max(self._last, time_s + (0.0 if since is None else self._clock() - since))
        return self._last


class EventLog:
    """Records events; those of :data:`PRESENCE` with the bytes that all nodes have sent by then
    (``network_bytes``). Events up to ``known_s`` are on record already."""

    def __init__(
        self,
        segment: Segment,
        now: Callable[[], float],
        wall: Callable[[], float],
        network_bytes: Callable[[], int],
        known_s: float = -1.0,
    ) -> None:
        self._segment, self._now, self._wall, self._known_s = segment, now, wall, known_s
        self._network_bytes = network_bytes

    def append(self, node: int | None, event: str, detail: str) -> None:
        """Record an event at the current time; ``node`` is None if it concerns no particular node."""
        time_s = self._now()
        row = {"time_s": time_s, "wall_s": self._wall(), "node": node, "event": event, "detail": detail}
        if event in PRESENCE:
            row["network_bytes"] = self._network_bytes()
        if time_s > self._known_s:
            self._segment.append(row)


class TimelineLog:
    """Records when nodes computed and sent, for a window of time and some of the nodes; see
    :func:`timeline_log`. Computations that ended by ``known_s`` are on record already."""

    def __init__(self, options: Timeline, nodes: int, segment: Segment) -> None:
        self._from_s, self._to_s, self._ranks = options.from_s, options.to_s, set(options.ranks(nodes))
        self.known_s = -1.0
        self._segment = segment
        self.close = segment.close

    def computed(self, rank: int, kind: ComputationKind, start_s: float, end_s: float) -> None:
        if end_s > start_s:  # an optimizer step with a given gradient takes no virtual time
            named = (ComputationKind.EVALUATE, ComputationKind.ENCODE)
            self._append(rank, (kind if kind in named else ComputationKind.TRAIN).value, start_s, end_s)

    def sent(self, rank: int, to: int, start_s: float, end_s: float, nbytes: int) -> None:
        """Record a message, or the part of it that left before it was cancelled, on a node's uplink."""
        self._append(rank, "send", start_s, end_s, to=to, bytes=nbytes)

    def _append(self, rank: int, kind: str, start_s: float, end_s: float, **columns: Any) -> None:
        if rank in self._ranks and start_s < self._to_s and end_s > self._from_s and end_s >= self.known_s:
            self._segment.append({"node": rank, "kind": kind, "start_s": start_s, "end_s": end_s, **columns})


def timeline_log(experiment: Experiment, folder: RunFolder, rank: int = 0) -> TimelineLog | None:
    """The experiment's timeline log, or None if it has none. ``rank`` tells processes' files apart."""
    if (options := experiment.evaluation.timeline) is None:
        return None
    return TimelineLog(options, experiment.nodes, folder.segment("timeline", rank))
