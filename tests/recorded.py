"""What the record of a run of real processes holds, whatever the machine did meanwhile.

Nothing else may be compared with what one run recorded by chance: in which round a node was when another one failed, what
of a round's messages had left or arrived when its row was made (but for those sent, in a node's last row), and rows of the network
between the first and the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from gossamer import Run


def rounds_of(run: Run, rank: int) -> list[int]:
    """The rounds with a row of a node, or of the network (-1)."""
    rounds: list[int] = run.metrics.filter(node=rank)["round"].to_list()
    return rounds


def check_network_rows(run: Run, rounds: Sequence[int]) -> None:
    """The network is on record at these rounds; among real processes, at the first and the last, and at no other ones: a node that
    is more than two evaluations ahead of the record goes on without giving its model."""
    found = rounds_of(run, -1)
    if run.virtual:
        assert found == list(rounds)
    else:
        assert found == sorted({*found, rounds[0], rounds[-1]})
        assert set(found) <= set(rounds)
