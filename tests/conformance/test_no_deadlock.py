"""No run deadlocks: on random graphs, step times, latencies, bandwidths, ways to share links, losses and vanishing paths,
with nodes that crash, return, leave, join and freeze, every run ends by its stop rule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_runs import ALGORITHMS, play, surroundings

from gossamer import Experiment
from gossamer.results.segment import read_segment


def scenario(name: str, number: int, folder: Path) -> Experiment:
    rng = random.Random(f"{name} {number} stop")
    stop = rng.choice([{"rounds": rng.randint(1, 4)}, {"time_s": 0.07}, {"rounds": 3, "time_s": 0.05}])
    lossless = rng.random() < 0.2
    # (A client of fedavg needs the messages of its server, even the one that ends the rounds.)
    flickers, nodes = name != "fedavg", rng.randint(3, 8)
    described = surroundings(name, number, nodes, folder, lossless=lossless, flickers=flickers)
    return Experiment.of({**described, "evaluation": {"every_rounds": None}, "stop": stop})


def check(name: str, numbers: range, folder: Path) -> None:
    for number in numbers:
        experiment = scenario(name, number, folder)
        outcome = play(experiment, folder / "run")
        assert outcome.failure is None, (number, outcome.failure)
        rules = {"rounds": experiment.stop.rounds, "time": experiment.stop.time_s}
        assert rules[outcome.reason] is not None, number


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_run_ends_by_its_stop_rule(tmp_path: Path, name: str) -> None:
    check(name, range(8), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_thousands_of_runs_end_by_their_stop_rules(tmp_path: Path, name: str) -> None:
    check(name, range(8, 208), tmp_path)


def test_algorithms_are_known_by_whether_they_gather() -> None:
    """The tests here include a new algorithm automatically."""
    asynchronous = {name for name, kind in ALGORITHMS.items() if not kind.gathers}
    assert {"ad-psgd", "ad-psgd-artifact", "divshare", "swift", "swift-artifact"} <= asynchronous
    assert {"d-psgd", "fedavg", "gradient-tracking", "relay-sum", "sgp"} <= ALGORITHMS.keys() - asynchronous


# --- nodes that come and go

BEARING = [name for name, kind in ALGORITHMS.items() if not kind.needs_every_message and name != "fedavg"]
"""Algorithms that tolerate losses. (A client of fedavg that loses its server for good waits without end.)"""
NEEDED = {name: ALGORITHMS[name].model_construct().needed_ranks(3) for name in BEARING}

instants = st.integers(0, 30).map(lambda k: k / 20)
durations = st.integers(1, 15).map(lambda k: k / 20)


def fault(ranks: list[int], *, losing: bool) -> st.SearchStrategy[dict[str, Any]]:
    """A fault of some of these nodes, or of messages."""
    some = st.lists(st.sampled_from(ranks), min_size=1, unique=True)
    crash = {"name": st.just("crash"), "nodes": some, "restart_after_s": st.none() | durations}
    churn = {
        "name": st.just("churn"),
        "nodes": some,
        "mean_down_s": durations,
        "by": st.sampled_from(["crash", "leave"]),
        "restart_from": st.sampled_from(["checkpoint", "initial", "neighbor"]),
    }
    kinds: list[dict[str, Any]] = [
        {**crash, "at_s": instants},
        {**crash, "at_round": st.integers(1, 5)},
        {"name": st.just("leave"), "nodes": some, "at_s": instants},
        {
            "name": st.just("join"),
            "nodes": some,
            "at_s": durations,
            "start_from": st.sampled_from(["initial", "neighbor"]),
        },
        {"name": st.just("freeze"), "nodes": some, "at_s": instants, "for_s": durations},
        # (Without end only if nodes stay long enough for a round.)
        {**churn, "mean_up_s": durations, "to_s": st.just(1.5)},
        {**churn, "mean_up_s": instants.map(lambda s: s + 1)},
        {"name": st.just("slow"), "nodes": some, "factor": st.just(3.0), "from_s": instants},
    ]
    lasting = {"from_s": instants, "to_s": st.none() | instants.map(lambda s: s + 1.6)}
    if losing:
        kinds += [
            {"name": st.just("partition"), **lasting},
            {"name": st.just("loss"), "probability": st.sampled_from([0.1, 1.0]), "nodes": some, **lasting},
        ]
    return st.one_of([st.fixed_dictionaries(kind) for kind in kinds])


@st.composite
def troubles(draw: st.DrawFn, at_most: int) -> dict[str, Any]:
    """The arguments of :func:`check_any`."""
    name, nodes = draw(st.sampled_from(BEARING)), draw(st.integers(3, 8))
    lossless = draw(st.booleans())
    ranks = [rank for rank in range(nodes) if rank not in NEEDED[name]]
    return {
        "name": name,
        "number": draw(st.integers(0, 2**20)),
        "nodes": nodes,
        "lossless": lossless,
        "faults": draw(st.lists(fault(ranks, losing=not lossless), min_size=1, max_size=at_most)),
        # (Waiting for dead nodes needs a timeout.)
        "lost_peer": "skip" if lossless else draw(st.sampled_from(["skip", "wait"])),
        "every_rounds": draw(st.sampled_from([None, 2])),
        "by_rounds": draw(st.booleans()),
    }


def check_any(
    folder: Path,
    name: str,
    number: int,
    nodes: int,
    lossless: bool,
    faults: list[dict[str, Any]],
    lost_peer: str,
    every_rounds: int | None,
    by_rounds: bool,
) -> None:
    # (A node that starts from a neighbour's model needs its answer.)
    described = surroundings(name, number, nodes, folder, lossless=lossless, flickers=False)
    experiment = Experiment.of(
        {
            **described,
            "faults": faults,
            "failures": {"detection_s": 0.15},
            "gather": {**described["gather"], "lost_peer": lost_peer},
            "checkpoint": {"every_rounds": every_rounds},
            "evaluation": {"every_rounds": 1},
            "stop": {"rounds": 12} if by_rounds else {"time_s": 2.5},
        }
    )
    outcome = play(experiment, folder / "run")
    if outcome.failure is not None:
        assert str(outcome.failure).startswith("no node is left"), outcome.failure
    else:
        assert outcome.reason == ("rounds" if by_rounds else "time")
    rows = list(read_segment(folder / "run" / "metrics"))
    for rank in range(nodes):
        node_rows = [row for row in rows if row["node"] == rank]
        times = [row["time_s"] for row in node_rows]
        assert times == sorted(times)
        if ALGORITHMS[name].gathers:
            rounds = [row["round"] for row in node_rows if row["moment"] == "round"]
            assert rounds == sorted(set(rounds))
    network_rows = [row["round"] for row in rows if row["node"] == -1 and row["moment"] == "round"]
    assert len(network_rows) == len(set(network_rows))


_CHECKS = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


@settings(max_examples=8, deadline=None, suppress_health_check=_CHECKS)
@given(troubles(at_most=4))
def test_every_run_ends_under_churn(tmp_path: Path, trouble: dict[str, Any]) -> None:
    check_any(tmp_path, **trouble)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("shapes_unchecked")
@settings(max_examples=600, deadline=None, suppress_health_check=_CHECKS)
@given(troubles(at_most=6))
def test_thousands_of_runs_end_under_churn(tmp_path: Path, trouble: dict[str, Any]) -> None:
    check_any(tmp_path, **trouble)
