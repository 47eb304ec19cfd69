"""Node: combine and mix. The sums themselves are tested in tests/learning/test_mixing.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import Model, Node, Part
from scenario import FEATURES, play


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_mix_is_the_weighted_sum_with_the_remainder_for_self(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.parameters = vector(1.0, 2.0, 4.0)
        await node.mix({1: vector(0.0, 8.0, 4.0), 2: vector(4.0, 0.0, 4.0)}, {1: 0.25, 2: 0.5})
        return node.parameters

    assert play(tmp_path, script, 1).values[0].tolist() == [2.25, 2.5, 4.0]


def test_weight_of_a_missing_peer_goes_to_self(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.parameters = vector(1.0, 2.0, 4.0)
        await node.mix({2: vector(5.0, 6.0, 8.0)}, {1: 0.25, 2: 0.5})
        return node.parameters

    assert play(tmp_path, script, 1).values[0].tolist() == [3.0, 4.0, 6.0]


def test_renormalize_divides_by_the_weight_present_per_coordinate(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.parameters = vector(1.0, 2.0, 4.0)
        inbox = {
            1: Part(vector(3.0, 5.0), torch.tensor([0, 1]), 3),
            2: Part(vector(8.0), torch.tensor([1]), 3),
        }
        await node.mix(inbox, {1: 1.0, 2: 1.0}, self_weight=1.0, missing="renormalize")
        return node.parameters

    # DivShare: coordinate 0 is a mean of two values, 1 of three; 2 keeps the node's own.
    assert play(tmp_path, script, 1).values[0].tolist() == [2.0, 5.0, 4.0]


def test_combine_accepts_any_length_and_leaves_parameters_alone(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        before = node.parameters
        own = torch.zeros(5)
        mixed = await node.combine(own, {3: torch.ones(5)}, {3: 0.25}, self_weight=10.0)
        assert node.parameters is before
        assert own.tolist() == [0.0] * 5
        own.add_(1.0)
        return mixed

    assert play(tmp_path, script, 1).values[0].tolist() == [0.25] * 5


def test_mix_takes_no_time_and_sees_writes_of_the_same_instant(tmp_path: Path) -> None:
    """Another task's write at the same instant comes first."""

    async def script(node: Node) -> Any:
        node.parameters = vector(0.0, 0.0, 0.0)

        async def writer() -> None:
            for _ in range(3):
                await node.sleep(0)
            node.parameters = node.parameters + 8.0

        task = node.spawn(writer())
        await node.mix({1: vector(4.0, 4.0, 4.0)}, {1: 0.5})
        assert task.done()
        assert node.now() == 0.0
        return node.parameters

    assert play(tmp_path, script, 1).values[0].tolist() == [6.0] * 3


def test_cancelled_mix_writes_all_or_nothing(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.parameters = vector(1.0, 1.0, 1.0)
        other = vector(5.0, 5.0, 5.0)
        task = node.spawn(node.mix({1: other}, {1: 0.5}))
        await node.sleep(0)
        task.cancel()
        await node.sleep(1)
        return node.parameters

    assert play(tmp_path, script, 1).values[0].tolist() in ([1.0] * 3, [3.0] * 3)


def test_parts_leave_other_coordinates_unchanged(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.parameters = vector(0.0, 8.0, 0.0)
        inbox = {
            1: Part(vector(1.0, 2.0), torch.tensor([0, 2]), 3),
            2: Model(Part(vector(10.0), torch.tensor([2]), 3)),  # type: ignore[arg-type]
        }
        await node.mix(inbox, {1: 0.25, 2: 0.5})
        mixed = node.parameters
        node.model = inbox[2]
        return mixed, node.parameters

    mixed, assigned = play(tmp_path, script, 1).values[0]
    assert mixed.tolist() == [0.25, 8.0, 5.5]
    assert assigned.tolist() == [0.25, 8.0, 10.0]


def test_models_without_buffers_mix_like_vectors(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.parameters = vector(1.0, 2.0, 4.0)
        before = node.model
        mixed = await node.combine(
            before, {1: Model(vector(0.0, 8.0, 4.0)), 2: vector(1.0, 1.0, 1.0)}, {1: 0.25, 2: 0.5}
        )
        node.model = mixed + (node.model - before) * 2
        return mixed, node.model

    mixed, model = play(tmp_path, script, 1).values[0]
    assert isinstance(mixed, Model)
    assert mixed.parameters.tolist() == model.parameters.tolist() == [0.75, 3.0, 2.5]


def test_order_of_arrival_does_not_change_the_bits(tmp_path: Path) -> None:
    """Five senders, whose messages arrive in two different orders."""

    async def script(node: Node) -> Any:
        peers = tuple(range(1, 6))
        if node.rank:
            order = node.rng("order", shared=True).permutation(5) if shuffled else range(5)
            await node.sleep(0.001 * int(order[node.rank - 1]))
            node.send(0, node.parameters, "m")
            return None
        inbox = await node.gather(peers, "m")
        assert list(inbox) == list(peers)
        await node.mix(inbox, dict.fromkeys(peers, 1 / 7))
        return node.parameters

    shuffled = False
    in_order = play(tmp_path, script, 6, initial="independent").values[0]
    shuffled = True
    assert torch.equal(in_order, play(tmp_path, script, 6, initial="independent").values[0])


@pytest.mark.parametrize(
    ("inbox", "weights", "missing", "said"),
    [
        ({1: torch.zeros(3)}, {2: 0.5}, "own", r"no weight for ranks \[1\]"),
        ({1: torch.zeros(4)}, {1: 0.5}, "own", r"rank 1 sent shape \(4,\), own is \(3,\)"),
        ({1: Part(torch.zeros(1), torch.tensor([0]), 4)}, {1: 0.5}, "own", "length 4 met one of length 3"),
        ({1: Part(torch.zeros(2), torch.tensor([2]), 3)}, {1: 0.5}, "renormalize", "1 indices for 2 values"),
        ({1: "text"}, {1: 0.5}, "own", "rank 1 sent str; accepted: a vector"),
    ],
)
def test_invalid_mix_raises_where_it_is_awaited(
    tmp_path: Path, inbox: Any, weights: Any, missing: Any, said: str
) -> None:
    async def script(node: Node) -> None:
        before = node.parameters
        with pytest.raises(ValueError, match=said):
            await node.mix(inbox, weights, missing=missing)
        assert node.parameters is before

    play(tmp_path, script, 1)


def test_mix_with_an_empty_inbox_changes_nothing(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        before = node.parameters.clone()
        await node.mix({}, {})
        assert torch.equal(node.parameters, before)
        assert before.shape == (FEATURES,)

    play(tmp_path, script, 1)


def test_differences_are_what_mixing_would_add(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        own, inbox = Model(vector(1.0, 2.0, 4.0)), {2: Model(vector(5.0, 6.0, 8.0))}
        added = await node.combine(own, inbox, {1: 0.25, 2: 0.5}, differences=True)
        for refused in ({"aggregate": True}, {"self_weight": 1.0}):
            with pytest.raises(ValueError, match="differences with aggregate or self_weight"):
                await node.combine(own, inbox, {1: 0.25, 2: 0.5}, differences=True, **refused)  # type: ignore[arg-type]
        return added.parameters

    assert play(tmp_path, script, 1).values[0].tolist() == [2.0, 2.0, 2.0]
