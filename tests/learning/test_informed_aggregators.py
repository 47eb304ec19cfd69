"""Aggregators that know rank, round and losses, against NumPy: BALANCE and UBAR as a user would write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer import BadInput, Model, Node
from gossamer.learning import Aggregation, Aggregator
from scenario import FEATURES, Played, data, experiment, play, wide

ALPHA = 0.5


class Balance(Aggregator):
    """BALANCE (Fang et al., CCS 2024): models closer than gamma exp(-kappa t / T) ||x_i|| are accepted."""

    gamma: float = 1.0
    kappa: float = 1.0

    async def aggregate_with(
        self, aggregation: Aggregation, own: Tensor, vectors: Sequence[Tensor]
    ) -> Tensor:
        assert aggregation.rounds is not None
        radius = (
            self.gamma * math.exp(-self.kappa * aggregation.round / aggregation.rounds) * float(own.norm())
        )
        near = [vector for vector in vectors if float((vector - own).norm()) <= radius]
        aggregation.memory["accepted"] = [*aggregation.memory.get("accepted", []), len(near)]
        return ALPHA * own + (1 - ALPHA) * torch.stack(near).mean(0) if near else own


class Ubar(Aggregator):
    """UBAR (Guo et al., 2021): of the nearest models, those whose loss is at most the own one."""

    nearest: int = 2

    async def aggregate_with(
        self, aggregation: Aggregation, own: Tensor, vectors: Sequence[Tensor]
    ) -> Tensor:
        near = sorted(vectors, key=lambda vector: float((vector - own).norm()))[: self.nearest]
        mine = await aggregation.loss(own)
        losses = [await aggregation.loss(vector) for vector in near]
        good = [vector for vector, loss in zip(near, losses, strict=True) if loss <= mine]
        return ALPHA * own + (1 - ALPHA) * torch.stack(good or [near[int(np.argmin(losses))]]).mean(0)


STARTS = np.array([[1.0, 0.0, 0.5], [1.1, 0.1, 0.5], [0.9, 0.0, 0.7], [9.0, -9.0, 9.0]])


def mixed(tmp_path: Path, aggregator: Aggregator, rounds: int = 1, **fields: Any) -> Played:
    async def script(node: Node) -> Any:
        node.parameters = torch.tensor(STARTS[node.rank], dtype=torch.float32)
        seen = []
        async for r in node.rounds():
            node.broadcast(node.peers(), node.model, ("x", r))
            inbox = await node.gather(node.peers(), ("x", r))
            began = node.now()
            await node.mix(inbox, dict.fromkeys(inbox, 0.25))
            seen.append((wide(node.parameters), node.now() - began))
        return seen, node.state.get("~aggregator")

    return play(tmp_path, script, 4, aggregator=aggregator, stop={"rounds": rounds}, **fields)


def test_rank_round_and_memory_reach_the_rule(tmp_path: Path) -> None:
    played, models, accepted = mixed(tmp_path, Balance(), rounds=2), STARTS, []
    for r in range(2):
        following, counts = [], []
        for rank in range(4):
            own, others = models[rank], np.delete(models, rank, axis=0)
            radius = math.exp(-r / 2) * np.linalg.norm(own)
            near = [x for x in others if np.linalg.norm(x - own) <= radius]
            following.append(ALPHA * own + (1 - ALPHA) * np.mean(near, 0) if near else own)
            counts.append(len(near))
        models = np.array(following)
        accepted.append(counts)
        for rank in range(4):
            np.testing.assert_allclose(played.values[rank][0][r][0], models[rank], atol=1e-6)
    assert [played.values[rank][1]["accepted"] for rank in range(4)] == np.transpose(accepted).tolist()
    assert [2, 0] in [[counts[0], counts[3]] for counts in accepted]  # the far node is refused


def test_losses_are_those_of_the_nodes_samples_and_take_time(tmp_path: Path) -> None:
    played = mixed(tmp_path, Ubar())
    described = experiment(lambda node: None, 4)  # type: ignore[arg-type, return-value]
    for rank in range(4):
        x, y = data(described, rank)

        def loss(w: Any, x: Any = x, y: Any = y) -> float:
            return float(((x @ w - y) ** 2).mean() / 2)

        own, others = STARTS[rank], np.delete(STARTS, rank, axis=0)
        near = sorted(others, key=lambda w: np.linalg.norm(w - own))[:2]
        good = [w for w in near if loss(w) <= loss(own)] or [min(near, key=loss)]
        value, took = played.values[rank][0][0]
        np.testing.assert_allclose(value, ALPHA * own + (1 - ALPHA) * np.mean(good, 0), atol=1e-6)
        assert took == pytest.approx(
            3 * 1 / 3
        )  # three losses on one full batch: a third of a step of 1 s each


def test_sparse_models_are_filled_with_the_own_values(tmp_path: Path) -> None:
    played = mixed(tmp_path, Balance(gamma=1e6), codec={"name": "top-k", "fraction": 0.34})
    for rank in range(4):
        value = played.values[rank][0][0][0]
        assert np.isfinite(value).all()
        assert value.shape == (FEATURES,)


class Wrong(Aggregator):
    async def aggregate_with(
        self, aggregation: Aggregation, own: Tensor, vectors: Sequence[Tensor]
    ) -> Tensor:
        return own[:1]


def test_a_result_of_another_shape_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"aggregator: .*Wrong"):
        mixed(tmp_path, Wrong())


def test_a_model_that_was_written_meanwhile_is_changed_by_what_mixing_changes(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.parameters = torch.tensor(STARTS[node.rank], dtype=torch.float32)
        other = Model(torch.tensor(STARTS[1 - node.rank], dtype=torch.float32))
        mixing = node.spawn(node.mix({1 - node.rank: other}, {1 - node.rank: 0.5}))
        await node.sleep(0.1)
        node.parameters = node.parameters + 100
        await mixing
        return wide(node.parameters)

    values = play(tmp_path, script, 2, aggregator=Ubar(nearest=1)).values
    for rank in range(2):
        np.testing.assert_allclose(values[rank], STARTS[:2].mean(0) + 100, atol=1e-4)
