"""Faults of an experiment: nodes crash, return, leave, join, freeze and are cut off, and runs continue."""

from __future__ import annotations

import gc
import logging
import signal
from asyncio import CancelledError
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gossamer
from gossamer import Algorithm, Experiment, Node, Run, RunFailed, load_run
from gossamer.runtime import life
from gossamer.runtime.simulate import fault_runner
from recorded import check_network_rows, rounds_of

pytestmark = pytest.mark.usefixtures("no_process_is_left")

NODES, VICTIM, ROUNDS = 6, 2, 12
BOTH = pytest.mark.parametrize("engine", ["simulate", "processes"])
REAL: dict[str, Any] = {"name": "processes", "trainer": "sequential", "pace": True}


def play(out: Path, *faults: dict[str, Any], engine: str = "simulate", **changes: Any) -> Run:
    """D-PSGD on a ring, 0.1 s a step (virtual, or with pace)."""
    described: dict[str, Any] = {
        "nodes": NODES,
        "task": {"name": "least-squares", "features": 3, "samples": 8 * NODES},
        "algorithm": "d-psgd",
        "batch_size": "full",
        "compute": {"name": "constant", "seconds_per_step": 0.1},
        "faults": list(faults),
        # (A dead real process is noticed at once; one that a busy machine holds up must not count as dead.)
        "failures": {"detection_s": 0.4 if engine == "simulate" else 10.0},
        "gather": {"lost_peer": "skip"},
        "evaluation": {"every_rounds": 1},
        "stop": {"rounds": ROUNDS},
        "engine": REAL if engine == "processes" else {"name": "simulate", "trainer": "sequential"},
    }
    return gossamer.run(Experiment.of({**described, **changes}), out)


def kinds_of(run: Run, rank: int) -> list[str]:
    """The events of a node, except slow computations of a busy machine."""
    kinds = run.events.filter(node=rank)["event"].to_list()
    return [kind for kind in kinds if kind not in ("slow", "begins")]


def known(run: Run) -> list[bool]:
    """For each node, whether its last model is known."""
    assert run.parameters is not None
    return np.isfinite(run.parameters.numpy()).all(axis=1).tolist()


def check_survivors(run: Run, *others: int) -> None:
    """Check that all nodes but these, and the network, have rows of every round."""
    assert run.status == "done"
    for rank in set(range(NODES)) - set(others):
        assert rounds_of(run, rank) == list(range(ROUNDS + 1))
        assert known(run)[rank]
    check_network_rows(run, range(ROUNDS + 1))


CRASH: dict[str, Any] = {"name": "crash", "nodes": [VICTIM], "at_round": 3}


@BOTH
def test_others_go_on_without_a_crashed_node(tmp_path: Path, engine: str) -> None:
    run = play(tmp_path, CRASH, engine=engine)
    check_survivors(run, VICTIM)
    assert rounds_of(run, VICTIM) == [0, 1, 2, 3]
    assert known(run) == [rank != VICTIM for rank in range(NODES)]
    assert kinds_of(run, VICTIM) == ["lost"]
    assert "crashed in round 3" in run.events.filter(event="lost")["detail"].item()


@BOTH
def test_crashed_node_returns_from_its_checkpoint(tmp_path: Path, engine: str) -> None:
    run = play(
        tmp_path,
        {**CRASH, "restart_after_s": 0.3},
        engine=engine,
        checkpoint={"every_rounds": 2},
        stop={"rounds": 2 * ROUNDS},
    )
    assert run.status == "done"
    assert kinds_of(run, VICTIM) == ["lost", "returned"]
    begins = run.events.filter(event="begins")
    assert begins["detail"].to_list() == [f"node {VICTIM} begins with its checkpoint of round 2"]
    before, after = rounds_of(run, VICTIM)[:4], rounds_of(run, VICTIM)[4:]
    assert before == [0, 1, 2, 3]
    assert after == list(range(after[0], 2 * ROUNDS + 1))  # no round twice, none left out
    assert after[0] > 4
    assert all(known(run))
    for rank in set(range(NODES)) - {VICTIM}:
        assert rounds_of(run, rank) == list(range(2 * ROUNDS + 1))
    check_network_rows(run, range(2 * ROUNDS + 1))
    sent = run.metrics.filter(node=VICTIM)["bytes_sent"].to_list()
    assert sent == sorted(sent)


