"""Every algorithm against its NumPy reference, by both trainers and engines; engines agree to the bit (law 4)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from numpy.typing import NDArray
from reference import Learner
from user_algorithms import read_ledger

import gossamer
from gossamer import Experiment, Run
from gossamer.runtime.setup import prepare

NODES = 4
ROUNDS = 12
EDGES = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]  # degrees 3, 2, 3, 2: weights differ by rule
FRACTIONS = [0.4, 0.3, 0.2, 0.1]
GIVEN = np.array([[0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.6, 0.1], [0.6, 0.0, 0.1, 0.3]])
A = reference.adjacency(NODES, EDGES)
PATH = [(2, 0), (0, 1), (1, 3)]
STAR = [(0, 1), (0, 2), (0, 3)]  # the breadth-first tree of EDGES from 0
ARCS = [
    (0, 1),
    (1, 2),
    (2, 3),
    (3, 0),
    (0, 2),
    (2, 1),
    (2, 0),
]  # out-degrees 2, 1, 3, 1; in-degrees 2, 2, 2, 1


@dataclass
class World:
    """The inputs of a reference: data and initial models of an experiment, and the messages that were sent."""

    experiment: Experiment
    sent: list[tuple[list[str | int], int, int]]

    @cached_property
    def _setup(self) -> Any:
        return prepare(self.experiment)

    @property
    def learners(self) -> list[Learner]:
        inputs, targets = (tensor.double().numpy() for tensor in self._setup.task.train)
        optimizer = self.experiment.optimizer
        return [
            Learner(inputs[part], targets[part, 0], optimizer.lr, optimizer.momentum)
            for part in self._setup.parts
        ]

    @property
    def initial(self) -> NDArray[np.float64]:
        return np.stack([self._setup.initial(rank).parameters.double().numpy() for rank in range(NODES)])

    @property
    def samples(self) -> list[int]:
        return [len(part) for part in self._setup.parts]

    def pairs(self, r: int, *words: str) -> list[tuple[int, int]]:
        """(source, to) of the messages tagged (*words, r)."""
        return [(source, to) for tag, source, to in self.sent if tag == [*words, r]]


@dataclass
class Case:
    """An experiment and its reference."""

    name: str
    algorithm: dict[str, Any]
    expected: Callable[[World], NDArray[np.float64]]
    settings: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, Any] | None = None
    """Options of the engine ``processes``; None skips it (starting it takes seconds)."""

    def __str__(self) -> str:
        return self.name


def mixing(W: Callable[[int], NDArray[np.float64]], **options: Any) -> Callable[[World], NDArray[np.float64]]:
    return lambda world: reference.d_psgd(world.learners, world.initial, ROUNDS, W, **options)


def federated(
    steps: int = 1, server: int = 0, by_data: bool = True
) -> Callable[[World], NDArray[np.float64]]:
    def expected(world: World) -> NDArray[np.float64]:
        return reference.fedavg(
            world.learners,
            world.initial,
            ROUNDS,
            lambda r: [to for _, to in world.pairs(r, "model")],
            steps,
            server,
            by_data,
        )

    return expected


def spread(steps: int = 1) -> Callable[[World], NDArray[np.float64]]:
    return lambda world: reference.epidemic(world.learners, world.initial, ROUNDS, world.pairs, steps)


def matrices(
    recursion: Callable[..., NDArray[np.float64]], *matrix: Any, **options: Any
) -> Callable[[World], NDArray[np.float64]]:
    return lambda world: recursion(world.learners, world.initial, ROUNDS, *matrix, **options)


def normed(x: NDArray[np.float64], anchor: NDArray[np.float64]) -> NDArray[np.float64]:
    """The gradient of 0.15 ||x - anchor|| for a model of one tensor; 0 at the anchor."""
    away = x - anchor
    return 0.15 * away / max(float(np.linalg.norm(away)), 1e-30)


MH = reference.metropolis_hastings(A)
UNIFORM = reference.uniform(A)
MOMENTUM = {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.8}}
THREE_CLIENTS = {"partition": {"name": "sizes", "fractions": [0.6, 0.3, 0.1]}}
ONE_HOLDER = {"partition": "iid"}


def topology(path: str = "edges.txt", **options: Any) -> dict[str, Any]:
    return {"topology": {"name": "edge-list", "path": path, **options}}


CASES = [
    Case("d-psgd", {"name": "d-psgd"}, mixing(lambda r: MH), processes={}),
    Case(
        "d-psgd-uniform-steps-momentum",
        {"name": "d-psgd", "local_steps": 3},
        mixing(lambda r: UNIFORM, steps=3),
        {**topology(weights="uniform"), **MOMENTUM},
    ),
    Case(
        "d-psgd-given",
        {"name": "d-psgd", "local_steps": 2},
        mixing(lambda r: GIVEN, steps=2),
        topology(weights={"name": "given", "path": "weights.txt"}),
    ),
    Case(
        "d-psgd-data-size",
        {"name": "d-psgd"},
        lambda world: mixing(lambda r: reference.data_size(A, world.samples))(world),
        topology(weights="data-size"),
    ),
    Case(
        "d-psgd-reset",
        {"name": "d-psgd", "local_steps": 3},
        mixing(lambda r: MH, steps=3, reset=True),
        {"optimizer": {**MOMENTUM["optimizer"], "reset_every_round": True}},
    ),
    Case(
        "d-psgd-one-peer",
        {"name": "d-psgd"},
        mixing(lambda r: reference.one_peer_exponential(NODES, r)),
        {"topology": "one-peer-exponential"},
    ),
    Case("d-psgd-overlap", {"name": "d-psgd", "overlap": True}, mixing(lambda r: MH, overlap=True)),
    Case(
        "d-psgd-overlap-steps-momentum",
        {"name": "d-psgd", "overlap": True, "local_steps": 3},
        mixing(lambda r: MH, overlap=True, steps=3),
        MOMENTUM,
        processes={"train_at_once": 1},
    ),
    Case(
        "topology-aware",
        {"name": "topology-aware", "local_epochs": 3},
        matrices(reference.topology_aware, UNIFORM, epochs=3),
        topology(weights="uniform"),
        processes={},
    ),
    Case(
        "topology-aware-proximal",
        {"name": "topology-aware", "proximal": 0.3},
        matrices(reference.topology_aware, UNIFORM, pull=lambda x, a: 0.3 * (x - a)),
        topology(weights="uniform"),
    ),
    Case(
        "topology-aware-norm-sequential",
        {"name": "topology-aware", "proximal": 0.3, "distance": "norm", "order": "sequential"},
        matrices(reference.topology_aware, UNIFORM, pull=normed, sequential=True),
        topology(weights="uniform"),
        processes={},
    ),
    Case(
        "topology-aware-participation",
        {"name": "topology-aware", "participation": 0.5, "order": "sequential"},
        lambda world: reference.topology_aware(
            world.learners,
            world.initial,
            ROUNDS,
            UNIFORM,
            mixing=lambda r: {to for word in ("trained", "mixed") for _, to in world.pairs(r, word)},
            sequential=True,
        ),
        topology(weights="uniform"),
    ),
    Case(
        "gossiped-pagerank",
        {"name": "gossiped-centrality"},
        matrices(reference.gossiped_centrality, A, "pagerank"),
        processes={},
    ),
    Case(
        "gossiped-degree",
        {"name": "gossiped-centrality", "measure": "degree", "temperature": 0.3},
        matrices(reference.gossiped_centrality, A, "degree", temperature=0.3),
    ),
    Case(
        "influence-corrected",
        {"name": "influence-corrected", "local_epochs": 2},
        matrices(reference.influence_corrected, UNIFORM, steps=2),
        topology(weights="uniform"),
        processes={},
    ),
    Case(
        "influence-corrected-most",
        {"name": "influence-corrected", "most": 1.0},
        matrices(reference.influence_corrected, UNIFORM, most=1.0),
        topology(weights="uniform"),
    ),
    Case("epidemic-oracle", {"name": "epidemic-oracle", "degree": 2}, spread(), processes={}),
    Case(
        "epidemic-oracle-steps-momentum",
        {"name": "epidemic-oracle", "degree": 3, "local_steps": 2},
        spread(2),
        MOMENTUM,
    ),
    Case("epidemic-local", {"name": "epidemic-local", "degree": 1}, spread(), processes={}),
    Case(
        "epidemic-local-steps-momentum",
        {"name": "epidemic-local", "degree": 2, "local_steps": 3},
        spread(3),
        MOMENTUM,
    ),
    Case("fedavg", {"name": "fedavg", "idle_s": 60.0}, federated(), THREE_CLIENTS),
    Case(
        "fedavg-fraction-steps-momentum",
        {"name": "fedavg", "client_fraction": 0.7, "local_steps": 3, "server": 2, "idle_s": 60.0},
        federated(3, server=2),
        {**THREE_CLIENTS, **MOMENTUM},
        processes={},
    ),
    Case(
        "fedavg-uniform",
        {"name": "fedavg", "client_fraction": 0.7, "weighting": "uniform", "idle_s": 60.0},
        federated(by_data=False),
        THREE_CLIENTS,
    ),
    Case(
        "local",
        {"name": "local", "local_steps": 2},
        lambda world: reference.alone(world.learners, world.initial, ROUNDS, range(NODES), 2),
        MOMENTUM,
        processes={},
    ),
    Case(
        "centralized",
        {"name": "centralized", "local_steps": 2},
        lambda world: reference.alone(world.learners, world.initial, ROUNDS, [0], 2),
        ONE_HOLDER,
        processes={},
    ),
    Case(
        "all-reduce",
        {"name": "all-reduce"},
        lambda world: reference.all_reduce(world.learners, world.initial, ROUNDS),
        processes={},
    ),
    Case(
        "all-reduce-steps-momentum",
        {"name": "all-reduce", "local_steps": 3},
        lambda world: reference.all_reduce(world.learners, world.initial, ROUNDS, 3),
        MOMENTUM,
    ),
    Case("d2", {"name": "d2"}, matrices(reference.d2, MH), processes={}),
    Case(
        "d2-exact-diffusion-momentum",
        {"name": "d2", "exact_diffusion": True},
        matrices(reference.d2, (MH + np.eye(NODES)) / 2),
        MOMENTUM,
    ),
    Case(
        "gradient-tracking",
        {"name": "gradient-tracking"},
        matrices(reference.gradient_tracking, MH),
        processes={},
    ),
    Case(
        "gradient-tracking-diging",
        {"name": "gradient-tracking", "variant": "diging"},
        matrices(reference.gradient_tracking, MH, step_first=False),
    ),
    Case("qg-momentum", {"name": "qg-momentum"}, matrices(reference.quasi_global, MH), processes={}),
    Case(
        "qg-momentum-nesterov",
        {"name": "qg-momentum", "beta": 0.6, "mu": 0.7, "nesterov": True},
        matrices(reference.quasi_global, MH, beta=0.6, mu=0.7, nesterov=True),
    ),
    Case(
        "sgp",
        {"name": "sgp"},
        matrices(reference.push_sum, lambda r: reference.push_weights(NODES, ARCS)),
        topology("arcs.txt", directed=True),
        processes={},
    ),
    Case(
        "sgp-steps-momentum",
        {"name": "sgp", "local_steps": 3},
        matrices(reference.push_sum, lambda r: reference.push_weights(NODES, ARCS), steps=3),
        {**topology("arcs.txt", directed=True), **MOMENTUM},
    ),
    Case(
        "sgp-one-peer",
        {"name": "sgp", "local_steps": 2},
        matrices(reference.push_sum, lambda r: reference.one_peer_exponential(NODES, r), steps=2),
        {"topology": "one-peer-exponential"},
    ),
    Case(
        "relay-sum",
        {"name": "relay-sum"},
        matrices(reference.relay_sum, reference.hops(reference.adjacency(NODES, PATH))),
        topology("path.txt"),
        processes={},
    ),
    Case(
        "relay-sum-spanning-initial-steps-momentum",
        {"name": "relay-sum", "tree": "spanning", "stand_in": "initial", "local_steps": 3},
        matrices(
            reference.relay_sum, reference.hops(reference.adjacency(NODES, STAR)), steps=3, initial=True
        ),
        MOMENTUM,
    ),
]


class Played:
    """The runs of one case, made on first use."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self._folder = case, folder
        self._runs: dict[str, Run] = {}
        for name, edges in ("edges", EDGES), ("path", PATH), ("arcs", ARCS):
            (folder / f"{name}.txt").write_text("".join(f"{i} {j}\n" for i, j in edges))
        np.savetxt(folder / "weights.txt", GIVEN)

    def experiment(self, engine: str = "sequential") -> Experiment:
        ledger = self._folder / f"ledger-{engine}"
        ledger.mkdir(exist_ok=True)
        settings: dict[str, Any] = {
            "name": self.case.name,
            "seed": 3,
            "nodes": NODES,
            "task": {"name": "least-squares", "features": 5, "samples": 60, "noise": 0.5},
            "partition": {"name": "sizes", "fractions": FRACTIONS},
            **topology(),
            "algorithm": self.case.algorithm,
            "wrappers": [{"name": "user_algorithms:Ledger", "folder": str(ledger)}],
            "optimizer": {"name": "sgd", "lr": 0.15},
            "batch_size": "full",
            "initial": "independent",
            "evaluation": {"every_rounds": 5},
            "stop": {"rounds": ROUNDS},
            "engine": {"name": "processes", "trainer": "sequential", **(self.case.processes or {})}
            if engine == "processes"
            else {"name": "simulate", "trainer": engine},
        }
        return Experiment.of({**settings, **self.case.settings}, self._folder)

    def delayed(self) -> tuple[Run, list[list[int]]]:
        """The run under delays, and (round, source, to) of the messages that arrived before their receiver's round."""
        early = self._folder / "early"
        early.mkdir()
        np.savetxt(self._folder / "latency.csv", LATENCY_MS, delimiter=",")
        experiment = self.experiment().override(
            wrappers=[{"name": "user_algorithms:Forerunners", "folder": str(early)}],
            compute={"name": "per-node", "seconds_per_step": STEPS_S},
            network={"name": "matrix", "latency_ms": str(self._folder / "latency.csv")},
        )
        run = gossamer.run(experiment, self._folder / "runs")
        lines = [line for path in early.iterdir() for line in path.read_text().splitlines()]
        return run, [json.loads(line) for line in lines]

    def parameters(self, engine: str) -> torch.Tensor:
        if engine not in self._runs:
            self._runs[engine] = gossamer.run(self.experiment(engine), self._folder / "runs")
        parameters = self._runs[engine].parameters
        assert parameters is not None
        return parameters

    def sent(self, engine: str) -> list[tuple[list[str | int], int, int]]:
        self.parameters(engine)
        return read_ledger(self._folder / f"ledger-{engine}")

    def expected(self, engine: str) -> NDArray[np.float64]:
        return self.case.expected(World(self.experiment(engine), self.sent(engine)))


