"""A run that a node never took part in is not done; one whose nodes are slow, idle or not drawn is (open.md, O23)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gossamer
from gossamer import BadInput, Experiment, RunFailed, load_run
from gossamer.runtime.processes.coordinator import checks
from gossamer.runtime.setup import prepare

DIES = """
import os

from gossamer.algorithms import DPSGD


class Dies(DPSGD):
    at: int

    async def run(self, node):
        async for r in node.rounds():
            if node.rank == 2 and r == self.at:
                os._exit(3)
            await node.train(1)
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))
"""


def described(**changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "nodes": 3,
        "task": {"name": "least-squares", "features": 3, "samples": 32},
        "topology": "complete",
        "algorithm": "d-psgd",
        "gather": {"lost_peer": "skip", "timeout_s": 5.0},
        "evaluation": {"every_rounds": 1},
        "stop": {"rounds": 3},
        "engine": {"name": "processes", "trainer": "sequential"},
    }
    return Experiment.of({**fields, **changes})


@pytest.mark.parametrize("at", [0, 1])
def test_node_that_dies_before_it_completed_a_round_fails_the_run(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a later round, the rules for lost peers decide."""
    (tmp_path / "dies.py").write_text(DIES)
    monkeypatch.syspath_prepend(tmp_path)
    experiment = described(algorithm={"name": "dies:Dies", "at": at})
    if at:
        assert gossamer.run(experiment, tmp_path / "runs").status == "done"
        return
    text = "^node 2 completed no round: node 2 died in round 0: exit code 3$"
    with pytest.raises(RunFailed, match=text) as failed:
        gossamer.run(experiment, tmp_path / "runs")
    assert failed.value.folder is not None
    run = load_run(failed.value.folder)
    assert run.status == "failed"
    assert run.metrics.filter(round=3)["node"].sort().to_list() == [-1, 0, 1]  # what the others did is kept


COLUMNS = """
from gossamer.algorithms import DPSGD


class Columns(DPSGD):
    async def run(self, node):
        async for r in node.rounds():
            if node.rank == 2 and r == 1:
                node.record(**{f"column_{k}": k for k in range(20)})
            await node.train(1)
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))
"""


def test_node_of_this_machine_that_reports_too_much_is_lost_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "columns.py").write_text(COLUMNS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(checks, "MAX_RECORDED", 10)
    run = gossamer.run(described(algorithm={"name": "columns:Columns"}), tmp_path / "runs")
    assert run.status == "done"
    [lost] = run.events.filter(event="lost").to_dicts()
    why = "it sent new columns of node 2; accepted: 10 recorded columns in all"
    assert lost["detail"] == f"node 2 died in round 1: {why}"
    assert run.metrics.filter(round=3)["node"].sort().to_list() == [-1, 0, 1]


def test_absence_that_a_fault_planned_is_no_failure(tmp_path: Path) -> None:
    crash = {"name": "crash", "nodes": [2], "at_s": 0.0}
    assert gossamer.run(described(faults=[crash]), tmp_path).status == "done"


@pytest.mark.parametrize(
    "algorithm", ["gossip-learning", {"name": "divshare", "fraction": 0.5, "recipients": 2}]
)
def test_slow_nodes_are_no_failure(algorithm: Any, tmp_path: Path) -> None:
    """Heavy-tailed speeds, as measured on phones: some nodes complete no round."""
    factors = (np.random.default_rng(0).pareto(1.0, 20) + 1).tolist()
    run = gossamer.run(
        described(
            nodes=20,
            topology={"name": "random-regular", "degree": 4},
            algorithm=algorithm,
            compute={"name": "per-node", "factors": factors},
            task={"name": "least-squares", "features": 3, "samples": 80},
            gather={},
            evaluation={"every_s": 0.05},
            stop={"time_s": 0.1, "rounds": 100_000},
            engine="simulate",
        ),
        tmp_path,
    )
    assert run.status == "done"
    slowest = run.metrics.filter(node=factors.index(max(factors)))
    assert slowest["round"].max() == 0


STEPS = {"name": "constant", "seconds_per_step": 0.1}


@pytest.mark.parametrize(
    "fault",
    [
        {"name": "join", "nodes": "all", "at_s": 10},
        {"name": "churn", "mean_up_s": 0.006, "mean_down_s": 0.01},  # a node that returns is in a later round
        {"name": "churn", "mean_up_s": 1e-9, "mean_down_s": 1e-9, "to_s": 1e-6},
    ],
)
def test_run_in_which_faults_let_no_node_take_part_fails(fault: dict[str, Any], tmp_path: Path) -> None:
    """A step takes 0.1 s."""
    stop = {"rounds": 2, "time_s": 0.3}
    experiment = described(compute=STEPS, faults=[fault], stop=stop, engine="simulate")
    with pytest.raises(
        RunFailed, match="^no node took a step or sent a message in .* s: the faults let"
    ) as failed:
        gossamer.run(experiment, tmp_path)
    assert failed.value.folder is not None
    assert load_run(failed.value.folder).status == "failed"


def test_nodes_that_are_absent_but_for_a_step_take_part(tmp_path: Path) -> None:
    fault = {"name": "leave", "nodes": "all", "at_s": 0.25}
    run = gossamer.run(
        described(compute=STEPS, faults=[fault], stop={"rounds": 2}, engine="simulate"), tmp_path
    )
    assert run.status == "done"


@pytest.mark.parametrize(
    ("by", "mean_up_s", "engine", "line"),
    [
        (
            "crash",
            1e-9,
            "simulate",
            "got 1e-09, while a step of node 2 takes 0.1 s; accepted: at least 0.005",
        ),
        (
            "crash",
            0.0049,
            "simulate",
            "got 0.0049, while a step of node 2 takes 0.1 s; accepted: at least 0.005",
        ),
        (
            "leave",
            1e-9,
            "simulate",
            "got 1e-09, while a step of node 2 takes 0.1 s; accepted: at least 0.0001",
        ),
        (
            "crash",
            1e-9,
            "processes",
            "got 1e-09, while a step of node 2 takes 0.001 s; accepted: at least 5e-05",
        ),
        ("crash", 0.005, "simulate", ""),
        ("leave", 0.0001, "simulate", ""),
        ("crash", 0.005, "processes", ""),
    ],
)
def test_churn_without_time_for_a_step_is_refused(by: str, mean_up_s: float, engine: str, line: str) -> None:
    churn = {"name": "churn", "nodes": [0, 2], "by": by, "mean_up_s": mean_up_s, "mean_down_s": 1}
    experiment = described(compute=STEPS, faults=[churn], engine=engine)
    if not line:
        prepare(experiment)
        return
    with pytest.raises(BadInput) as refused:
        prepare(experiment)
    assert str(refused.value) == f"faults.0.mean_up_s: {line}"