@BOTH
def test_leaving_node_finishes_its_round_and_keeps_its_model(tmp_path: Path, engine: str) -> None:
    run = play(tmp_path, {"name": "leave", "nodes": [VICTIM], "at_s": 0.25}, engine=engine)
    check_survivors(run, VICTIM)
    assert kinds_of(run, VICTIM) == ["left"]
    assert all(known(run))
    rows = rounds_of(run, VICTIM)
    assert rows == list(range(len(rows)))
    assert len(rows) < ROUNDS
    if engine == "simulate":  # none of its messages was late
        assert rows == list(range(4))
        assert run.metrics["messages_late"].max() == 0


@BOTH
@pytest.mark.parametrize("start_from", ["initial", "neighbor"])
def test_joining_node_takes_part_from_then_on(tmp_path: Path, engine: str, start_from: str) -> None:
    fault = {"name": "join", "nodes": [VICTIM], "at_s": 0.35, "start_from": start_from}
    run = play(tmp_path, fault, engine=engine, stop={"rounds": 2 * ROUNDS})
    assert run.status == "done"
    assert kinds_of(run, VICTIM) == ["absent", "joined"]
    rows = rounds_of(run, VICTIM)
    assert rows == list(range(rows[0], 2 * ROUNDS + 1))
    assert rows[0] > 1
    check_network_rows(run, range(2 * ROUNDS + 1))
    assert all(known(run))


@BOTH
@pytest.mark.parametrize("for_s", [0.2, 1.0], ids=["short", "longer than detection"])
def test_frozen_node_continues_when_thawed(tmp_path: Path, engine: str, for_s: float) -> None:
    run = play(
        tmp_path,
        {"name": "freeze", "nodes": [VICTIM], "at_s": 0.25, "for_s": for_s},
        engine=engine,
        failures={"detection_s": 0.4 if for_s == 1.0 or engine == "simulate" else 10.0},
        stop={"rounds": 2 * ROUNDS},
    )
    assert run.status == "done"
    kinds = kinds_of(run, VICTIM)
    assert kinds[:2] == ["frozen", "thawed"]
    assert all(known(run))
    for rank in range(NODES):
        rows = rounds_of(run, rank)
        assert rows == sorted(set(rows))
        assert rows[-1] == 2 * ROUNDS
        # (On a busy machine another real node may be taken for a frozen one.)
        if rank != VICTIM and (engine == "simulate" or for_s == 0.2):
            assert rows == list(range(2 * ROUNDS + 1))
    rows = rounds_of(run, VICTIM)
    if engine == "simulate":
        assert (rows == list(range(2 * ROUNDS + 1))) == (for_s == 0.2)


@BOTH
def test_partition_heals(tmp_path: Path, engine: str) -> None:
    """Halves of a ring learn separately, and then together again."""
    fault = {"name": "partition", "groups": [[0, 1, 2]], "from_s": 0.25, "to_s": 0.65}
    run = play(tmp_path, fault, engine=engine, gather={"timeout_s": 0.05, "lost_peer": "skip"})
    check_survivors(run)
    assert run.events.filter(event="partition").height == 1
    assert run.events.filter(event="healed").height == 1
    lost = run.metrics.filter(round=ROUNDS).filter(node=0)["messages_lost"].item()
    assert lost > 0
    assert run.metrics.filter(round=ROUNDS).filter(node=1)["messages_lost"].item() == 0
    if engine == "simulate":
        distance = dict(run.metrics.filter(node=-1).select("round", "consensus_distance").iter_rows())
        assert distance[6] > 1.2 * distance[2]
        assert distance[ROUNDS] < 0.6 * distance[6]


