"""Deferred sums: results do not depend on when they are computed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.learning import mixing
from gossamer.learning.mixing import Mix, Sum, combine
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.messages.tags import Part
from gossamer.node.waiting import all_ended
from gossamer.runtime.recording import Profile
from gossamer.runtime.simulate import mixing as module
from gossamer.runtime.simulate.core import Core
from gossamer.runtime.simulate.mixing import Mixer

P = 100


class Scene:
    """Nodes that mix; ``held`` has the parameters that each node holds."""

    def __init__(self, nodes: int) -> None:
        self.core, self.rows = Core(), Rows(P)
        self.mixing = Mixer(self.core, self.rows, ThreadPool(1), Profile())
        draw = torch.Generator().manual_seed(1)
        self.held = [self.rows.fresh().copy_(torch.randn(P, generator=draw)) for _ in range(nodes)]

    def mix(self, node: int, inbox: dict[int, Any], read: bool = False) -> None:
        """Mix at one instant, and wait for the result."""

        async def step() -> None:
            await self.mixing.submit(node, Held(self, node, inbox, dict.fromkeys(inbox, 0.2)), read=read)

        self.core.run(step())

    def value(self, node: int) -> torch.Tensor:
        """Read a node's parameters."""
        self.mixing.settle_for(self.held[node])
        return self.held[node]


class Held(Mix):
    """A mixing step that reads and replaces what a node of a scene holds."""

    def __init__(self, scene: Scene, node: int, inbox: dict[int, Any], weights: dict[int, float]) -> None:
        super().__init__(None, inbox, weights, None, "own")
        self.scene, self.node = scene, node

    def prepare(self) -> None:
        self.own = self.scene.held[self.node]

    def commit(self, result: torch.Tensor) -> None:
        self.scene.held[self.node] = result


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sets(st.integers(0, 4), max_size=4),
            st.sampled_from(["mix", "mix and read", "part", "look"]),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_deferred_sums_equal_immediate_sums(steps: list[tuple[int, set[int], str]], compiled: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "LOADING_NS", 0.0 if compiled else torch.inf)
        patch.setattr(module, "MAX_DEFERRED", 8)
        scene = Scene(5)
        expected = [row.clone() for row in scene.held]
        for node, others, kind in steps:
            if kind == "look":
                assert torch.equal(scene.value(node), expected[node])
                continue
            # Sending a vector reads it.
            inbox: dict[int, Any] = {other: scene.value(other) for other in others}
            clone: dict[int, Any] = {other: expected[other].clone() for other in others}
            if kind == "part" and others:
                first = min(others)
                inbox[first] = Part(inbox[first][10:30], torch.arange(10, 30), P)
                clone[first] = Part(clone[first][10:30], torch.arange(10, 30), P)
            scene.mix(node, inbox, read=kind == "mix and read")
            expected[node] = combine(expected[node], clone, dict.fromkeys(clone, 0.2))
        for node in range(5):
            assert torch.equal(scene.value(node), expected[node])


def test_sum_is_computed_only_when_read() -> None:
    scene = Scene(3)
    neighbour = scene.held[1]
    own = scene.held[0].clone()
    scene.mix(0, {1: neighbour})
    scene.mixing.settle_for(scene.held[2])  # another node's
    version = scene.held[0]._version
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        patch.setattr(mixing, "LOADING_NS", torch.inf)
        plain = Sum.write
        patch.setattr(Sum, "write", lambda total, out: (calls.append(1), plain(total, out))[1])
        scene.mixing.settle_for(scene.held[0])
        assert calls == [1]
        scene.mixing.settle_for(scene.held[0])
        assert calls == [1]
    torch.testing.assert_close(scene.held[0], 0.8 * own + 0.2 * neighbour)
    assert scene.held[0]._version == version  # the node did not modify its snapshot


def test_nodes_go_on_in_the_order_of_ranks_whatever_is_deferred() -> None:
    """A message that a resumed run has from a checkpoint is no row of the store, so its sum is not deferred."""
    scene, order = Scene(4), []

    async def step(node: int, vector: torch.Tensor) -> None:
        await scene.mixing.submit(node, Held(scene, node, {3: vector}, {3: 0.5}), read=False)
        order.append(node)

    vectors = [scene.held[3].clone(), scene.held[3], scene.held[3].clone()]
    steps = [scene.core.spawn(step(node, vector)) for node, vector in enumerate(vectors)]
    scene.core.run(all_ended(scene.core.slot, steps))
    assert order == [0, 1, 2]


def test_inbox_may_change_after_mixing_is_submitted() -> None:
    scene = Scene(2)
    inbox, weights = {1: scene.held[1]}, {1: 0.5}
    expected = 0.5 * scene.held[0] + 0.5 * scene.held[1]

    async def step() -> None:
        await scene.mixing.submit(0, Held(scene, 0, inbox, weights), read=False)
        inbox.clear()
        weights.clear()

    scene.core.run(step())
    torch.testing.assert_close(scene.value(0), expected)


def test_mix_to_be_read_is_computed_when_awaited() -> None:
    scene = Scene(2)

    async def step() -> torch.Tensor:
        mix = Mix(scene.held[0], {1: scene.held[1]}, {1: 0.5}, None, "own")
        mixed: torch.Tensor = await scene.mixing.submit(0, mix, read=True)
        return mixed.clone()

    mixed = scene.core.run(step())
    torch.testing.assert_close(mixed, 0.5 * scene.held[0] + 0.5 * scene.held[1])


def test_cancelled_mixing_step_is_not_carried_out() -> None:
    scene = Scene(2)

    async def submitted(step: Held) -> None:
        await scene.mixing.submit(0, step, read=False)

    async def step() -> None:
        before = scene.held[0]
        step = Held(scene, 0, {1: scene.held[1]}, {1: 0.5})
        waiting = scene.core.spawn(submitted(step))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert scene.held[0] is before

    scene.core.run(step())
