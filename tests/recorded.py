"""Properties of the record of a run of real processes that do not depend on timing.

The rest depends on chance: the round of a node when another one failed, and how many messages of a round had left or arrived
when its row was recorded (except for those sent, in the last row of a node).
"""

from __future__ import annotations

from collections.abc import Sequence

from gossamer import Run


def rounds_of(run: Run, rank: int) -> list[int]:
    """The rounds in which a node, or the network (-1), has a row."""
    rounds: list[int] = run.metrics.filter(node=rank)["round"].to_list()
    return rounds


def check_network_rows(run: Run, rounds: Sequence[int]) -> None:
    """Assert that the network has rows in exactly these rounds."""
    assert rounds_of(run, -1) == list(rounds)
