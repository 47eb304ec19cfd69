"""Fault schedules of an experiment: validation, affected nodes, and times."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from gossamer import BadInput, Experiment
from gossamer.config.registry import names
from gossamer.errors import shown
from gossamer.faults import FaultInterval, FaultSchedule
from gossamer.runtime.setup import prepare

NODES, SEED = 8, 3


def described(*faults: dict[str, Any], **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": NODES,
        "seed": SEED,
        "task": {"name": "least-squares", "features": 2, "samples": 16},
        "algorithm": "d-psgd",
        "gather": {"lost_peer": "skip", "timeout_s": 1.0},
        "faults": list(faults),
        "stop": {"rounds": 3},
    }
    return Experiment.of({**settings, **changes})


def schedule(*faults: dict[str, Any]) -> FaultSchedule:
    return FaultSchedule(described(*faults).faults, NODES, SEED)


def intervals(fault: dict[str, Any]) -> list[FaultInterval]:
    [built] = described(fault).faults
    return list(built.plan(NODES, SEED, "faults.0").intervals)


def refused(*faults: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(BadInput) as caught:
        prepare(described(*faults, **changes))
    [problem] = caught.value.problems
    assert "accepted:" in problem
    return problem


CRASH = {"name": "crash", "nodes": [2], "at_s": 1.0}


def test_faults_are_registered_and_saved_with_the_experiment() -> None:
    assert set(names("fault")) == {"crash", "leave", "join", "churn", "partition", "slow", "loss", "freeze"}
    experiment = described(CRASH, {"name": "churn", "mean_up_s": 1, "mean_down_s": 1, "nodes": 0.5})
    assert Experiment.parse(experiment.to_yaml()) == experiment


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({**CRASH, "nodes": [9]}, "faults.0.nodes: node 9 of 8 nodes; accepted: ranks 0 to 7"),
        ({**CRASH, "nodes": 9}, "faults.0.nodes: 9 of 8 nodes; accepted: 1 to 8"),
        ({"name": "partition", "groups": [[0, 1], [1]]}, "faults.0.groups: node 1 is in two groups"),
        ({"name": "loss", "probability": 0.1, "links": [[0, 8]]}, "faults.0.links: node 8 of 8 nodes"),
    ],
)
def test_fault_that_does_not_fit_the_nodes_is_refused(fault: dict[str, Any], reason: str) -> None:
    assert refused(fault).startswith(reason)


@pytest.mark.parametrize(
    "fault",
    [
        {"name": "crash", "nodes": [0]},
        {**CRASH, "at_round": 2},
        {**CRASH, "restart_after_s": -1},
        {**CRASH, "restart_from": "neighbor"},
        {"name": "slow", "nodes": 1, "factor": 2, "from_s": 3, "to_s": 2},
        {"name": "churn"},
        {"name": "churn", "mean_up_s": 1},
        {"name": "churn", "mean_up_s": 1, "mean_down_s": 1, "path": "x.csv"},
        {"name": "loss", "probability": 0},
        {"name": "loss", "probability": 0.5, "nodes": 1, "links": [[0, 1]]},
        {"name": "freeze", "nodes": 1, "at_s": 1},
        {"name": "crash", "nodes": True, "at_s": 1},
        {"name": "vanish"},
    ],
)
def test_invalid_fault_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"^faults\.0"):
        described(fault)


NODES_ACCEPTED = (
    "a list of ranks from 0, a number of nodes from 1, a fraction of them below 1, 'all', or a mapping such as"
    " {degree_rank: 0}"
)
GROUPS_ACCEPTED = "a list of lists of ranks from 0, or 'halves'"
LINKS_ACCEPTED = "a list of pairs of ranks from 0, [from, to] each"


@pytest.mark.parametrize("nodes", [[-1], [0, "x"], [1.5], 0, -1, 1.0, 1.5, 0.0, "al", None, True], ids=str)
def test_invalid_nodes_are_refused_in_one_line(nodes: Any) -> None:
    problem = refused({**CRASH, "nodes": nodes})
    assert problem == f"faults.0.nodes: got {shown(nodes)}; accepted: {NODES_ACCEPTED}"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"name": "partition", "groups": [[0, -1]]}, f"groups: got [[0, -1]]; accepted: {GROUPS_ACCEPTED}"),
        ({"name": "partition", "groups": [1, 2]}, f"groups: got [1, 2]; accepted: {GROUPS_ACCEPTED}"),
        ({"name": "partition", "groups": "half"}, f"groups: got 'half'; accepted: {GROUPS_ACCEPTED}"),
        (
            {"name": "loss", "probability": 0.1, "links": [[0, 1, 2]]},
            f"links: got [[0, 1, 2]]; accepted: {LINKS_ACCEPTED}",
        ),
        (
            {"name": "loss", "probability": 0.1, "links": [0, 1]},
            f"links: got [0, 1]; accepted: {LINKS_ACCEPTED}",
        ),
    ],
)
def test_invalid_groups_and_links_are_refused_in_one_line(fault: dict[str, Any], reason: str) -> None:
    assert refused(fault) == f"faults.0.{reason}"


@pytest.mark.parametrize("faults", [3, "crash", CRASH], ids=str)
def test_faults_must_be_a_list(faults: Any) -> None:
    assert refused(faults=faults) == f"faults: got {faults!r}; accepted: a list"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"gather": {"lost_peer": "fail"}},
            "gather.lost_peer: fail, with faults: nodes that are away; accepted: skip, wait",
        ),
        (
            {"algorithm": "sgp", "gather": {}},
            "faults: nodes that are away, for sgp; accepted: an algorithm that tolerates it",
        ),
        (
            {"algorithm": {"name": "fedavg", "server": 2}},
            "faults: node 2 is away, but fedavg needs it",
        ),
    ],
)
def test_absences_are_refused_where_not_tolerated(changes: dict[str, Any], reason: str) -> None:
    assert refused(CRASH, **changes).startswith(reason)


def test_losses_without_a_timeout_are_refused() -> None:
    problem = refused({"name": "partition", "from_s": 1}, gather={"lost_peer": "skip"})
    assert problem == "gather.timeout_s: null, although messages are lost; accepted: seconds"
    assert refused({"name": "loss", "probability": 0.1}, algorithm="sgp", gather={}).startswith(
        "faults: sgp tolerates no message loss"
    )


def test_waiting_for_lost_peers_without_a_timeout_is_refused() -> None:
    with pytest.raises(BadInput, match="timeout_s"):
        described(gather={"lost_peer": "wait"})


def test_restarting_by_the_supervisor_requires_nodes_that_continue() -> None:
    engine = {"name": "processes", "restart": "always"}
    assert refused(engine=engine, gather={}).startswith("gather.lost_peer: fail, with engine.restart: always")


def test_affected_nodes_are_drawn_by_the_seed() -> None:
    first = intervals({**CRASH, "nodes": 0.5})
    assert first == intervals({**CRASH, "nodes": 4})
    assert len({interval.node for interval in first}) == 4
    [built] = described({**CRASH, "nodes": 4}).faults
    others = [
        {interval.node for interval in built.plan(NODES, seed, "faults.0").intervals} for seed in range(10)
    ]
    assert len({frozenset(nodes) for nodes in others}) > 1
    assert {interval.node for interval in intervals({**CRASH, "nodes": "all"})} == set(range(NODES))


def test_random_churn_alternates_and_ends() -> None:
    churn = intervals({"name": "churn", "mean_up_s": 5, "mean_down_s": 1, "from_s": 2, "to_s": 50})
    assert [interval.from_s for interval in churn] == sorted(interval.from_s for interval in churn)
    for rank in range(NODES):
        own = [interval for interval in churn if interval.node == rank]
        assert all(
            2 < interval.from_s < 50 and interval.from_s < interval.to_s < math.inf for interval in own
        )
        assert all(first.to_s < second.from_s for first, second in zip(own, own[1:], strict=False))
    up = 5 / 6 * 48 * NODES  # expected; 80 % to 120 % are accepted
    away = sum(min(interval.to_s, 50) - interval.from_s for interval in churn)
    assert 0.8 * up < 48 * NODES - away < 1.2 * up


def test_churn_without_an_end_is_endless_and_reproducible() -> None:
    [churn] = described({"name": "churn", "mean_up_s": 1, "mean_down_s": 1, "nodes": 2}).faults
    first = list(islice(churn.plan(NODES, SEED, "faults.0").intervals, 1000))
    assert len(first) == 1000
    assert first == list(islice(churn.plan(NODES, SEED, "faults.0").intervals, 1000))


def write(tmp_path: Path, *lines: str) -> dict[str, Any]:
    path = tmp_path / "churn.csv"
    path.write_text("\n".join(["time_s,node,event", *lines]) + "\n")
    return {"name": "churn", "path": str(path)}


def test_churn_is_read_from_a_file(tmp_path: Path) -> None:
    fault = write(tmp_path, "5,1,join", "2,0,crash", "4,0,join", "6,0,leave", "7,3,crash")
    assert [
        (interval.node, interval.from_s, interval.to_s, interval.kind) for interval in intervals(fault)
    ] == [
        (1, 0.0, 5.0, "join"),
        (0, 2.0, 4.0, "crash"),
        (0, 6.0, math.inf, "leave"),
        (3, 7.0, math.inf, "crash"),
    ]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["1,9,crash"], "node: node 9 of 8 nodes; accepted: ranks 0 to 7"),
        (["1,0.5,crash"], "column 'node': '0.5'; accepted: whole numbers"),
        (["2,0,crash", "1,0,join"], "accepted: ascending times"),
        (["1,0,explode"], "'explode' of node 0 at 1 s; accepted: crash or join or leave"),
        (["1,0,crash", "2,0,leave"], "'leave' of node 0 at 2 s; accepted: join"),
        (["1,0,join", "2,0,join"], "'join' of node 0 at 2 s; accepted: crash or leave"),
    ],
)
def test_invalid_churn_file_is_refused(tmp_path: Path, lines: list[str], reason: str) -> None:
    problem = refused(write(tmp_path, *lines))
    assert problem.startswith("faults.0.path: ")
    assert reason in problem


def test_slow_and_frozen_nodes_compute_more_slowly() -> None:
    setup = prepare(
        described(
            {"name": "slow", "nodes": [1], "factor": 3, "from_s": 10, "to_s": 20},
            {"name": "freeze", "nodes": [2], "at_s": 10, "for_s": 5},
            compute={"name": "constant", "seconds_per_step": 1.0},
        )
    )
    seconds = setup.compute.seconds
    assert [seconds(SEED, 1, 0, 2, at) for at in (0, 9, 10, 19, 20)] == pytest.approx(
        [2, 4, 6, 1 + 2 * 1 / 3 + 1, 2]
    )
    assert [seconds(SEED, 2, 0, 2, at) for at in (0, 9, 10, 14)] == pytest.approx([2, 7, 7, 3])
    assert seconds(SEED, 0, 0, 2, 10) == 2
    assert setup.faults.factor(1, 15) == 3
    assert setup.faults.factor(1, 20) == setup.faults.factor(2, 12) == 1


def test_slow_faults_multiply_with_slowdowns_of_the_profile() -> None:
    compute = {
        "name": "slowdowns",
        "windows": [{"from_s": 0, "to_s": 4, "factor": 2}],
        "base": {"name": "constant", "seconds_per_step": 1},
    }
    setup = prepare(described({"name": "slow", "nodes": [1], "factor": 3, "to_s": 4}, compute=compute))
    assert [setup.compute.seconds(SEED, rank, 0, 0.5, 0) for rank in (0, 1)] == [1.0, 3.0]


def test_partition_cuts_paths_between_groups_until_its_end() -> None:
    setup = prepare(described({"name": "partition", "groups": [[0, 1], [2]], "from_s": 1, "to_s": 2}))
    before = setup.network.conditions(NODES, SEED)
    (first, during), (second, after) = setup.network.changes(NODES, SEED)
    assert (first, second) == (1.0, 2.0)
    pairs = [(0, 1), (0, 2), (2, 0), (3, 4), (3, 1)]
    assert [before.path(*pair) is not None for pair in pairs] == [True] * 5
    assert [during.path(*pair) is not None for pair in pairs] == [True, False, False, True, False]
    assert [after.path(*pair) is not None for pair in pairs] == [True] * 5


def test_default_partition_has_two_equal_halves() -> None:
    setup = prepare(described({"name": "partition"}))
    during = setup.network.conditions(NODES, SEED)
    groups = {
        frozenset(to for to in range(NODES) if to == rank or during.path(rank, to)) for rank in range(NODES)
    }
    assert sorted(map(len, groups)) == [4, 4]


def test_losses_combine_with_those_of_the_network() -> None:
    network = {"name": "uniform", "loss": 0.5}
    setup = prepare(described({"name": "loss", "probability": 0.5, "links": [[0, 1]]}, network=network))
    during = setup.network.conditions(NODES, SEED)
    assert [during.path(*pair).loss for pair in [(0, 1), (1, 0)]] == [0.75, 0.5]  # type: ignore[union-attr]


def test_partition_applies_to_a_changing_network(tmp_path: Path) -> None:
    network = {
        "name": "varying",
        "base": {"name": "uniform", "bandwidth_mbps": 8},
        "rate_changes": [{"at_s": 1.5, "factor": 0.5}],
    }
    setup = prepare(
        described({"name": "partition", "groups": [[0]], "from_s": 1, "to_s": 2}, network=network)
    )
    course = list(setup.network.changes(NODES, SEED))
    assert [time_s for time_s, _ in course] == [1.0, 1.5, 2.0]
    assert [conditions.path(0, 1) is None for _, conditions in course] == [True, True, False]
    assert [conditions.rates[0] for _, conditions in course] == [1e6, 5e5, 5e5]


def test_fraction_of_less_than_one_node_is_refused() -> None:
    problem = refused({"name": "crash", "nodes": 0.01, "at_s": 1})
    assert problem.startswith("faults.0.nodes: 0.01, which is 0 of 8 nodes; accepted: 1 to 8")


def test_nodes_are_refused_for_churn_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "churn.csv").write_text("time_s,node,event\n1,0,crash\n")
    with pytest.raises(BadInput, match="the file has its own"):
        described({"name": "churn", "path": str(tmp_path / "churn.csv"), "nodes": [3]})
