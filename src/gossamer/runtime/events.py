"""The record of events: what happened to nodes, and when they computed and sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gossamer.config import Experiment, Timeline
from gossamer.faults import StartFrom
from gossamer.learning.computation import ComputationKind
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.folder import RunFolder
from gossamer.results.segment import Segment


def begins(start_from: StartFrom, saved: Checkpoint | None) -> str:
    """The state that a node begins with, in words."""
    if saved is not None:
        return f"its checkpoint of round {saved.round}"
    return "a neighbour's model" if start_from == "neighbor" else "its initial model"


class HeardClock:
    """Estimates the nodes' clock from the time stamps in their reports: the last one, and what has passed since by a clock of
    real seconds. (The nodes' clock may stand still where this one goes on.)"""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: tuple[float, float | None] = 0.0, None  # a time, and the real instant of that report
        self._said = 0.0

    def hear(self, time_s: float, *, runs: bool = True) -> None:
        """It is this late now on some node's clock, which runs, or does not yet."""
        if self._heard[1] is None or time_s >= self._heard[0]:
            self._heard = time_s, self._clock() if runs else None

    def now(self) -> float:
        time_s, since = self._heard
        self._said = max(self._said, time_s + (0.0 if since is None else self._clock() - since))
        return self._said


class EventLog:
    """Writes events down. Those until ``known_s`` are on record already."""

    def __init__(
        self, segment: Segment, now: Callable[[], float], wall: Callable[[], float], known_s: float = -1.0
    ) -> None:
        self._segment, self._now, self._wall, self._known_s = segment, now, wall, known_s

    def append(self, node: int | None, event: str, detail: str) -> None:
        """Something happens now, to a node or (None) to none in particular."""
        time_s = self._now()
        row = {"time_s": time_s, "wall_s": self._wall(), "node": node, "event": event, "detail": detail}
        if time_s > self._known_s:
            self._segment.append(row)


class TimelineLog:
    """Writes down when nodes computed and sent, for a window of time and some of the nodes; made by :func:`timeline_log`.
    Computations that ended until ``known_s`` are on record already."""

    def __init__(self, asked: Timeline, nodes: int, segment: Segment) -> None:
        self._from_s, self._to_s, self._ranks = asked.from_s, asked.to_s, set(asked.ranks(nodes))
        self.known_s = -1.0
        self._segment = segment
        self.close = segment.close

    def computed(self, rank: int, kind: ComputationKind, start_s: float, end_s: float) -> None:
        if end_s > start_s:  # an optimizer's step with a gradient that is there already takes no virtual time
            others = (ComputationKind.EVALUATE, ComputationKind.ENCODE)
            self._append(rank, (kind if kind in others else ComputationKind.TRAIN).value, start_s, end_s)

    def sent(self, rank: int, to: int, start_s: float, end_s: float, nbytes: int) -> None:
        """A message, or as much of it as was not taken back, has left a node's uplink."""
        self._append(rank, "send", start_s, end_s, to=to, bytes=nbytes)

    def _append(self, rank: int, kind: str, start_s: float, end_s: float, **more: Any) -> None:
        if rank in self._ranks and start_s < self._to_s and end_s > self._from_s and end_s >= self.known_s:
            self._segment.append({"node": rank, "kind": kind, "start_s": start_s, "end_s": end_s, **more})


def timeline_log(experiment: Experiment, folder: RunFolder, rank: int = 0) -> TimelineLog | None:
    """Where the experiment's timeline is written down, ``rank`` telling processes apart; None if it asks for none."""
    asked = experiment.evaluation.timeline
    return None if asked is None else TimelineLog(asked, experiment.nodes, folder.segment("timeline", rank))