@pytest.fixture(scope="module")
def all_played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    return {case.name: Played(case, tmp_path_factory.mktemp(case.name)) for case in CASES}


@pytest.mark.parametrize("trainer", ["sequential", "batched"])
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_simulation_matches_numpy(all_played: dict[str, Played], name: str, trainer: str) -> None:
    played = all_played[name]
    np.testing.assert_allclose(
        played.parameters(trainer).numpy(), played.expected(trainer), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", [case.name for case in CASES if case.processes is not None])
def test_processes_match_numpy_and_the_bits_of_the_simulator(
    all_played: dict[str, Played], name: str
) -> None:
    played = all_played[name]
    real = played.parameters("processes")
    np.testing.assert_allclose(real.numpy(), played.expected("processes"), rtol=1e-4, atol=1e-5)
    assert torch.equal(real, played.parameters("sequential"))
    assert played.sent("processes") == played.sent("sequential")


STEPS_S = [0.003, 0.008, 0.004, 0.017]
LATENCY_MS = [[0, 3, 90, 11], [41, 0, 7, 6], [5, 29, 0, 97], [120, 2, 19, 0]]
LED = {"fedavg", "local", "centralized"}
"""Algorithms in which no message precedes its receiver's round: a server starts all rounds, or no node sends."""
AHEAD = [
    case.name for case in CASES if case.processes is not None and case.algorithm["name"] not in LED
]  # each algorithm once


@pytest.mark.parametrize("name", AHEAD)
def test_delays_change_nothing(all_played: dict[str, Played], name: str) -> None:
    """The same bits if nodes differ in speed and distance, and some are a round ahead of their neighbours."""
    played = all_played[name]
    run, early = played.delayed()
    assert len(early) >= ROUNDS / 2
    assert run.parameters is not None
    np.testing.assert_allclose(run.parameters.numpy(), played.expected("sequential"), rtol=1e-4, atol=1e-5)
    assert torch.equal(run.parameters, played.parameters("sequential"))


def test_every_gathering_algorithm_has_a_case() -> None:
    """The others have references in tests/algorithms: results of those that do not wait depend on the schedule, and those
    that compress differences need codecs."""
    from gossamer.config.registry import names

    compressed = {"beer", "choco-sgd", "deepsqueeze", "powergossip"}
    waiting = {name for name, algorithm in names("algorithm").items() if algorithm.gathers} - compressed
    assert {case.algorithm["name"] for case in CASES} == waiting
    assert {case.algorithm["name"] for case in CASES if case.processes is not None} == waiting


def test_references_distinguish_the_cases(all_played: dict[str, Played]) -> None:
    """Otherwise agreement would mean little: no two results lie within ten times the tolerance."""
    ends = {name: played.expected("sequential") for name, played in all_played.items()}
    for (left, X), (right, Y) in combinations(ends.items(), 2):
        assert np.abs(X - Y).max() > 1e-3, (left, right)