@BOTH
def test_slow_node_takes_longer(tmp_path: Path, engine: str) -> None:
    slow = {"name": "slow", "nodes": [VICTIM], "factor": 6}
    run = play(tmp_path, slow, engine=engine, algorithm="local", stop={"rounds": 3})
    end = dict(run.metrics.filter(round=3).select("node", "time_s").iter_rows())
    assert end[VICTIM] >= 1.79
    if engine == "simulate":
        assert [end[rank] for rank in range(2)] == pytest.approx([0.3, 0.3])


def test_same_faults_give_the_same_bits(tmp_path: Path) -> None:
    faults = [
        {"name": "churn", "mean_up_s": 1.0, "mean_down_s": 0.3},
        {"name": "freeze", "nodes": 1, "at_s": 0.3, "for_s": 0.7},
        {"name": "loss", "probability": 0.2, "to_s": 0.5},
    ]
    runs = [
        play(
            tmp_path / str(k),
            *faults,
            gather={"lost_peer": "skip", "timeout_s": 0.3},
            checkpoint={"every_rounds": 2},
        )
        for k in range(2)
    ]
    columns = [column for column in runs[0].metrics.columns if column != "wall_s"]
    assert runs[0].metrics.select(columns).equals(runs[1].metrics.select(columns))
    assert runs[0].events.drop("wall_s").equals(runs[1].events.drop("wall_s"))
    first, second = (run.parameters for run in runs)
    assert first is not None
    assert second is not None
    assert torch.equal(first.nan_to_num(), second.nan_to_num())


class Lingering(Algorithm):
    """Nodes don't wait for each other, and pause after their rounds."""

    gathers = False

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            await node.train()
        await node.sleep(0.8)


@BOTH
@pytest.mark.parametrize(
    ("returns_s", "kinds", "rows"),
    [(0.3, [], [0, 1, 2]), (0.9, ["left", "returned"], [0, 1, 2])],
    ids=["stays", "leaves first"],
)
def test_node_that_is_to_return_before_it_has_left(
    tmp_path: Path, engine: str, returns_s: float, kinds: list[str], rows: list[int]
) -> None:
    """It is told to leave in its first round, which ends at 0.5 s, and is gone at 1.3 s."""
    (tmp_path / "churn.csv").write_text(f"time_s,node,event\n0.1,{VICTIM},leave\n{returns_s},{VICTIM},join\n")
    run = play(
        tmp_path,
        {"name": "churn", "path": str(tmp_path / "churn.csv")},
        engine=engine,
        algorithm=f"{__name__}:Lingering",
        compute={"name": "constant", "seconds_per_step": 0.5},
        stop={"rounds": 2},
    )
    assert run.status == "done"
    assert kinds_of(run, VICTIM) == kinds
    assert rounds_of(run, VICTIM) == rows
    if engine == "simulate":
        assert run.events.filter(event="left")["time_s"].to_list() == [1.3] * len(kinds[:1])
    assert all(known(run))


def test_unsent_messages_are_lost_with_a_crashed_node(tmp_path: Path) -> None:
    """A model takes 0.5 s: a node that dies 0.2 s after it starts to send has sent 40 % of the first of two."""
    nbytes = 3 * 4
    network = {"name": "uniform", "uplink_mbps": 2 * (nbytes + 60) * 8 / 1e6}
    run = play(
        tmp_path,
        {"name": "crash", "nodes": [VICTIM], "at_s": 0.3},
        network=network,
        evaluation={"every_rounds": None, "every_s": 0.25},
        stop={"time_s": 4.0},
    )
    rows = {(r["node"], r["moment"]): r for r in run.metrics.to_dicts()}
    assert (VICTIM, "tick 1") in rows
    assert (VICTIM, "tick 2") not in rows
    for rank in (1, 3):  # its neighbours never received a complete model from it
        assert rows[rank, "tick 3"]["messages_received"] <= 1


