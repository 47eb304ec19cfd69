"""The timeline: when nodes computed and sent, for a window of time and some of the nodes."""

from __future__ import annotations

from typing import Any

from gossamer.config import Experiment, Timeline
from gossamer.learning.computation import ComputationKind
from gossamer.results.folder import RunFolder
from gossamer.results.segment import Segment


class TimelineLog:
    """Writes down what happened within a window; made by :func:`timeline_log`."""

    def __init__(self, asked: Timeline, nodes: int, segment: Segment) -> None:
        self._from_s, self._to_s, self._ranks = asked.from_s, asked.to_s, set(asked.ranks(nodes))
        self._segment = segment

    def computed(self, rank: int, kind: ComputationKind, start_s: float, end_s: float) -> None:
        """A node's computation is over."""
        if end_s > start_s:  # an optimizer's step with a gradient that is there already takes no virtual time
            self._append(rank, "evaluate" if kind is ComputationKind.EVALUATE else "train", start_s, end_s)

    def sent(self, rank: int, to: int, start_s: float, end_s: float, nbytes: int) -> None:
        """A message, or as much of it as was not taken back, has left a node's uplink."""
        self._append(rank, "send", start_s, end_s, to=to, bytes=nbytes)

    def close(self) -> None:
        """Nothing more comes."""
        self._segment.close()

    def _append(self, rank: int, kind: str, start_s: float, end_s: float, **more: Any) -> None:
        if rank in self._ranks and start_s < self._to_s and end_s > self._from_s:
            self._segment.append({"node": rank, "kind": kind, "start_s": start_s, "end_s": end_s, **more})


def timeline_log(experiment: Experiment, folder: RunFolder, rank: int = 0) -> TimelineLog | None:
    """Where the experiment's timeline is written down, ``rank`` telling processes apart; None if it asks for none."""
    asked = experiment.evaluation.timeline
    return None if asked is None else TimelineLog(asked, experiment.nodes, folder.segment("timeline", rank))
