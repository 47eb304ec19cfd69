"""Which nodes take part in a simulation with faults, and from which round on two nodes wait for each other.

The cost of a death or a return must not grow with the number of nodes. So nodes are not notified: a node
looks up from which round on it waits for a peer, and only the nodes that wait for that peer are woken."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from operator import itemgetter

from gossamer.node.host import Waiter
from gossamer.node.rejoin import first_round
from gossamer.runtime.life import Membership


class SimPresence(Membership):
    """The nodes that take part, and their rounds. ``gather`` tells whether nodes wait for each other."""

    def __init__(self, nodes: int, *, gather: bool) -> None:
        super().__init__(range(nodes))
        self._gather = gather
        self._rounds = [0] * nodes
        self._in_round = Counter({0: nodes})  # the number of nodes that take part, by round
        self._returns = 0  # number of returns of all nodes so far
        self._begun = [array("q", [0]) for _ in range(nodes)]  # returns before each round began
        # By rank: the number of its last return, with its first round since; the returns before it last left.
        self._returned: dict[int, tuple[int, int]] = {}
        self._gone: dict[int, int] = {}
        # By rank: the waiters for it with their ranks; the nodes that remember an earlier incarnation of it.
        self._waiting: defaultdict[int, dict[Waiter, int]] = defaultdict(dict)
        self._remembering: defaultdict[int, set[int]] = defaultdict(set)

    def begin_round(self, rank: int, round: int) -> None:
        """A present node begins a later round."""
        self._leave_round(rank)
        self._in_round[round] += 1
        self._rounds[rank] = round
        begun = self._begun[rank]
        begun.extend([self._returns] * (round + 1 - len(begun)))

    def leave(self, rank: int, why: str) -> None:
        """A node no longer takes part."""
        self.up.discard(rank)
        self.why.pop(rank, None)
        self.why[rank] = why
        self._leave_round(rank)
        self._gone[rank] = self._returns

    def join(self, rank: int, earliest: int) -> int:
        """A node takes part (again). Returns its first round: ``earliest`` or, if nodes wait for each other, the
        round that most others are in."""
        if rank in self.up:  # it was frozen
            self._leave_round(rank)
        first = first_round(self._in_round, earliest) if self._gather else earliest
        self._returned[rank] = self._returns, first
        self._returns += 1
        self.up.add(rank)
        self._in_round[self._rounds[rank]] += 1
        return first

    def _leave_round(self, rank: int) -> None:
        round = self._rounds[rank]
        self._in_round[round] -= 1
        if not self._in_round[round]:
            del self._in_round[round]

    def first(self, rank: int, peer: int) -> int:
        """The first round in which a node waits for a peer: neither had begun it when one of the two last
        came back. For the node itself, it is the first round in which the node takes part again."""
        if rank == peer:
            return self._returned.get(rank, (-1, 0))[1]
        mine, others = self._returned.get(rank, (-1, 0)), self._returned.get(peer, (-1, 0))
        (number, first), other = (mine, peer) if mine > others else (others, rank)
        if number < 0 or not self._gather or not (other in self.up or self._gone[other] > number):
            return 0
        return max(first, bisect_right(self._begun[other], number))

    def watch(self, rank: int, waiter: Waiter, peers: Iterable[int]) -> None:
        """See :class:`~gossamer.node.host.Presence`."""
        for peer in peers:
            self._waiting[peer][waiter] = rank

    def unwatch(self, waiter: Waiter, peers: Iterable[int]) -> None:
        """See :class:`~gossamer.node.host.Presence`."""
        for peer in peers:
            self._waiting[peer].pop(waiter, None)

    def remember(self, rank: int, peers: Iterable[int]) -> None:
        """See :class:`~gossamer.node.host.Presence`."""
        for peer in peers:
            self._remembering[peer].add(rank)

    def remembering(self, peer: int) -> set[int]:
        """Take the nodes that remember an earlier incarnation of a peer; a second call returns none."""
        return self._remembering.pop(peer, set())

    def watching(self, peer: int) -> list[tuple[int, Waiter]]:
        """The ranks of the nodes that wait for a peer, ascending, each with its waiter."""
        waiters = [(rank, waiter) for waiter, rank in self._waiting[peer].items()]
        return sorted(waiters, key=itemgetter(0))