def test_messages_to_an_undetected_dead_node_are_lost(tmp_path: Path) -> None:
    run = play(
        tmp_path,
        {"name": "crash", "nodes": [VICTIM], "at_s": 0.15},
        network={"name": "uniform", "latency_s": 0.02},
    )
    last = run.metrics.filter(round=ROUNDS)
    for rank in range(NODES):
        if rank != VICTIM:
            [row] = last.filter(node=rank).to_dicts()
            # The model of every round but the first to the dead neighbour: lost until its death is known.
            assert row["messages_lost"] + row["messages_unsent"] == (ROUNDS - 1 if rank in (1, 3) else 0)
            assert (row["messages_lost"] > 0) == (row["messages_unsent"] > 0) == (rank in (1, 3))
    # Every message was received or is lost; none is late.
    assert last["messages_late"].sum() == 0


@BOTH
def test_waiting_for_a_dead_node_holds_up_its_neighbours(tmp_path: Path, engine: str) -> None:
    gather = {"lost_peer": "wait", "timeout_s": 5.0}
    run = play(tmp_path, {**CRASH, "restart_after_s": 0.8}, engine=engine, gather=gather)
    assert run.status == "done"
    assert kinds_of(run, VICTIM) == ["lost", "returned"]
    times = dict(run.metrics.filter(node=1).select("round", "time_s").iter_rows())
    assert max(times[r + 1] - times[r] for r in range(3, 6)) > 0.5  # its neighbours waited meanwhile
    for rank in set(range(NODES)) - {VICTIM}:
        assert rounds_of(run, rank) == list(range(ROUNDS + 1))


def test_weight_of_a_missing_node_can_be_renormalized(tmp_path: Path) -> None:
    """Three nodes of which one never joins: own adds its weight to a node's own, renormalize gives each of the two 1/2."""
    ends = {}
    for missing in ("own", "renormalize"):
        run = play(
            tmp_path / missing,
            {"name": "join", "nodes": [2], "at_s": 1000.0},
            nodes=3,
            topology="complete",
            optimizer={"name": "sgd", "lr": 1e-12},
            initial="independent",
            gather={"lost_peer": "skip", "missing": missing},
            stop={"rounds": 1},
        )
        assert run.parameters is not None
        ends[missing] = run.parameters[:2].double()
    a, b = ends["own"]  # a = 2/3 x + 1/3 y, b = 1/3 x + 2/3 y
    x, y = 2 * a - b, 2 * b - a
    torch.testing.assert_close(ends["renormalize"], torch.stack([(x + y) / 2] * 2), rtol=1e-5, atol=1e-6)


@BOTH
def test_run_with_no_node_left_fails(tmp_path: Path, engine: str) -> None:
    with pytest.raises(
        RunFailed,
        match="no node is left",
    ) as caught:
        play(tmp_path, {"name": "crash", "nodes": "all", "at_round": 2}, engine=engine)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.folder is not None
    run = load_run(caught.value.folder)
    assert run.status == "failed"
    assert all(rounds_of(run, rank) == [0, 1, 2] for rank in range(NODES))


def test_all_nodes_may_be_away_for_a_while(tmp_path: Path) -> None:
    run = play(tmp_path, {"name": "crash", "nodes": "all", "at_s": 0.35, "restart_after_s": 1.0})
    assert run.status == "done"
    assert all(known(run))
    assert all(rounds_of(run, rank)[-1] == ROUNDS for rank in range(NODES))


CHURN: dict[str, Any] = {
    "name": "churn",
    "mean_up_s": 0.05,
    "mean_down_s": 0.05,
    "restart_from": "neighbor",
}
"""Nodes never stay long enough for a round, or to ask a second neighbour."""
SILENCE: dict[str, Any] = {"name": "loss", "probability": 1.0}


