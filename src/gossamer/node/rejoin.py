"""The round in which nodes meet a node that joins late or returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def earliest_round(completed: int, last: int | None, *, again: bool) -> int:
    """The earliest round in which a node can take part after it has completed some. If it takes part ``again``, it
    does not repeat the round in which it went away, because others may have its messages of that round. ``last`` is the
    number of rounds of the run, if that is fixed: a node whose rounds are over does not begin another one."""
    earliest = completed + again
    return earliest if last is None else min(earliest, last)


def first_round(in_round: Mapping[int, int], minimum: int) -> int:
    """The higher median of the nodes' rounds, given the number of nodes in each round, but at least
    ``minimum``."""
    nodes, middle = 0, sum(in_round.values()) // 2
    for round, count in sorted(in_round.items()):
        nodes += count
        if nodes > middle:
            return max(round, minimum)
    return minimum


def rejoin_round(rounds: Mapping[int, int], minimum: int) -> tuple[int, dict[int, int]]:
    """The round in which a node that joins or returns continues, among nodes that wait for each other: the
    higher median of their rounds, but at least ``minimum``. Also, for each other node, the round from which the
    two wait for each other; neither has begun it."""
    first = first_round(Counter(rounds.values()), minimum)
    return first, {rank: max(first, round + 1) for rank, round in sorted(rounds.items())}
