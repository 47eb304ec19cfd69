"""What the record of a run of real processes holds, whatever the machine did meanwhile.

Nothing else may be compared with what one run recorded by chance: in which round a node was when another one failed, what
of a round's messages had left or arrived when its row was made (but for those sent, in a node's last row).
"""

from __future__ import annotations

from collections.abc import Sequence

from gossamer import Run


def rounds_of(run: Run, rank: int) -> list[int]:
    """The rounds with a row of a node, or of the network (-1)."""
    rounds: list[int] = run.metrics.filter(node=rank)["round"].to_list()
    return rounds


def check_network_rows(run: Run, rounds: Sequence[int]) -> None:
    """The network is on record at these rounds, and at no other ones."""
    assert rounds_of(run, -1) == list(rounds)