@pytest.mark.parametrize(
    ("faults", "stop"),
    [
        ([CHURN, SILENCE], {"time_s": 20.0}),
        ([CHURN | {"to_s": 20.0}, SILENCE], {"rounds": 3}),
        ([CHURN, SILENCE | {"to_s": 20.0}], {"rounds": 3}),
    ],
    ids=["time", "churn that ends", "silence that ends"],
)
def test_newcomers_that_find_no_neighbour_obey_the_stop_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: list[dict[str, Any]], stop: dict[str, Any]
) -> None:
    monkeypatch.setattr(fault_runner, "MAX_IDLE", 300)
    gather = {"lost_peer": "skip", "timeout_s": 1.0}
    run = play(tmp_path, *faults, gather=gather, stop=stop)
    assert run.status == "done"
    assert run.events.filter(event="returned").height > 300


class Patient(Algorithm):
    """All nodes train once and then wait for node 0, which calls repeatedly."""

    gathers = False

    async def run(self, node: Node) -> None:
        if node.rank:
            await node.train()
            await node.receive("go")
        else:
            node.spawn(self._call(node))
        async for _ in node.rounds():
            await node.train()

    async def _call(self, node: Node) -> None:
        while True:
            node.broadcast(range(1, node.size), None, tag="go")
            await node.sleep(0.1)


@pytest.mark.parametrize("start", ["initial", "neighbor"])
def test_waiting_for_a_node_yet_to_join_is_not_a_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    monkeypatch.setattr(fault_runner, "MAX_IDLE", 100)
    coming = {"name": "join", "nodes": [0], "at_s": 60.0}
    restless = {"mean_up_s": 0.5, "mean_down_s": 0.5, "restart_from": start}
    churn = {"name": "churn", "nodes": list(range(1, NODES)), **restless}
    run = play(tmp_path, coming, churn, algorithm=f"{__name__}:Patient", stop={"rounds": 3})
    assert run.status == "done"
    assert run.events.filter(event="returned").height > 100


def test_signal_ends_a_run_of_endlessly_asking_newcomers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, original = count(), life.begins

    def begins(*arguments: Any) -> life.LifeEvent:
        if next(number) == 200:
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(life, "begins", begins)
    run = play(tmp_path, CHURN, SILENCE, gather={"lost_peer": "skip", "timeout_s": 1.0})
    assert run.status == "stopped"
    assert next(number) < 210


class Stubborn(Algorithm):
    """A spawned task sends messages while it is cancelled."""

    async def run(self, node: Node) -> None:
        node.spawn(self._cry(node))
        async for r in node.rounds():
            await node.train()
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.gather(peers, tag=r)
            node.record(cries=len(node.drain("cry")))

    async def _cry(self, node: Node) -> None:
        try:
            await node.sleep(1000.0)
        finally:
            for peer in node.peers():
                node.send(peer, "I am not dead", tag="cry")


class Sleepless(Algorithm):
    """Ignores cancellation."""

    async def run(self, node: Node) -> None:
        while True:
            try:
                await node.sleep(0.01)
            except CancelledError:
                node.record(told=1)


def test_task_that_ignores_cancellation_does_not_delay_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "asyncio"):  # it warns of pending tasks
        run = play(tmp_path, nodes=3, algorithm=f"{__name__}:Sleepless", stop={"time_s": 1.0})
        gc.collect()
    assert run.status == "done"


def test_dead_nodes_send_nothing(tmp_path: Path) -> None:
    run = play(
        tmp_path,
        CRASH,
        algorithm=f"{__name__}:Stubborn",
        evaluation={"every_rounds": None, "every_s": 0.1},
        stop={"time_s": 2.0},
    )
    assert run.status == "done"
    assert run.metrics["cries"].max() == 0
    assert run.metrics.filter(node=0)["round"].max() > 10


@BOTH
def test_run_fails_if_its_last_newcomer_crashes_on_joining(tmp_path: Path, engine: str) -> None:
    others = [rank for rank in range(NODES) if rank != VICTIM]
    with pytest.raises(RunFailed, match="no node is left"):
        play(
            tmp_path,
            {"name": "crash", "nodes": others, "at_s": 0.05},
            {"name": "join", "nodes": [VICTIM], "at_s": 0.3},
            {"name": "crash", "nodes": [VICTIM], "at_s": 0.3},
            engine=engine,
        )
