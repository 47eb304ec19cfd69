"""Node: the graph, time, randomness, state, records and rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from gossamer import Node
from gossamer.randomness import generator
from scenario import play

SEVERAL = {"rounds": 4}


# --- the graph ---


def test_neighbors_and_weights_of_an_undirected_graph(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        assert await node.neighbors() == await node.neighbors(0, "in") == await node.neighbors(0, "out")
        return await node.neighbors(), node.mixing_weights()

    values = play(tmp_path, script, 5, topology="ring").values
    for rank in range(5):
        around = tuple(sorted(((rank - 1) % 5, (rank + 1) % 5)))
        third = pytest.approx(1 / 3)  # Metropolis-Hastings: 1 / (1 + the larger degree)
        assert values[rank] == (around, dict.fromkeys(around, third))
        assert list(values[rank][1]) == list(around)


def test_directed_graph_requires_a_direction(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        with pytest.raises(ValueError, match='"both" on a directed graph; accepted: "in" or "out"'):
            await node.neighbors(0)
        senders = await node.neighbors(0, "in")
        assert set(node.mixing_weights(0)) == set(senders)
        return senders, await node.neighbors(0, "out")

    values = play(tmp_path, script, 8, topology="exponential").values
    for rank in range(8):
        senders = tuple(sorted((rank - 2**k) % 8 for k in range(3)))
        receivers = tuple(sorted((rank + 2**k) % 8 for k in range(3)))
        assert values[rank] == (senders, receivers)


def test_neighbors_of_a_layer_are_given_by_name(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        return await node.neighbors(0, layer="near"), await node.neighbors(0, layer="far")

    topology = {"name": "layers", "layers": {"near": "ring", "far": "complete"}}
    values = play(tmp_path, script, 5, topology=topology).values
    assert values[0] == ((1, 4), (1, 2, 3, 4))


def test_graph_queries_default_to_the_current_round(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        seen = []
        async for r in node.rounds():
            assert await node.neighbors() == await node.neighbors(r)
            assert node.mixing_weights() == node.mixing_weights(r)
            assert node.topology() == node.topology(r)
            seen.append(await node.neighbors())
        return seen

    topology = {"name": "random-regular", "degree": 4, "every_rounds": 1}
    values = play(tmp_path, script, 10, topology=topology, stop=SEVERAL).values
    assert len(set(values[0])) > 1


def test_topology_is_the_whole_graph(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        return node.topology(0)

    values = play(tmp_path, script, 4, topology="ring").values
    assert sorted(values[0].edges()) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert values[0] is values[3]


# --- time ---


def test_sleep_advances_time_by_exactly_its_duration(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        times = [node.now()]
        for seconds in (0.5, 0.0, 1e-9, 3600.0):
            await node.sleep(seconds)
            times.append(node.now())
        return times

    assert play(tmp_path, script, 1).values[0] == [0.0, 0.5, 0.5, 0.500000001, 3600.500000001]


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_negative_or_non_finite_sleep_is_refused(tmp_path: Path, seconds: float) -> None:
    async def script(node: Node) -> None:
        with pytest.raises(ValueError, match="accepted: a finite number, at least 0"):
            await node.sleep(seconds)

    play(tmp_path, script, 1)


def test_nodes_waking_at_one_instant_wake_in_rank_order(tmp_path: Path) -> None:
    order: list[int] = []

    async def script(node: Node) -> None:
        # Different sums reach the same instant, so the timers were set in another order.
        await node.sleep(0.1 * (node.size - node.rank))
        await node.sleep(1.0 - 0.1 * (node.size - node.rank))
        assert node.now() == 1.0
        order.append(node.rank)

    play(tmp_path, script, 5)
    assert order == [0, 1, 2, 3, 4]


# --- randomness ---


def test_draws_are_keyed_by_seed_purpose_rank_and_counters(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        draws = {
            "plain": node.rng("x"),
            "again": node.rng("x"),
            "counter": node.rng("x", 1),
            "counters": node.rng("x", 1, 2),
            "purpose": node.rng("y"),
            "shared": node.rng("x", shared=True),
        }
        return {name: int(rng.integers(2**63)) for name, rng in draws.items()}

    values = play(tmp_path, script, 2).values
    again = play(tmp_path, script, 2).values
    other_seed = play(tmp_path, script, 2, seed=2).values
    assert values == again
    for drawn in values.values():
        assert drawn["plain"] == drawn["again"]
        assert len(set(drawn.values())) == 5
    assert values[0]["shared"] == values[1]["shared"]
    assert values[0]["plain"] != values[1]["plain"]
    assert not set(values[0].values()) & set(other_seed[0].values())
    assert values[1]["counter"] == int(generator(1, "algorithm/x", 1, 1).integers(2**63))


def test_simulated_secrets_are_reproducible_and_distinct(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        return node.secret(16), node.secret(16), node.secret(5)

    first, second = (play(tmp_path, script, 2).values for _ in range(2))
    assert first == second
    assert [len(secret) for secret in first[0]] == [16, 16, 5]
    assert len({*first[0], *first[1]}) == 6


# --- state, rounds and records ---


def test_state_persists_across_rounds(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        async for _ in node.rounds():
            node.state["sum"] = node.state.get("sum", torch.zeros(2)) + 1
        return node.state["sum"].tolist()

    assert play(tmp_path, script, 2, stop=SEVERAL).values == {0: [4.0, 4.0], 1: [4.0, 4.0]}


def test_rounds_count_from_zero_to_the_stop_rule(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        seen = []
        async for r in node.rounds():
            assert node.round == r
            assert not node.finished
            seen.append(r)
        assert node.finished
        return seen, node.round

    assert play(tmp_path, script, 1, stop=SEVERAL).values[0] == ([0, 1, 2, 3], 4)


def test_breaking_out_of_the_loop_does_not_end_the_round(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        async for r in node.rounds():
            if r == 2:
                break
        return node.round

    assert play(tmp_path, script, 1, stop=SEVERAL).values[0] == 2


EACH_ROUND = {"every_rounds": 1, "samples": None}


def test_end_round_equals_the_rounds_loop(tmp_path: Path) -> None:
    async def loop(node: Node) -> None:
        async for _ in node.rounds():
            await node.train()

    async def by_hand(node: Node) -> None:
        for r in range(4):
            await node.train()
            await node.end_round(r)
        assert node.finished

    kept = ["node", "round", "step", "time_s", "train_loss", "test_loss"]
    tables = [
        play(tmp_path, script, 2, evaluation=EACH_ROUND, stop=SEVERAL).run.metrics.filter(pl.col("node") >= 0)
        for script in (loop, by_hand)
    ]
    assert tables[0].height == 2 * 5
    assert tables[0].select(kept).equals(tables[1].select(kept))


def test_recorded_values_become_columns_of_the_next_row(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        async for r in node.rounds():
            node.record(twice=2 * r, name=f"node {node.rank}")
            if r == 1:
                node.record(once=0.5, twice=-1)

    metrics = play(tmp_path, script, 2, evaluation=EACH_ROUND, stop=SEVERAL).run.metrics
    rows = metrics.filter(pl.col("node") == 1).sort("round")
    assert rows["twice"].to_list() == [None, 0, -1, 4, 6]
    assert rows["once"].to_list() == [None, None, 0.5, None, None]
    assert rows["name"].to_list() == [None, *["node 1"] * 4]


def test_rows_hold_the_mean_training_loss_since_the_last_row(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        losses = []
        async for _ in node.rounds():
            losses.append([await node.train(), await node.train(2)])
        return losses

    played = play(tmp_path, script, 1, evaluation={"every_rounds": 2}, stop=SEVERAL)
    rows = played.run.metrics.filter(pl.col("node") == 0).sort("round")
    losses = torch.tensor(played.values[0], dtype=torch.float64)
    assert rows["round"].to_list() == [0, 2, 4]
    assert rows["step"].to_list() == [0, 6, 12]
    assert rows["time_s"].to_list() == [0.0, 6.0, 12.0]
    assert rows["train_loss"].to_list() == [
        None,
        pytest.approx(float(losses[:2].mean())),
        pytest.approx(float(losses[2:].mean())),
    ]
