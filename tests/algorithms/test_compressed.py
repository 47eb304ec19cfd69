"""Algorithms with compressed differences, against NumPy with its own top-k, on fixed and changing graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from timing import Data, least_squares, play, wide

import gossamer
from gossamer import BadInput, Experiment, NodeWrapper
from gossamer.messages.tags import Coded, Message
from gossamer.runtime.setup import prepare
from gossamer.topology.mixing_matrix import sparse_matrix
from scenario import play as script

Array = NDArray[np.float64]
NODES, LR, FRACTION, GAMMA = 5, 0.2, 0.34, 0.6
RING = {"name": "ring"}
CHANGING = {"name": "random-regular", "degree": 2, "every_rounds": 2}
TOP = {"name": "top-k", "fraction": FRACTION}


def described(
    algorithm: str, rounds: int, codec: Any = TOP, topology: Any = RING, lr: float = LR, **more: Any
) -> Experiment:
    name = {"name": algorithm, "gamma": GAMMA} if isinstance(algorithm, str) else algorithm
    optimizer = {"name": "sgd", "lr": lr}
    raw = least_squares(
        NODES,
        rounds,
        algorithm=name,
        optimizer=optimizer,
        codec=codec,
        topology=topology,
        initial="independent",
    )
    return raw if not more else Experiment.of({**raw.model_dump(mode="json"), **more})


def weights(experiment: Experiment) -> Callable[[int], Array]:
    topology = prepare(experiment).topology
    return lambda r: sparse_matrix(topology, r).toarray()


def top(D: Array) -> Array:
    """The largest third of every row, zeros elsewhere."""
    k = max(1, round(FRACTION * D.shape[1]))
    kept = np.zeros_like(D)
    for row, out in zip(D, kept, strict=True):
        where = np.argsort(-np.abs(row))[:k]
        out[where] = row[where]
    return kept


def gradients(data: Data, X: Array) -> Array:
    return np.stack([data.gradient(rank, x) for rank, x in enumerate(X)])


def choco(data: Data, rounds: int, W: Callable[[int], Array]) -> Array:
    X, H = data.initial, np.zeros_like(data.initial)
    for r in range(rounds):
        X = X - LR * gradients(data, X)
        H = H + top(X - H)
        X = X + GAMMA * (W(r) @ H - H)
    return X


def deepsqueeze(data: Data, rounds: int, W: Callable[[int], Array]) -> Array:
    X, E = data.initial, np.zeros_like(data.initial)
    for r in range(rounds):
        X = X - LR * gradients(data, X)
        V = X + E
        C = top(V)
        E = V - C
        X = X + GAMMA * (W(r) @ C - C)
    return X


def beer(data: Data, rounds: int, W: Callable[[int], Array]) -> Array:
    """Algorithm 1 with one row per node; a round mixes the replicas of the round before."""
    X, identity = data.initial, np.eye(NODES)
    H = G = np.zeros_like(X)
    V = gradient = gradients(data, X)
    for r in range(rounds):
        before = W(max(r - 1, 0)) - identity
        X = X + GAMMA * before @ H - LR * V
        H = H + top(X - H)
        new = gradients(data, X)
        V = V + GAMMA * before @ G + new - gradient
        gradient = new
        G = G + top(V - G)
    return X


@pytest.mark.parametrize("topology", [RING, CHANGING], ids=["ring", "changing"])
@pytest.mark.parametrize("reference", [choco, deepsqueeze, beer])
def test_models_match_numpy(reference: Any, topology: dict[str, Any], tmp_path: Path) -> None:
    name = {"choco": "choco-sgd"}.get(reference.__name__, reference.__name__)
    experiment = described(name, 7, topology=topology)
    run = play(experiment, tmp_path)
    assert run.parameters is not None
    expected = reference(Data(experiment), 7, weights(experiment))
    np.testing.assert_allclose(wide(run.parameters), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("codec", [None, "identity"])
def test_choco_and_deepsqueeze_without_compression_are_d_psgd(codec: Any, tmp_path: Path) -> None:
    plain = play(described({"name": "d-psgd"}, 6, codec=None), tmp_path / "plain")  # type: ignore[arg-type]
    for name in ("choco-sgd", "deepsqueeze"):
        run = play(described({"name": name, "gamma": 1.0}, 6, codec=codec), tmp_path / name)  # type: ignore[arg-type]
        torch.testing.assert_close(run.parameters, plain.parameters, rtol=1e-4, atol=1e-5)


DIFFERENCES: list[Any] = [
    TOP,
    {"name": "sign"},
    {"name": "stc", "fraction": 0.5},
    {"name": "low-rank"},
    {"name": "qsgd", "levels": 8, "contract": True},
    {"name": "random-k", "fraction": 0.5},
    {"name": "wavelet", "fraction": 0.5, "levels": 1},
    [TOP, {"name": "quantize", "bits": 6}, "entropy"],
]


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(codec, marks=[] if number == 1 else pytest.mark.slow)
        for number, codec in enumerate(DIFFERENCES)
    ],
    ids=str,
)
def test_choco_reaches_consensus_despite_lossy_messages(codec: Any, tmp_path: Path) -> None:
    """With a learning rate of almost zero, CHOCO-SGD brings all nodes to their initial average."""
    algorithm: Any = {"name": "choco-sgd", "gamma": 0.2}
    experiment = described(algorithm, 150, codec=codec, lr=1e-12)
    run = play(experiment, tmp_path)
    assert run.parameters is not None
    start = Data(experiment).initial
    X = wide(run.parameters)
    np.testing.assert_allclose(X.mean(0), start.mean(0), atol=1e-4)
    assert np.abs(X - X.mean(0)).max() < 0.05 * np.abs(start - start.mean(0)).max()


@pytest.mark.slow
def test_beer_reaches_the_optimum_where_choco_stalls(tmp_path: Path) -> None:
    distances = {}
    for name, gamma in (("beer", 0.3), ("choco-sgd", 0.6)):
        experiment = described({"name": name, "gamma": gamma}, 200, lr=0.15)  # type: ignore[arg-type]
        run = play(experiment, tmp_path / name)
        assert run.parameters is not None
        distances[name] = float(np.abs(wide(run.parameters) - Data(experiment).optimum).max())
    assert distances["beer"] < 2e-3 < 1e-2 < distances["choco-sgd"]


class Wire(NodeWrapper):
    """Records whether each message was encoded."""

    def incoming(self, node: Any, message: Message) -> Message:
        coded = isinstance(message.payload.parameters, Coded)
        SEEN.append((node.round, message.source, node.rank, coded))
        return message


SEEN: list[tuple[int, int, int, bool]] = []


def test_new_neighbours_receive_the_whole_replica(tmp_path: Path) -> None:
    SEEN.clear()
    experiment = described("choco-sgd", 6, topology=CHANGING, wrappers=[f"{__name__}:Wire"])
    play(experiment, tmp_path)
    topology = prepare(experiment).topology
    for r, source, to, coded in SEEN:
        before = topology.graph(max(r - 1, 0)).neighbors(to, "in")
        assert coded == (source in before)
    assert {coded for _, _, _, coded in SEEN} == {True, False}


@pytest.mark.parametrize("algorithm", ["choco-sgd", "deepsqueeze", "beer"])
def test_resumed_runs_and_processes_keep_the_bits(algorithm: str, tmp_path: Path) -> None:
    codec = [{"name": "top-k", "fraction": 0.5}, {"name": "quantize", "bits": 5}]
    whole = gossamer.run(described(algorithm, 6, codec=codec), tmp_path / "whole")
    cut = gossamer.run(described(algorithm, 3, codec=codec, checkpoint={"every_rounds": 3}), tmp_path / "cut")
    resumed = gossamer.resume(cut.path, ["stop.rounds=6"])
    real = gossamer.run(
        described(algorithm, 6, codec=codec, engine={"name": "processes", "trainer": "sequential"}),
        tmp_path / "real",
    )
    for run in (resumed, real):
        assert torch.equal(run.parameters, whole.parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["sign", "stc", "low-rank"])
def test_codecs_for_differences_are_refused_for_whole_models(codec: str, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=f"codec: {codec}, which encodes only differences.*beer, choco-sgd, deepsqueeze"
    ):
        gossamer.run(described({"name": "d-psgd"}, 2, codec=codec), tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["choco-sgd", "beer"])
@pytest.mark.parametrize("gather", [{"timeout_s": 5.0}, {"lost_peer": "skip"}], ids=str)
def test_gather_that_may_end_early_is_refused(algorithm: str, gather: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"gather: {algorithm} needs every message"):
        gossamer.run(described(algorithm, 2, gather=gather), tmp_path)


@pytest.mark.parametrize("algorithm", ["choco-sgd", "deepsqueeze", "beer"])
def test_weights_must_be_doubly_stochastic(algorithm: str, tmp_path: Path) -> None:
    topology = {"name": "star", "weights": "uniform"}
    with pytest.raises(BadInput, match=rf"topology\.weights: not doubly stochastic .* for {algorithm}"):
        gossamer.run(described(algorithm, 2, topology=topology), tmp_path)


@pytest.mark.parametrize(
    ("codec", "problem"),
    [
        ({"name": "qsgd"}, "codec: qsgd, whose error can exceed the difference itself.*contract: true"),
        (
            {"name": "quantize", "bits": 2},
            "codec: quantize, whose error can exceed.*rounding: nearest, or blocks of at most 8 values",
        ),
    ],
)
def test_non_contracting_codec_is_refused(codec: Any, problem: str, tmp_path: Path) -> None:
    task = {"name": "least-squares", "features": 9, "samples": 4 * NODES}
    with pytest.raises(BadInput, match=problem):
        gossamer.run(described("choco-sgd", 2, codec=codec, task=task), tmp_path)


def test_compress_requires_an_algorithm_that_sends_differences(tmp_path: Path) -> None:
    async def body(node: Any) -> None:
        with pytest.raises(ValueError, match=r"node\.compress: accepted with sends_differences = True"):
            node.compress(node.parameters)

    script(tmp_path, body, 2, codec="wavelet")


def test_choco_refuses_message_loss(tmp_path: Path) -> None:
    lossy = {"network": {"name": "uniform", "loss": 0.1}, "gather": {"timeout_s": 1.0}}
    with pytest.raises(BadInput, match="choco-sgd tolerates no message loss"):
        gossamer.run(described("choco-sgd", 2, network=lossy["network"]), tmp_path)
    assert gossamer.run(described("deepsqueeze", 2, **lossy), tmp_path).status == "done"
