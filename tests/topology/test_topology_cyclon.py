"""Cyclon's views, against a model of the whole overlay without nodes and messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Traffic
from gossamer.randomness import generator
from gossamer.topology import Cyclon, CyclonSampler, TopologySchedule
from gossamer.topology.cyclon import TAG

SEED = 5


class Overlay:
    """The samplers of all nodes with instant links. Dead nodes receive nothing, and no node is told of deaths."""

    def __init__(self, spec: dict[str, Any], nodes: int) -> None:
        schedule = TopologySchedule(build("topology", {"name": "cyclon", **spec}), nodes, SEED)
        schedule.check()
        self.start = schedule.graph(0)
        self.dead: set[int] = set()
        self.lost: set[int] = set()
        self.lose: Callable[[], bool] = lambda: False
        self.samplers: list[CyclonSampler] = []
        self._in_flight: deque[tuple[int, Message]] = deque()
        for rank in range(nodes):
            node = SimpleNamespace(rank=rank, size=nodes, state={})
            sampler = schedule.sampler(node, self._host(rank))
            assert isinstance(sampler, CyclonSampler)
            self.samplers.append(sampler)

    def _host(self, source: int) -> Any:
        def send(to: Sequence[int], payload: Any, tag: tuple[str | int, ...]) -> None:
            if not self.lose():
                self._in_flight.extend((rank, Message(source, tag, payload, 0.0)) for rank in to)

        return SimpleNamespace(lost=self.lost, send=send, timer=send, counters=Traffic())

    def exchange(self, rank: int) -> None:
        self.samplers[rank].begin()
        while self._in_flight:
            to, message = self._in_flight.popleft()
            if to not in self.dead:
                self.samplers[to].receive(message)

    def period(self) -> None:
        for rank in range(len(self.samplers)):
            if rank not in self.dead:
                self.exchange(rank)

    def entries(self, rank: int) -> dict[int, int]:
        view: dict[int, int] = self.samplers[rank].state["view"]
        return view

    def links(self) -> list[tuple[int, int]]:
        """All (i, j) where node i is alive and has j in its view."""
        living = set(range(len(self.samplers))) - self.dead
        return [(rank, other) for rank in sorted(living) for other in self.entries(rank)]


class Model:
    """Cyclon as in the paper: age[i, j] is the age of j in the view of i, or -1 if it is not in the view."""

    def __init__(self, known: Iterator[tuple[int, int]], nodes: int, c: int, length: int) -> None:
        self.c, self.length = c, length
        self.contacts = np.full((nodes, nodes), -1)
        for i, j in known:
            self.contacts[i, j] = 0
        self.age = self.contacts.copy()
        self.begun = [0] * nodes

    def exchange(self, P: int) -> None:
        self.age[P, self.age[P] >= 0] += 1
        if (self.age[P] < 0).all():
            self.age[P] = self.contacts[P]
        Q = int(np.argmax(self.age[P]))
        self.age[P, Q] = -1
        k, self.begun[P] = self.begun[P], self.begun[P] + 1
        there = self._draw(self.age[P], self.length - 1, "ask", P, k)
        question = [(P, 0), *((j, self.age[P, j]) for j in there)]
        back = self._draw(self.age[Q], self.length, "answer", Q, P, k)
        answer = [(j, self.age[Q, j]) for j in back]
        self._take(Q, question, back)
        self._take(P, answer, there)

    def _draw(self, ages: NDArray[Any], count: int, purpose: str, rank: int, *key: int) -> list[int]:
        known = np.flatnonzero(ages >= 0)
        return generator(SEED, f"sampler/{purpose}", rank, *key).permutation(known)[:count].tolist()  # type: ignore[no-any-return]

    def _take(self, i: int, entries: list[tuple[int, int]], sent: list[int]) -> None:
        replaceable = iter(sent)
        for j, age in entries:
            if j == i or self.age[i, j] >= 0:
                continue
            if np.count_nonzero(self.age[i] >= 0) == self.c:
                replaced = next(replaceable, None)
                if replaced is None:
                    break
                self.age[i, replaced] = -1
            self.age[i, j] = age


@settings(max_examples=60)
@given(st.data())
def test_views_match_the_model(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(3, 12))
    view = data.draw(st.integers(1, nodes - 1))
    shuffle = data.draw(st.integers(1, view))
    overlay = Overlay({"view": view, "shuffle": shuffle, "allow_disconnected": True}, nodes)
    model = Model(overlay.start.edges(), nodes, view, shuffle)
    for rank in data.draw(st.lists(st.integers(0, nodes - 1), max_size=40)):
        overlay.exchange(rank)
        model.exchange(rank)
        for i in range(nodes):
            known = {j: int(age) for j, age in enumerate(model.age[i]) if age >= 0}
            assert overlay.entries(i) == known


@pytest.fixture(scope="module")
def settled() -> Overlay:
    """200 nodes that started as a ring."""
    overlay = Overlay({"view": 6, "shuffle": 3}, 200)
    for _ in range(30):
        overlay.period()
    return overlay


def test_in_degrees_vary_less_than_in_a_random_graph(settled: Overlay) -> None:
    """If each node drew six others, in-degrees would be binomial, with a variance of 6 (1 - 6 / 199)."""
    links = settled.links()
    assert len(links) == 200 * 6
    degrees = np.bincount([other for _, other in links], minlength=200)
    assert degrees.mean() == 6
    assert degrees.var() < 6 * (1 - 6 / 199) / 2


def test_ring_becomes_an_overlay_with_short_paths(settled: Overlay) -> None:
    """Random graphs with six links per node have a mean distance of about log(200) / log(12) = 2.1; the ring, 50."""
    overlay = nx.Graph(settled.links())
    assert nx.is_connected(overlay)
    assert nx.average_shortest_path_length(overlay) < 2.6
    assert nx.transitivity(overlay) < 0.12  # 12 / 199 by chance


def test_entries_do_not_grow_old(settled: Overlay) -> None:
    """The oldest entry of a view is removed each period, so none gets much older than the size of the view."""
    ages = [age for rank in range(200) for age in settled.entries(rank).values()]
    assert max(ages) < 3 * 6


def test_survivors_stay_connected_after_many_deaths() -> None:
    overlay = Overlay({"view": 8, "shuffle": 4}, 80)
    for _ in range(30):
        overlay.period()
    overlay.dead = set(generator(SEED, "dead").choice(80, 24, replace=False).tolist())
    assert any(other in overlay.dead for _, other in overlay.links())
    for _ in range(40):
        overlay.period()
    links = overlay.links()
    assert not any(other in overlay.dead for _, other in links)
    rest = nx.Graph(links)
    assert len(rest) == 56
    assert nx.is_connected(rest)


def test_node_known_to_be_dead_leaves_views_at_once() -> None:
    overlay = Overlay({"view": 4, "shuffle": 2, "bootstrap": {"name": "random-regular", "degree": 4}}, 12)
    sampler = overlay.samplers[0]
    first, *rest = sampler.view
    overlay.lost.add(first)
    assert list(sampler.view) == rest
    assert first not in sampler.neighbors(0, "out")
    for _ in range(3):
        overlay.period()
        assert first not in overlay.entries(0)


def test_views_refill_despite_lost_messages() -> None:
    """A lost message costs its sender an entry; successful exchanges make up for it."""
    overlay = Overlay({"view": 6, "shuffle": 3}, 40)
    rng = generator(SEED, "loss")
    overlay.lose = lambda: bool(rng.random() < 0.2)
    for _ in range(60):
        overlay.period()
    assert len(overlay.links()) > 0.8 * 6 * 40
    assert nx.is_connected(nx.Graph(overlay.links()))


def test_empty_view_restarts_from_the_contacts() -> None:
    overlay = Overlay({"view": 3, "shuffle": 2}, 8)
    overlay.dead = set(range(1, 8))
    for _ in range(5):
        overlay.period()
    overlay.dead = set()
    overlay.period()
    assert len(overlay.entries(0)) > 0


def test_exchange_sends_nothing_if_all_others_are_dead() -> None:
    overlay = Overlay({"view": 3, "shuffle": 2}, 8)
    overlay.lost |= set(range(1, 8))
    overlay.samplers[0].begin()
    assert overlay.samplers[0].view == ()


def test_late_answer_fills_only_free_slots() -> None:
    overlay = Overlay({"view": 2, "shuffle": 2}, 8)
    sampler = overlay.samplers[0]
    before = dict(overlay.entries(0))
    assert set(before) == {1, 7}
    sampler.receive(Message(1, (TAG, "answer", 77), [[3, 0], [4, 0]], 0.0))
    assert overlay.entries(0) == before
    overlay.dead = {1}
    overlay.exchange(0)  # frees a slot
    sampler.receive(Message(1, (TAG, "answer", 77), [[3, 0], [4, 0]], 0.0))
    assert set(overlay.entries(0)) == {7, 3}


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=50)
@given(
    st.sampled_from(["ask", "answer", "?", 3]),
    st.integers(-3, 3) | st.text(max_size=3),
    junk | st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 2**33)).map(list), max_size=12),
)
def test_malformed_messages_leave_views_valid(kind: Any, number: Any, payload: Any) -> None:
    overlay = Overlay({"view": 4, "shuffle": 3}, 10)
    overlay.samplers[0].receive(Message(5, (TAG, kind, number), payload, 0.0))
    overlay.samplers[0].receive(Message(5, (TAG,), payload, 0.0))
    view = overlay.entries(0)
    assert len(view) <= 4
    assert all(type(rank) is int and 0 < rank < 10 for rank in view)
    assert all(type(age) is int and 0 <= age < 2**31 for age in view.values())
    overlay.period()


def test_neighbors_are_drawn_from_the_view_by_round() -> None:
    overlay = Overlay({"view": 6, "shuffle": 2, "degree": 2, "bootstrap": "complete"}, 12)
    sampler = overlay.samplers[3]
    drawn = [sampler.neighbors(r, "out") for r in range(30)]
    assert drawn == [sampler.neighbors(r, "out") for r in range(30)]
    assert len(set(drawn)) > 10
    assert all(len(pair) == 2 and set(pair) <= set(sampler.view) for pair in drawn)


def test_views_are_drawn_from_a_larger_bootstrap() -> None:
    overlay = Overlay({"view": 3, "shuffle": 2, "bootstrap": "complete"}, 9)
    assert all(len(sampler.view) == 3 for sampler in overlay.samplers)
    assert len({sampler.view for sampler in overlay.samplers}) > 1


def test_period_is_in_rounds_unless_seconds_are_given() -> None:
    assert Cyclon().every_rounds == 1
    assert Cyclon(every_rounds=5).spec()["every_rounds"] == 5
    timed = Cyclon(every_s=0.5)
    assert timed.every_rounds is None
    assert build("topology", timed.spec()) == timed
    assert build("topology", Cyclon().spec()) == Cyclon()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"shuffle": 9}, "topology.shuffle: 9 for view 8; accepted: 1 to 8"),
        ({"degree": 9}, "topology.degree: 9 for view 8; accepted: 1 to 8"),
        ({"every_s": 1.0, "every_rounds": 2}, "topology.every_s: 1.0 with topology.every_rounds: 2"),
        ({"weights": "uniform"}, "topology.weights: uniform for cyclon"),
        (
            {"bootstrap": "cyclon"},
            "topology.bootstrap: cyclon; accepted: one that does not change",
        ),
        (
            {"bootstrap": {"name": "random-regular", "degree": 3, "every_rounds": 1}},
            "topology.bootstrap: random-regular; accepted: one that does not change",
        ),
        ({"bootstrap": "rings"}, "topology.bootstrap: unknown name 'rings'"),
        ({"view": 10, "shuffle": 2}, "topology.view: 10 for 10 nodes; accepted: 1 to 9"),
        ({"bootstrap": {"name": "random-regular", "degree": 11}}, "topology.bootstrap.degree: 11"),
    ],
)
def test_invalid_parameters_are_refused(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput, match=f"^{problem}".replace(".", r"\.")):
        Overlay(spec, 10)


def test_a_node_alone_is_refused() -> None:
    with pytest.raises(BadInput, match="^nodes: 1 for the topology cyclon; accepted: at least 2$"):
        Overlay({}, 1)


def test_sampled_layers_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^topology\.layers\.far: cyclon; accepted"):
        build("topology", {"name": "layers", "layers": {"near": "ring", "far": "cyclon"}})
