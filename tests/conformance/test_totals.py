"""The totals of runs: bytes and messages of all nodes, counted by the engine whatever is evaluated, in categories that add
up; and the time for which a node is away."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest
import random_runs
from random_runs import ALGORITHMS, surroundings

import gossamer
from gossamer import Experiment, Message, Node, NodeWrapper, Run
from gossamer.errors import BadInput, RunFailed
from gossamer.layers import SampledNode
from gossamer.messages import wire_bytes
from gossamer.messages.tags import Traffic
from gossamer.results.finals import final_summary, total
from gossamer.runtime.outcome import Outcome
from gossamer.runtime.simulate.simulation import Simulation

FED: dict[str, Any] = {
    "name": "fed",
    "seed": 1,
    "nodes": 41,
    "task": {"name": "digits"},
    "topology": {"name": "complete"},
    "algorithm": {"name": "fedavg", "client_fraction": 0.05, "local_steps": 5},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "batch_size": 16,
    "compute": {"name": "constant", "seconds_per_step": 0.1},
    "network": {"name": "uniform", "latency_s": 0.01, "bandwidth_mbps": 10},
    "evaluation": {"every_rounds": 10},
    "stop": {"rounds": 20},
    "engine": {"name": "simulate", "trainer": "sequential"},
}
"""Forty clients, of which two a round receive a model from the server and send one back."""

CRASH: dict[str, Any] = {
    "name": "crash",
    "seed": 1,
    "nodes": 3,
    "task": {"name": "least-squares", "features": 5, "samples": 300},
    "topology": {"name": "complete"},
    "algorithm": {"name": "d-psgd", "local_steps": 1},
    "optimizer": {"name": "sgd", "lr": 0.05},
    "batch_size": 8,
    "compute": {"name": "constant", "seconds_per_step": 0.1},
    "network": {"name": "uniform", "latency_s": 0.01},
    "gather": {"lost_peer": "skip", "timeout_s": 0.5},
    "failures": {"detection_s": 1},
    "evaluation": {"every_rounds": 1},
    "stop": {"rounds": 100},
    "engine": {"name": "simulate", "trainer": "sequential"},
}
"""Three nodes that each send a model of five parameters to the two others after every step."""

GRID = {"every_rounds": None, "every_s": 1.0}
EVALUATIONS = pytest.mark.parametrize(
    "evaluation", [{"every_rounds": 1}, {"every_rounds": 50}, GRID], ids=["round", "50 rounds", "grid"]
)


def play(out: Path, settings: dict[str, Any], **changes: Any) -> Run:
    return gossamer.run(Experiment.of({**settings, **changes}), out, command=["test"])


def counted(run: Run) -> dict[str, Any]:
    return dict(run.figures["totals"])


def check_sums(totals: dict[str, Any]) -> None:
    of = {name.removeprefix("messages_"): count for name, count in totals.items()}
    assert of["sent"] == of["received"] + of["lost"] + of["in_flight"]
    assert of["received"] == of["taken"] + of["late"] + of["superseded"] + of["refused"] + of["unread"]


# --- what was sent, whatever was evaluated


@pytest.mark.parametrize("engine", ["simulate", "processes"])
@EVALUATIONS
def test_server_and_clients_send_every_model(evaluation: dict[str, Any], engine: str, tmp_path: Path) -> None:
    """Twenty rounds of two clients, each with a model down and one up: 80 messages. A model has 64 x 64 + 64 + 64 x 10
    + 10 parameters, and each message its number of the round."""
    if engine == "processes" and evaluation != {"every_rounds": 50}:
        pytest.skip("one evaluation is enough for processes")
    run = play(tmp_path, FED, evaluation=evaluation, engine={"name": engine, "trainer": "sequential"})
    totals = counted(run)
    assert (totals["messages_sent"], totals["messages_received"]) == (80, 80)
    assert run.parameters is not None
    parameters = run.parameters.shape[1]
    assert 80 * 4 * parameters < totals["bytes_sent"] < 80 * (4 * parameters + 100)
    assert totals["bytes_sent"] == pytest.approx(1.544e6, rel=1e-3)
    assert totals["exact"]
    assert final_summary(run).bytes_sent == total(run, "bytes") == totals["bytes_sent"]
    assert run.summary["sent"] == "1.54 MB"
    check_sums(totals)
    if engine == "simulate":  # the last row of the server counts from the run's last instant
        assert run.metrics["network_bytes"].max() == totals["bytes_sent"]


def test_budget_counts_what_clients_have_sent(tmp_path: Path) -> None:
    """Thirteen rounds of 4 x 19.3 kB are the first with 1 MB; twelve have 0.93 MB."""
    run = play(tmp_path, FED, stop={"bytes": 1_000_000})
    a_round = play(tmp_path, FED, stop={"rounds": 1}).figures["totals"]["bytes_sent"]
    assert 12 * a_round < 1_000_000 <= 13 * a_round
    assert run.metrics.filter(node=0)["round"].max() == 13
    assert counted(run)["bytes_sent"] == pytest.approx(13 * a_round, abs=4)
    per_node = play(tmp_path, FED, stop={"bytes_per_node": 1_000_000 / 41})
    assert counted(per_node)["bytes_sent"] == counted(run)["bytes_sent"]


@pytest.mark.slow
def test_nodes_that_have_finished_keep_answering(tmp_path: Path) -> None:
    """AD-PSGD with a straggler: eight nodes of 50 rounds, in each of which one asks and one answers, 400 messages or less
    if a node finds no partner; the last rows of the fast nodes do not have what they answer to the straggler."""
    settings = {
        **FED,
        "nodes": 8,
        "topology": {"name": "ring"},
        "algorithm": {"name": "ad-psgd"},
        "compute": {
            "name": "stragglers",
            "count": 1,
            "which": "first",
            "factor": 20,
            "base": {"name": "constant", "seconds_per_step": 0.1},
        },
        "network": {"name": "uniform", "latency_s": 0.001},
        "stop": {"rounds": 50},
    }
    by_rounds = counted(play(tmp_path, settings))
    by_grid = play(tmp_path, settings, evaluation={"every_rounds": None, "every_s": 1.0})
    last = by_grid.metrics.filter(pl.col("node") >= 0).group_by("node").last()
    assert by_rounds["messages_sent"] == last["messages_sent"].sum() == 400
    assert by_rounds["bytes_sent"] == last["bytes_sent"].sum()
    assert by_rounds == counted(by_grid)


@EVALUATIONS
def test_traffic_of_a_crashed_node_counts(evaluation: dict[str, Any], tmp_path: Path) -> None:
    """Node 2 crashes after 49 rounds, in which each node has sent two messages: 294. The others send 51 more to each other,
    102, and 4 to node 2 until they know of its death after 1 s (in rounds of 0.1 + 0.5 s, the first and second one). A
    message is one of five floats."""
    faults = [{"name": "crash", "nodes": [2], "at_round": 49}]
    run = play(tmp_path, CRASH, faults=faults, evaluation=evaluation)
    totals = counted(run)
    assert totals["messages_sent"] == 6 * 49 + 2 * 51 + 4 == 400
    assert totals["bytes_sent"] == 400 * 63 == 25_200
    assert (totals["messages_lost"], totals["messages_received"]) == (4, 396)
    assert totals["messages_unsent"] == 2 * 51 - 4
    assert (totals["rounds_most"], totals["rounds_least"]) == (100, 100)
    check_sums(totals)
    [death] = run.events.filter(event="lost").to_dicts()
    assert death["network_bytes"] == 6 * 49 * 63
    result = final_summary(run)
    assert (result.rounds, result.least_rounds, result.exact) == (100, 100, True)


def test_size_of_a_message_is_that_on_the_wire() -> None:
    import torch

    assert wire_bytes((7,), torch.zeros(5)) == 63


def test_calls_to_a_node_that_has_left_are_unsent(tmp_path: Path) -> None:
    """Node 2 leaves at the end of its round 28, which is under way at 3.05 s (a round takes 0.11 s): until then every node
    has sent 56 messages. The two others send 72 more to each other, and call node 2 as often."""
    run = play(tmp_path, CRASH, faults=[{"name": "leave", "nodes": [2], "at_s": 3.05}])
    totals = counted(run)
    assert totals["messages_sent"] == 3 * 56 + 2 * 72 == 312
    assert totals["messages_received"] == totals["messages_taken"] == 312
    assert (totals["messages_lost"], totals["messages_unsent"]) == (0, 144)
    check_sums(totals)
    last = run.metrics.filter(round=100)
    assert last["messages_lost"].sum() == 0
    assert last.filter(pl.col("node") >= 0)["messages_unsent"].to_list() == [72, 72]
    assert run.events.filter(event="left")["network_bytes"].to_list() == [3 * 56 * 63]


def test_lost_messages_are_among_the_sent_ones(tmp_path: Path) -> None:
    network = {"name": "uniform", "latency_s": 0.01, "loss": 0.2}
    totals = counted(play(tmp_path, CRASH, network=network))
    assert totals["messages_sent"] == 3 * 2 * 100
    assert 80 < totals["messages_lost"] < 160
    assert totals["messages_unsent"] == 0
    check_sums(totals)


def test_network_bytes_of_rows_are_those_of_all_nodes_at_that_instant(tmp_path: Path) -> None:
    """On a grid, all nodes have a row at the same instant."""
    run = play(tmp_path, FED, evaluation={**GRID, "of": "instant"})
    rows = run.metrics.filter(pl.col("node") >= 0, pl.col("moment").str.contains("tick"))
    sums = rows.group_by("time_s").agg(pl.col("bytes_sent").sum(), pl.col("network_bytes").unique(), pl.len())
    assert len(sums) > 5
    for row in sums.to_dicts():  # but for the byte that a message which is leaving has begun
        assert row["network_bytes"] == [pytest.approx(row["bytes_sent"], abs=2)]


def test_record_without_totals_says_at_least(tmp_path: Path) -> None:
    """Of a killed run, only the last rows are known: those of round 10 of the clients."""
    run = play(tmp_path, FED)
    right = counted(run)["bytes_sent"]
    (run.path / "status.json").unlink()
    killed = Run(run.path)
    result = final_summary(killed)
    last = run.metrics.filter(pl.col("node") >= 0).group_by("node").last()["bytes_sent"].sum()
    assert (result.bytes_sent, result.exact) == (last, False)
    assert last < right
    assert killed.summary["sent"] == f"at least {last / 1e6:.3g} MB"


# --- categories that add up


class Steals(NodeWrapper):
    """Drops some messages, and fails on others."""

    def incoming(self, node: Node, message: Message) -> Message | None:
        draw = node.rng("steals", message.source, round(message.sent_at * 1e9)).random()
        if draw < 0.05:
            raise ValueError("no")
        return None if draw < 0.2 else message


FAULTS = [
    {"name": "freeze", "nodes": [4], "at_s": 0.4, "for_s": 0.3},
    {"name": "join", "nodes": [0], "at_s": 0.1, "start_from": "neighbor"},
]


def fields(name: str, number: int, tmp_path: Path) -> dict[str, Any]:
    """A random experiment. Every third one has nodes that crash or leave, come back, freeze and join late; other ones
    lose messages, on the way or in a wrapper."""
    rng = random.Random(f"totals {name} {number}")
    chosen = surroundings(name, number, 5, tmp_path, lossless=number % 3 == 0)
    chosen |= {"stop": rng.choice([{"rounds": 6}, {"time_s": 0.7}]), "evaluation": {"every_rounds": 3}}
    if number == 0 and ALGORITHMS[name].tolerates_sampling:
        chosen["topology"] = {"name": "cyclon", "view": 3, "shuffle": 2}
    if number % 3 == 1:
        churn = {
            "name": "churn",
            "nodes": [1, 2, 3],
            "mean_up_s": 0.3,
            "mean_down_s": 0.15,
            "by": rng.choice(["crash", "leave"]),
            "restart_from": rng.choice(["checkpoint", "initial", "neighbor"]),
        }
        chosen |= {"faults": [churn, *FAULTS], "gather": {"timeout_s": 0.2, "lost_peer": "skip"}}
        chosen |= {
            "failures": {"detection_s": 0.1},
            "checkpoint": {"every_rounds": 1},
            "stop": {"time_s": 2.0},
        }
    if number % 3 == 2 and not ALGORITHMS[name].needs_every_message:
        chosen |= {"wrappers": [Steals()], "gather": {"timeout_s": 0.2, "malformed": "drop"}}
    return chosen


def observed(simulation: Simulation) -> tuple[int, int]:
    """The messages in flight, and those that nobody has read, counted one by one."""
    links, nodes = simulation._context.links, range(5)
    waiting = sum(len(links._waiting(rank)) for rank in nodes)
    boxes = sum(not message.again for node in simulation.nodes for message in node.mailbox.messages)
    samplers = [
        layer.sampler for node in simulation.nodes for layer in node.layers if isinstance(layer, SampledNode)
    ]
    return sum(links._on_the_way) - waiting, boxes + sum(
        message is not None
        for sampler in samplers
        for message in sampler._due  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_categories_add_up_to_the_messages_that_exist(name: str, number: int, tmp_path: Path) -> None:
    """What the counters leave over is what lies in mailboxes and is under way: nothing is forgotten or counted twice.
    (Mailboxes that crashed with their nodes are gone, so that more is unread.)"""
    try:
        experiment = Experiment.of(fields(name, number, tmp_path))
        outcome, in_flight, unread = watched(experiment, tmp_path / "record")
    except BadInput:
        pytest.skip("the algorithm does not tolerate this")
    assert outcome.totals is not None
    totals: dict[str, Any] = dict(outcome.totals)
    sent, received, lost = (totals[f"messages_{fate}"] for fate in ("sent", "received", "lost"))
    used = sum(totals[f"messages_{fate}"] for fate in ("taken", "late", "superseded", "refused"))
    assert totals["bytes_sent"] > 0 or name in ("centralized", "local")
    assert sent - received - lost == in_flight == totals["messages_in_flight"]
    assert received - used == totals["messages_unread"]
    if number % 3 == 1:
        assert unread <= totals["messages_unread"]
    else:
        assert unread == totals["messages_unread"]


def watched(experiment: Experiment, folder: Path) -> tuple[Outcome, int, int]:
    """Run without training, and count the messages in flight and unread at the instant at which the engine does."""
    seen: list[tuple[int, int]] = []
    count = Simulation._totals

    def totals(simulation: Simulation) -> Any:
        result = count(simulation)
        seen.append(observed(simulation))
        return result

    with mock.patch.object(Simulation, "_totals", totals):
        outcome = random_runs.play(experiment, folder)
    return outcome, *seen[-1]


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_sampled_graph_counts_the_messages_of_samplers(engine: str, tmp_path: Path) -> None:
    settings = {
        **CRASH,
        "nodes": 8,
        "topology": {"name": "cyclon", "view": 4, "shuffle": 3},
        "algorithm": {"name": "gossip-learning"},
        "gather": {},
        "stop": {"rounds": 10},
        "engine": {"name": engine, "trainer": "sequential"},
    }
    totals = counted(play(tmp_path, settings))
    assert totals["messages_sent"] > 8 * 10
    assert totals["exact"]
    check_sums(totals)


@pytest.mark.parametrize("options", [{}, {"drop_outs": "recover"}], ids=["plain", "recover"])
def test_secure_aggregation_takes_all_of_its_messages(options: dict[str, Any], tmp_path: Path) -> None:
    totals = counted(play(tmp_path, CRASH, stop={"rounds": 5}, gather={}, secure_aggregation=options))
    assert totals["messages_sent"] > 30
    assert totals["messages_taken"] == totals["messages_received"] == totals["messages_sent"]


# --- processes


def test_budget_of_processes_counts_reports_of_all_nodes(tmp_path: Path) -> None:
    """Three nodes send 6 x 63 bytes a round; reports are up to 0.2 s old, in which two rounds of 0.11 s end."""
    engine = {"name": "processes", "trainer": "sequential", "pace": True}
    run = play(tmp_path, CRASH, engine=engine, stop={"bytes": 5_000})
    totals = counted(run)
    assert 5_000 <= totals["bytes_sent"] < 20_000
    assert totals["exact"]
    check_sums(totals)
    assert run.metrics["round"].max() >= 5_000 // (6 * 63) - 1
    total_s = run.metrics.filter(pl.col("node") >= 0).sort("time_s")
    assert total_s["network_bytes"].to_list()[-1] <= totals["bytes_sent"]


def test_killed_process_keeps_its_last_report_and_continues_from_it(tmp_path: Path) -> None:
    """Node 2 kills itself after 9 rounds, with a last report, and comes back: its counters go on although its only rows
    are those of round 0 and of the end."""
    run = play(
        tmp_path,
        CRASH,
        faults=[{"name": "crash", "nodes": [2], "at_round": 9, "restart_after_s": 0.3}],
        evaluation={"every_rounds": 1000},
        engine={"name": "processes", "trainer": "sequential", "pace": True},
        stop={"rounds": 40},
    )
    totals = counted(run)
    rows = run.metrics.filter(node=2).sort("time_s")
    rounds_again = 40 - int(
        run.events.filter(event="returned")["detail"][0].split(" from round ")[1].split()[0]
    )
    assert rows["messages_sent"].to_list()[-1] >= 2 * 9 + 2 * rounds_again
    assert (
        totals["messages_sent"]
        == run.metrics.filter(pl.col("node") >= 0).group_by("node").last()["messages_sent"].sum()
    )
    assert not totals["exact"]
    assert 0 <= totals["report_age_s"] < 5
    assert run.summary["sent"].startswith("at least ")
    [death] = run.events.filter(event="lost").to_dicts()
    assert 0 < death["network_bytes"] <= totals["bytes_sent"]


# --- time away


def test_time_away_is_not_idle(tmp_path: Path) -> None:
    """Node 2 is present for 3.05 s and, from 6.05 s to the end at 11.87 s, for 5.82 s. It waits 0.01 s (the latency) in each
    of the 27 rounds before, in none of its first two rounds back (the others' messages have arrived), 0.02 s in the
    third, and 0.01 s in each of the 50 rounds after: 0.79 of 8.87 s."""
    faults = [{"name": "crash", "nodes": [2], "at_s": 3.05, "restart_after_s": 3}]
    run = play(tmp_path, CRASH, faults=faults)
    rows = run.metrics.filter(node=2).sort("time_s")
    back = rows.filter(pl.col("time_s") > 6.05)
    assert back["time_s"].to_list()[:3] == pytest.approx([6.15, 6.25, 6.37])
    assert back["idle_share"].to_list()[:3] == pytest.approx([0, 0, 0.02 / 0.12], abs=1e-9)
    assert back["time_s"].to_list()[-1] == pytest.approx(11.87)
    right = (27 * 0.01 + 0.02 + 50 * 0.01) / (3.05 + 5.82)
    assert right == pytest.approx(0.089, abs=5e-4)

    # Nodes 0 and 1 are never away: all of their time counts, as their rows say.
    others = []
    for rank in (0, 1):
        of_node = run.metrics.filter(node=rank).sort("time_s")
        seconds = np.diff(of_node["time_s"].to_numpy())
        others.append(float((seconds * of_node["idle_share"].to_numpy()[1:]).sum() / seconds.sum()))
    final = final_summary(run).metrics["idle_share"]
    assert final.mean == pytest.approx(np.mean([right, *others]))


def test_time_before_joining_and_in_a_freeze_is_not_idle(tmp_path: Path) -> None:
    """A node that joins at 2 s, and one that is frozen for 2 s, wait 0.01 s in a round of 0.11 s, like the others, apart from
    the first rounds after."""
    faults = [
        {"name": "join", "nodes": [1], "at_s": 2.0},
        {"name": "freeze", "nodes": [2], "at_s": 5.0, "for_s": 2.0},
    ]
    run = play(tmp_path, CRASH, faults=faults)
    for rank, until_s in ((1, 2.0), (2, 7.0)):
        first = (
            run.metrics.filter(pl.col("node") == rank, pl.col("time_s") > until_s)
            .sort("time_s")
            .row(0, named=True)
        )
        assert first["idle_share"] < 0.6, rank
        assert first["time_s"] - until_s < 0.7


# --- a clock that ends


def test_rate_too_slow_for_virtual_time_is_refused(tmp_path: Path) -> None:
    """A message of 5 floats needs at least 20 bytes / 4.6e9 s, or 3.5e-14 Mbit/s."""
    network = {"name": "uniform", "bandwidth_mbps": 1e-300}
    with pytest.raises(
        BadInput, match=r"^network.bandwidth_mbps: a link of 1e-300 Mbit/s.*at least 3.47e-14$"
    ):
        play(tmp_path, CRASH, network=network)
    least = 20 * 8 / 1e6 / (2**62 / 1e9)
    assert least == pytest.approx(3.47e-14, rel=1e-3)


def test_rate_that_becomes_too_slow_ends_the_run_with_a_line(tmp_path: Path) -> None:
    base = {"name": "uniform", "bandwidth_mbps": 1e-5}
    network = {"name": "varying", "base": base, "rate_changes": [{"at_s": 0.05, "factor": 1e-9}]}
    with pytest.raises(RunFailed, match=r"nothing happens in 4.6e.09 s.*network: a link of 1e-14 Mbit/s"):
        play(tmp_path, CRASH, network=network, gather={})


def test_traffic_adds_all_counters() -> None:
    one, other = Traffic(*range(11)), Traffic(*range(100, 111))
    one.add(other)
    assert one == Traffic(*range(100, 122, 2))
