"""The baselines of DivShare as in its authors' code, against NumPy models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from delays import FEATURES, Array, Sent, Wires, World, experiment, play

from gossamer import BadInput, Experiment
from gossamer.messages import wire_bytes

SECONDS = [[1.013, 1.711], [2.087], [1.409, 1.201, 2.593], [1.499], [0.8007]]
LATENCY = [[0.0517 + 0.0371 * ((3 * i + 5 * j) % 7) + 0.0013 * i for j in range(5)] for i in range(5)]
RATES = [900.0, 350.0, 5000.0, 160.0, 120.0]
"""Bytes per second: a model of about 120 bytes takes a second on the last uplink."""


def model(
    described: Experiment, sent: Sent, until: float, rates: list[float] = RATES
) -> tuple[Array, Counter[str], list[list[float]], list[int]]:
    """Rounds of steps, sending the model to the drawn recipients, and averaging with the newest model of each sender.
    A question is answered with the model after the last steps.

    Returns:
        The models; event counts; by node, the ages of the models it averaged with; and its superseded messages.
    """
    world, seen = World(described), Counter[str]()
    ages: list[list[float]] = [[] for _ in SECONDS]
    came, superseded = ([0] * len(SECONDS) for _ in range(2))
    wires = Wires(world, rates)
    latest = [x.copy() for x in world.X]
    heard: list[dict[int, tuple[Array, float]]] = [{} for _ in SECONDS]
    clocks = [count() for _ in SECONDS]
    chosen: dict[tuple[int, int], list[int]] = {}
    for source, tag, to, r in sent:
        if "answer" not in tag:
            chosen.setdefault((source, r), []).append(to)
    asks = any("question" in tag for _, tag, _, _ in sent)

    def send(i: int, j: int, tag: tuple[str | int, ...]) -> None:
        sent = latest[i], world.now
        wires.send(i, j, sizes[tag], LATENCY[i][j], lambda: deliver(i, j, tag, sent))

    def deliver(i: int, j: int, tag: tuple[str | int, ...], sent: tuple[Array, float]) -> None:
        came[j] += 1
        heard[j][i] = sent
        if tag == ("model", "question"):
            seen["answered"] += 1
            send(j, i, ("model", "answer"))

    def node(i: int) -> Iterator[float]:
        for r in count():
            yield SECONDS[i][next(clocks[i]) % len(SECONDS[i])]
            latest[i] = world.learners[i].descend(world.X[i])
            for j in chosen.get((i, r), []):
                send(i, j, ("model", "question") if asks else ("fragment", 0))
            seen["mixed"] += len(heard[i])
            ages[i] += [world.now - sent_at for _, sent_at in heard[i].values()]
            superseded[i] += came[i] - len(heard[i])
            world.X[i] = np.mean([latest[i], *(values for values, _ in heard[i].values())], axis=0)
            heard[i].clear()
            came[i] = 0

    tags = [("model", "question"), ("model", "answer"), ("fragment", 0)]
    sizes = {tag: wire_bytes(tag, torch.zeros(FEATURES)) for tag in tags}
    for i in range(len(SECONDS)):
        world.start(node(i))
    return world.run(until), seen, ages, superseded


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "ad-psgd-artifact", "degree": 5}, {"name": "swift-artifact"}],
    ids=str,
)
def test_models_match_numpy(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    described = experiment(algorithm, SECONDS, LATENCY, RATES, stop={"time_s": 17.3})
    run, sent = play(described, tmp_path)
    expected, seen, ages, superseded = model(described, sent, 17.3)
    assert run.parameters is not None
    np.testing.assert_allclose(run.parameters.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert seen["mixed"] > 20
    assert (seen["answered"] > 20) == (algorithm["name"] == "ad-psgd-artifact")
    rows = run.metrics.filter(run.metrics["node"] >= 0).sort("node")
    np.testing.assert_allclose(rows["staleness_s"], [np.mean(row) for row in ages], rtol=1e-6)
    np.testing.assert_allclose(rows["staleness_max_s"], list(map(max, ages)), rtol=1e-6)
    assert rows["messages_superseded"].to_list() == superseded
    assert sum(superseded) > 0
    other, *_ = model(described, sent, 17.3, [1e9] * 5)
    assert np.abs(expected - other).max() > 1e-3


def test_questions_are_half_the_degree_and_answered_once(tmp_path: Path) -> None:
    """Half the degree are questions, and each question is answered once."""
    algorithm = {"name": "ad-psgd-artifact", "degree": 7}
    _, sent = play(experiment(algorithm, SECONDS, LATENCY, stop={"time_s": 20.0}), tmp_path)
    questions = Counter((i, j) for i, tag, j, _ in sent if tag[1] == "question")
    answers = Counter((j, i) for i, tag, j, _ in sent if tag[1] == "answer")
    assert {Counter((i, r) for i, tag, _, r in sent if tag[1] == "question")[i, 0] for i in range(5)} == {3}
    assert answers <= questions
    assert 0 <= sum(questions.values()) - sum(answers.values()) < 15  # the last answers are in flight
    assert len(questions) == 20


def test_received_share_is_relative_to_the_messages_sent(tmp_path: Path) -> None:
    """An odd degree sends as the even one below it: two questions and, on average, two answers a round."""
    algorithm = {"name": "ad-psgd-artifact", "degree": 5}
    described = experiment(
        algorithm, [[1.0]] * 5, [[0.1] * 5] * 5, evaluation={"every_rounds": 1}, stop={"rounds": 6}
    )
    run, sent = play(described, tmp_path)
    rows = run.metrics.filter(run.metrics["node"] >= 0, run.metrics["round"] > 1)
    assert len([1 for _, tag, _, r in sent if tag[1] == "question" and r == 2]) == 5 * 2
    heard = 4 * rows["received_share"]
    np.testing.assert_allclose(heard, heard.round(), atol=1e-9)
    assert {2, 3} <= {round(number) for number in heard} <= {0, 1, 2, 3, 4}


def test_full_backlog_makes_a_node_wait(tmp_path: Path) -> None:
    rounds = {}
    for backlog in (1, None):
        algorithm = {"name": "ad-psgd-artifact", "degree": 6, "backlog": backlog}
        run, _ = play(experiment(algorithm, SECONDS, LATENCY, RATES, stop={"time_s": 40.0}), tmp_path)
        rounds[backlog] = run.metrics.filter(node=4)["round"].max()
    assert rounds[None] == 49
    assert rounds[1] < 20


@pytest.mark.parametrize(
    ("algorithm", "nodes", "named"),
    [
        ({"name": "ad-psgd-artifact", "degree": 1}, 5, r"algorithm\.degree"),
        ({"name": "swift-artifact", "recipients": 5}, 5, r"algorithm\.recipients: 5 for 5 nodes"),
        ({"name": "swift-artifact", "fraction": 0.5}, 5, r"algorithm\.fraction"),
        ({"name": "ad-psgd-artifact"}, 1, r"nodes: 1 for ad-psgd-artifact; accepted: at least 2"),
    ],
)
def test_invalid_settings_are_refused(
    tmp_path: Path, algorithm: dict[str, Any], nodes: int, named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        play(experiment(algorithm, SECONDS[:nodes], LATENCY, stop={"rounds": 1}), tmp_path)
