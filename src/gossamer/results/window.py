"""What of a run's timeline is looked at: a span of time, and some of the nodes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gossamer.errors import BadInput
from gossamer.results.run import Run

_MOST_NAMED = 12


@dataclass(frozen=True)
class Window:
    """What a timeline is of.

    Args:
        from_s, to_s: its start and end, the run's end at the latest; seconds.
        nodes: the ranks.
    """

    from_s: float
    to_s: float
    nodes: tuple[int, ...]


def window(run: Run) -> Window | None:
    """What the run's timeline was recorded of; None where the experiment asks for none."""
    asked = (run.experiment.get("evaluation") or {}).get("timeline")
    if not asked:
        return None
    nodes = asked["nodes"]
    ranks = range(min(nodes, run.nodes)) if isinstance(nodes, int) else sorted(set(nodes))
    end_s = run.metrics["time_s"].max()
    to_s = min(asked["to_s"], end_s) if isinstance(end_s, float) else asked["to_s"]
    return Window(float(asked["from_s"]), float(max(to_s, asked["from_s"])), tuple(ranks))


def recorded(run: Run) -> Window:
    """What the run's timeline was recorded of.

    Raises:
        BadInput: for a run without a timeline.
    """
    found = window(run)
    if found is None or run.timeline.is_empty():
        raise BadInput(
            f"{run.path}: no timeline was recorded; accepted: a run whose experiment has evaluation.timeline, e.g. --set"
            ' "evaluation.timeline={from_s: 0, to_s: 10}"'
        )
    return found


def choose(runs: Sequence[Run], span: str | None, nodes: str | None) -> Window | None:
    """A part of a run's timeline, as the command line asks for it; None where it asks for nothing.

    Args:
        runs: one run.
        span: ``FROM:TO``, seconds; None is all of it. What lies outside of what was recorded is left out.
        nodes: ranks and ranges of ranks, ``0,3,8-12``; None is all of them.

    Raises:
        BadInput: for several runs, or one without a timeline; for texts of another form, a span in which nothing
            was recorded, and nodes of which nothing was.
    """
    if span is None and nodes is None:
        return None
    if len(runs) != 1:
        option = "--window" if nodes is None else "--nodes"
        raise BadInput(f"{option}: got {len(runs)} runs; accepted: one, whose timeline it is of")
    whole = recorded(runs[0])
    from_s, to_s = (whole.from_s, whole.to_s) if span is None else _span(span, whole)
    return Window(from_s, to_s, whole.nodes if nodes is None else _ranks(nodes, whole))


def _span(text: str, whole: Window) -> tuple[float, float]:
    try:
        from_s, to_s = (float(part) for part in text.split(":"))
    except ValueError:
        from_s = to_s = math.nan
    if from_s < to_s and max(from_s, whole.from_s) < min(to_s, whole.to_s):
        return max(from_s, whole.from_s), min(to_s, whole.to_s)
    raise BadInput(
        f"--window {text}: accepted: FROM:TO in seconds, FROM before TO; the timeline is recorded from"
        f" {whole.from_s:g} to {whole.to_s:g}"
    )


def _ranks(text: str, whole: Window) -> tuple[int, ...]:
    known, ranks = set(whole.nodes), set[int]()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip(), re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        # Whatever the range is, no more of it is looked at than was recorded.
        found = {rank for rank in known if first <= rank <= last}
        if not found or len(found) != last - first + 1:
            raise BadInput(
                f"--nodes {text}: accepted: ranks and ranges of them, such as 0,3,8-12; the timeline is recorded of"
                f" {_named(whole.nodes)}"
            )
        ranks |= found
    return tuple(sorted(ranks))


def _named(ranks: Sequence[int]) -> str:
    """Ascending ranks, those that follow each other as ranges."""
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ranks)) if b != a + 1), len(ranks)]
    runs = [(ranks[i], ranks[j - 1]) for i, j in pairwise(starts)]
    said = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MOST_NAMED]]
    more = len(runs) - _MOST_NAMED
    return ",".join(said) + (f" and {more} more ranges" if more > 0 else "")
