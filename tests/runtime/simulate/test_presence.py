"""Which nodes wait for each other after absences: a lookup per pair agrees with announcements to every node."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.node.rejoin import rejoin_round
from gossamer.runtime.simulate.presence import SimPresence

NODES = 5
Step = tuple[str, int]


class Reference:
    """The reference: each return is announced to every present node, and the returning node learns of them."""

    def __init__(self) -> None:
        self.up, self.rounds = set(range(NODES)), [0] * NODES
        self.first: list[dict[int, int]] = [{} for _ in range(NODES)]

    def join(self, rank: int, earliest: int) -> int:
        first, together = rejoin_round({peer: self.rounds[peer] for peer in self.up - {rank}}, earliest)
        self.first[rank] = {**together, rank: first}
        for peer, since in together.items():
            self.first[peer][rank] = since
        self.up.add(rank)
        return first


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["round", "leave", "come"]), st.integers(0, NODES - 1)), max_size=40)
)
def test_pairs_wait_as_if_every_return_had_been_announced(steps: Sequence[Step]) -> None:
    reference, presence = Reference(), SimPresence(NODES, gather=True)
    for action, rank in steps:
        if action == "round" and rank in reference.up:
            reference.rounds[rank] += 1
            presence.begin_round(rank, reference.rounds[rank])
        elif action == "leave" and rank in reference.up:
            reference.up.discard(rank)
            presence.leave(rank, "")
        elif action == "come" and rank not in reference.up:
            first = reference.join(rank, reference.rounds[rank] + 1)
            assert presence.join(rank, reference.rounds[rank] + 1) == first
            reference.rounds[rank] = first
            presence.begin_round(rank, first)
        assert presence.up == reference.up
        for node in reference.up:
            for peer in reference.up:
                assert presence.first(node, peer) == reference.first[node].get(peer, 0), (node, peer)


class Waiter:
    """A waiting call."""

    def wake(self) -> None:
        """Do nothing."""


def test_watchers_and_rememberers_are_looked_up_by_peer() -> None:
    presence = SimPresence(1000, gather=True)
    waiters = {rank: Waiter() for rank in (7, 3, 9)}
    for rank, waiter in waiters.items():
        presence.watch(rank, waiter, {1, rank + 100})
    presence.unwatch(waiters[9], {1, 109})
    assert presence.watching(1) == [(3, waiters[3]), (7, waiters[7])]
    assert presence.watching(107) == [(7, waiters[7])]
    assert presence.watching(5) == []
    presence.remember(4, [1, 2])
    presence.remember(6, [1])
    assert (presence.remembering(1), presence.remembering(1), presence.remembering(2)) == ({4, 6}, set(), {4})
