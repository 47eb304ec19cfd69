"""The round in which nodes meet a node that joins late or returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


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
