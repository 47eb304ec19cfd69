"""SWIFT against a NumPy model, with stored and with fresh models, and with links slower than steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from delays import FEATURES, Array, Wires, World, experiment, play

from gossamer import BadInput, Experiment
from gossamer.messages import wire_bytes

SECONDS = [[0.1013, 0.2711], [0.2087], [0.4409, 0.1201, 0.2593], [0.1499]]
LATENCY = [[0.0517 + 0.0371 * ((3 * i + 5 * j) % 7) + 0.0013 * i for j in range(4)] for i in range(4)]
EDGES = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]  # a ring with a chord: degrees 3, 2, 3, 2
CCS = np.array(
    [[1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 4, 1 / 2, 1 / 4, 0], [1 / 4] * 4, [1 / 4, 0, 1 / 4, 1 / 2]]
)
UNIFORM = np.array([[1 / 4] * 4, [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4, [1 / 3, 0, 1 / 3, 1 / 3]])
GIVEN = np.array([[0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.4, 0], [0.05, 0.7, 0.05, 0.2], [0.5, 0, 0.3, 0.2]])
"""Some neighbours have a large weight: doubled, it would exceed 1."""
SIZE = wire_bytes(("model",), torch.zeros(FEATURES))


def model(
    described: Experiment,
    until: float,
    *,
    W: Array = CCS,
    every: int = 1,
    fresh: bool = False,
    boost: bool = False,
    capped: bool = True,
    rate: float = np.inf,
    steps: int = 1,
) -> tuple[Array, list[tuple[int, int]], list[float]]:
    """Bornstein et al. (2023) as a network of processes: the models, (source, to) of all messages, and the mean age of
    the stored models that each node averaged with last."""
    world, sent = World(described), []
    wires = Wires(world, [rate] * 4)
    last = [{j: world.X[i].copy() for j in range(4) if j != i and W[i, j]} for i in range(4)]
    came: list[dict[int, Array]] = [{} for _ in range(4)]
    arrived: list[dict[int, float]] = [{} for _ in range(4)]
    since = [dict.fromkeys(stored, 0.0) for stored in last]
    ages = [0.0] * 4
    clocks = [count() for _ in range(4)]
    before: dict[tuple[int, int], float] = {}

    def deliver(i: int, j: int, x: Array, sent_at: float) -> None:
        came[j][i], arrived[j][i] = x, sent_at

    def node(i: int) -> Iterator[float]:
        for r in count():
            x = world.X[i].copy()
            free = [j for j in last[i] if before.get((i, j), 0.0) <= world.now]
            for j in free:
                sent.append((i, j))
                message = wires.send(i, j, SIZE, LATENCY[i][j], partial(deliver, i, j, x, world.now))
                before[i, j] = message.start
            yield sum(SECONDS[i][next(clocks[i]) % len(SECONDS[i])] for _ in range(steps))
            step = world.learners[i].descend(x, steps) - x
            if (r + 1) % every == 0:
                last[i] |= came[i]
                since[i] |= arrived[i]
                ages[i] = world.now - float(np.mean(list(since[i].values())))
                used = came[i] if fresh else last[i]
                w = {j: W[i, j] for j in used}
                if boost:
                    w = {j: weight * (1 + len(last[i])) / (1 + len(w)) for j, weight in w.items()}
                    own, minimum = 1 - sum(w.values()), 1 / (1 + len(w))
                    if capped and own < minimum:
                        w = {j: weight * (1 - minimum) / (1 - own) for j, weight in w.items()}
                x = (1 - sum(w.values())) * x + sum(w[j] * used[j] for j in w)
                came[i] = {}
            world.X[i] = x + step

    for i in range(4):
        world.start(node(i))
    return world.run(until), sent, ages


def ring_with_chord(path: Path) -> dict[str, str]:
    path.write_text("".join(f"{i} {j}\n" for i, j in EDGES))
    return {"name": "edge-list", "path": str(path)}


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        ({"average_every": 3, "local_steps": 2}, {"every": 3, "steps": 2}),
        ({"memory": "fresh"}, {"fresh": True}),
        ({"memory": "fresh", "boost": True, "average_every": 2}, {"fresh": True, "boost": True, "every": 2}),
        ({"weights": "topology"}, {"W": UNIFORM}),
    ],
    ids=str,
)
def test_models_match_numpy(tmp_path: Path, options: dict[str, Any], reference: dict[str, Any]) -> None:
    until = 4.3
    described = experiment(
        {"name": "swift", **options},
        SECONDS,
        LATENCY,
        topology={**ring_with_chord(tmp_path / "edges.txt"), "weights": "uniform"},
        stop={"time_s": until},
    )
    run, sent = play(described, tmp_path)
    expected, expected_sent, ages = model(described, until, **reference)
    assert run.parameters is not None
    np.testing.assert_allclose(run.parameters.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert [(source, to) for source, _, to, _ in sent if source == 0] == [
        pair for pair in expected_sent if pair[0] == 0
    ]
    rows = run.metrics.filter(run.metrics["node"] >= 0).sort("node")
    assert ("mixed_staleness_s" in rows.columns) == (options.get("memory") != "fresh")
    if "mixed_staleness_s" in rows.columns:
        np.testing.assert_allclose(rows["mixed_staleness_s"], ages, rtol=1e-6)


def test_boosted_weights_leave_a_share_for_the_own_model(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "weights.txt", GIVEN)
    weights = {"name": "given", "path": str(tmp_path / "weights.txt")}
    described = experiment(
        {"name": "swift", "memory": "fresh", "boost": True, "weights": "topology"},
        SECONDS,
        LATENCY,
        topology={**ring_with_chord(tmp_path / "edges.txt"), "weights": weights},
        stop={"time_s": 4.3},
    )
    run, _ = play(described, tmp_path)
    expected = model(described, 4.3, W=GIVEN, fresh=True, boost=True)[0]
    assert run.parameters is not None
    np.testing.assert_allclose(run.parameters.numpy(), expected, rtol=1e-5, atol=1e-5)
    other = model(described, 4.3, W=GIVEN, fresh=True, boost=True, capped=False)[0]
    assert np.abs(expected - other).max() > 1e-3


def test_reference_variants_differ() -> None:
    """Otherwise agreement with them would mean little."""
    described = experiment("swift", SECONDS, LATENCY, stop={"time_s": 4.3})
    ends = [
        model(described, 4.3, **options)[0]
        for options in (
            {},
            {"fresh": True},
            {"fresh": True, "boost": True},
            {"W": UNIFORM},
            {"every": 2},
            {"every": 3},
            {"rate": 400.0},
        )
    ]
    for i, one in enumerate(ends):
        for other in ends[:i]:
            assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("rate", [2000.0, 400.0])
def test_neighbours_with_an_unsent_model_are_skipped(tmp_path: Path, rate: float) -> None:
    described = experiment(
        "swift",
        SECONDS,
        LATENCY,
        uplink=[rate] * 4,
        topology=ring_with_chord(tmp_path / "edges.txt"),
        stop={"time_s": 5.3},
    )
    run, sent = play(described, tmp_path)
    expected, expected_sent, _ = model(described, 5.3, rate=rate)
    assert run.parameters is not None
    np.testing.assert_allclose(run.parameters.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert sorted((source, to) for source, _, to, _ in sent) == sorted(expected_sent)
    # At most what the uplink carries, plus one message per waiting neighbour.
    for i, degree in enumerate((3, 2, 3, 2)):
        mine = [pair for pair in expected_sent if pair[0] == i]
        assert len(mine) <= 5.3 * rate / SIZE + degree + 1


@pytest.mark.parametrize(
    ("algorithm", "topology", "named"),
    [
        ({"name": "swift"}, "exponential", 'algorithm.weights: "ccs" on a directed graph'),
        ({"name": "swift", "boost": True}, "ring", 'algorithm.boost: true with memory "stored"'),
        (
            {"name": "swift"},
            {"name": "random-regular", "degree": 2, "every_rounds": 1},
            "topology: one that changes",
        ),
        ({"name": "swift", "average_every": 0}, "ring", "algorithm.average_every"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, algorithm: Any, topology: Any, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        play(experiment(algorithm, SECONDS, LATENCY, topology=topology, stop={"rounds": 1}), tmp_path)


def test_directed_graph_with_topology_weights_is_accepted(tmp_path: Path) -> None:
    algorithm = {"name": "swift", "weights": "topology"}
    run, sent = play(
        experiment(algorithm, SECONDS, LATENCY, topology="exponential", stop={"rounds": 3}), tmp_path
    )
    assert run.status == "done"
    assert {(source, to) for source, _, to, _ in sent} == {(i, (i + h) % 4) for i in range(4) for h in (1, 2)}
