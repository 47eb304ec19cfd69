"""Nodes that sample their neighbours, under both engines: messages, records and refusals."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import gossamer
from gossamer import Experiment, Node, Run
from gossamer.cli import app
from gossamer.config.registry import names
from gossamer.errors import BadInput, RunFailed
from gossamer.messages import wire_bytes
from gossamer.randomness import generator
from gossamer.runtime.setup import prepare
from gossamer.topology.cyclon import TAG
from scenario import play

NODES = 8
TIMED: dict[str, Any] = {"name": "cyclon", "view": 4, "shuffle": 3, "every_s": 1.0}
IN_ROUNDS: dict[str, Any] = {"name": "cyclon", "view": 4, "shuffle": 3}
ALGORITHMS: list[dict[str, Any]] = [
    {"name": "ad-psgd", "timeout_s": 5.0},
    {"name": "divshare", "fraction": 0.5, "recipients_from": "neighbors"},
    {"name": "gossip-learning"},
    {"name": "gossip-learning-on-receipt", "period_s": 0.05},
]


def described(algorithm: dict[str, Any], **changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "nodes": NODES,
        "task": {"name": "least-squares", "features": 3, "samples": 80, "test_samples": 20},
        "topology": IN_ROUNDS,
        "network": {"name": "uniform", "latency_s": 0.001},
        "evaluation": {"every_rounds": 5},
        "stop": {"rounds": 15},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    return Experiment.of({**fields, "algorithm": algorithm, **changes})


def graphs(run: Run) -> dict[int, list[tuple[int, int]]]:
    return {int(start): [tuple(edge) for edge in edges] for start, edges in run.setup["graphs"].items()}


def test_algorithms_that_tolerate_sampling_are_covered() -> None:
    tolerant = {
        name for name, kind in names("algorithm").items() if getattr(kind, "tolerates_sampling", False)
    }
    assert tolerant == {algorithm["name"] for algorithm in ALGORITHMS}


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm["name"])
def test_algorithms_learn_on_views(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    run = gossamer.run(described(algorithm), tmp_path)
    losses = [run.metrics.filter(run.metrics["round"] == r)["test_loss"].mean() for r in (0, 15)]
    assert losses[1] < losses[0] / 2


def test_sampled_run_is_repeatable(tmp_path: Path) -> None:
    first, again = (gossamer.run(described({"name": "gossip-learning"}), tmp_path) for _ in range(2))
    assert graphs(first) == graphs(again)
    columns = ["node", "round", "time_s", "bytes_sent", "messages_received", "test_loss"]
    assert first.metrics.select(columns).equals(again.metrics.select(columns))


def test_sampled_topology_runs_as_processes(tmp_path: Path) -> None:
    run = gossamer.run(
        described({"name": "ad-psgd"}, engine="processes", evaluation={"every_rounds": 15}), tmp_path
    )
    recorded = graphs(run)
    assert recorded.keys() == {0, 15}
    assert set(recorded[15]) != set(recorded[0])
    assert all(i != j and 0 <= j < NODES for i, j in recorded[15])
    assert max(np.bincount([i for i, _ in recorded[15]], minlength=NODES)) <= 4


def test_views_of_all_nodes_are_recorded_at_evaluations(tmp_path: Path) -> None:
    async def script(node: Node) -> dict[int, tuple[int, ...]]:
        seen = {}
        async for r in node.rounds():
            seen[r] = await node.neighbors(r, "out")
            await node.sleep(2.0)
        return seen

    played = play(tmp_path, script, NODES, topology=TIMED, evaluation={"every_rounds": 2}, stop={"rounds": 5})
    recorded = graphs(played.run)
    assert recorded.keys() == {0, 2, 4, 5}
    for r in (0, 2, 4):  # no exchange between the end of a round and the next start
        assert recorded[r] == [(i, j) for i in range(NODES) for j in played.values[i][r]]
    assert played.run.setup["directed"]


def test_views_and_bytes_match_a_reference_of_the_exchanges(tmp_path: Path) -> None:
    """If messages take no time, an exchange ends at the instant at which it starts."""
    views: list[dict[int, int]] = []

    async def script(node: Node) -> tuple[dict[int, int], int]:
        await node.sleep(10.0)
        return dict(node.state[TAG]["view"]), node.traffic.bytes_sent

    played = play(tmp_path, script, NODES, topology=TIMED, seed=3)
    due = [(round(1e9 * generator(3, "sampler/phase", rank).random()), rank) for rank in range(NODES)]
    heapq.heapify(due)
    views = [dict.fromkeys(((rank - 1) % NODES, (rank + 1) % NODES), 0) for rank in range(NODES)]
    sent, begun = [0] * NODES, [0] * NODES
    while due[0][0] < 10_000_000_000:
        instant, P = heapq.heappop(due)
        heapq.heappush(due, (instant + 1_000_000_000, P))
        ages = {j: age + 1 for j, age in views[P].items()}
        Q = min(ages, key=lambda j: (-ages[j], j))
        del ages[Q]
        k, begun[P] = begun[P], begun[P] + 1
        offered = generator(3, "sampler/ask", P, k).permutation(sorted(ages))[:2].tolist()
        returned = generator(3, "sampler/answer", Q, P, k).permutation(sorted(views[Q]))[:3].tolist()
        question = [[P, 0], *([j, ages[j]] for j in offered)]
        answer = [[j, views[Q][j]] for j in returned]
        views[P] = merged(P, ages, answer, offered)
        views[Q] = merged(Q, views[Q], question, returned)
        sent[P] += wire_bytes((TAG, "ask", k), question)
        sent[Q] += wire_bytes((TAG, "answer", k), answer)
    assert played.values == {rank: (views[rank], sent[rank]) for rank in range(NODES)}


def merged(rank: int, view: dict[int, int], entries: list[list[int]], sent: list[int]) -> dict[int, int]:
    view, replaceable = dict(view), list(sent)
    for j, age in entries:
        if j != rank and j not in view and (len(view) < 4 or replaceable):
            if len(view) == 4:
                del view[replaceable.pop(0)]
            view[j] = age
    return view


def test_sampler_and_algorithm_messages_are_kept_apart(tmp_path: Path) -> None:
    async def script(node: Node) -> list[Any]:
        await node.sleep(5.0)
        node.send((node.rank + 1) % NODES, "mine", tag="mine")
        await node.sleep(1.0)
        return [(message.tag, message.payload) for message in node.drain()]

    played = play(tmp_path, script, NODES, topology=TIMED)
    assert all(heard == [(("mine",), "mine")] for heard in played.values.values())


def test_finished_node_answers_samplers_but_takes_no_messages(tmp_path: Path) -> None:
    """Node 0 returns at once: it stays in the views of others, and messages to it are late."""

    async def script(node: Node) -> Any:
        if node.rank == 0:
            return None
        await node.sleep(20.0)
        if node.rank == 1:
            node.send(0, "too late", tag="mine")
        await node.sleep(1.0)
        return await node.neighbors(0, "out")

    played = play(tmp_path, script, NODES, topology=TIMED, evaluation={"every_s": 20.5, "every_rounds": None})
    assert any(0 in played.values[rank] for rank in range(1, NODES))
    last = played.run.metrics.filter(played.run.metrics["node"] == 0)
    assert last["messages_late"].max() == 1


def test_crashed_nodes_leave_the_views_and_return(tmp_path: Path) -> None:
    """Three of eight nodes are away from 4.5 s to 24.5 s: meanwhile they are in no view."""
    away = (1, 4, 6)

    async def script(node: Node) -> dict[int, tuple[int, ...]]:
        seen = {}
        async for r in node.rounds():
            await node.sleep(2.0)
            seen[r] = await node.neighbors(r, "out")
        return seen

    faults = [{"name": "crash", "nodes": list(away), "at_s": 4.5, "restart_after_s": 20.0}]
    played = play(
        tmp_path,
        script,
        NODES,
        topology=TIMED,
        faults=faults,
        gather={"lost_peer": "skip"},
        evaluation={"every_s": 10.0, "every_rounds": None},
        stop={"time_s": 50.0},
    )
    recorded = graphs(played.run)
    known = {r: {j for _, j in edges} for r, edges in recorded.items()}
    assert not known[next(r for r in sorted(recorded) if r >= 9)] & set(away)
    assert known[max(recorded)] >= set(away)


def test_deadlock_is_noticed_despite_exchanges(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        await node.receive("never")

    with pytest.raises(RunFailed, match="all nodes wait and nothing is under way.*'never'"):
        play(tmp_path, script, NODES, topology=TIMED)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda node: node.topology(), r"node\.topology with sampled neighbours"),
        (lambda node: node.mixing_weights(), r"node\.mixing_weights with sampled neighbours"),
    ],
)
def test_global_topology_calls_are_refused(tmp_path: Path, call: Any, message: str) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            call(node)

    with pytest.raises(RunFailed, match=message):
        play(tmp_path, script, NODES, topology=TIMED)


@pytest.mark.parametrize("direction", ["both", "in"])
def test_only_out_neighbours_are_known(tmp_path: Path, direction: Any) -> None:
    async def script(node: Node) -> None:
        await node.neighbors(0, direction)

    with pytest.raises(RunFailed, match=f"direction '{direction}' on the topology cyclon"):
        play(tmp_path, script, NODES, topology=TIMED)


@pytest.mark.parametrize("name", ["d-psgd", "sgp", "swift", "epidemic-local", "relay-sum", "local"])
def test_other_algorithms_are_refused_before_the_run(name: str) -> None:
    with pytest.raises(BadInput, match=f"^topology: sampled, for {name}; accepted: .*gossip-learning"):
        prepare(described({"name": name}, nodes=10))


def test_divshare_to_all_is_refused_on_a_sampled_topology() -> None:
    with pytest.raises(BadInput, match=r'^algorithm\.recipients_from: "all" on cyclon'):
        prepare(described({"name": "divshare"}))


def test_topology_command_describes_the_initial_views(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    described(ALGORITHMS[2]).save(file)
    result = CliRunner().invoke(app, ["topology", str(file)], catch_exceptions=False)
    assert "views that the nodes start with" in result.output
    assert json.loads(CliRunner().invoke(app, ["topology", str(file), "--json"]).output)["nodes"] == NODES
    later = CliRunner().invoke(app, ["topology", str(file), "--round", "3"])
    assert isinstance(later.exception, BadInput)
    assert "--round: 3 of cyclon" in str(later.exception)
