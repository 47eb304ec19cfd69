"""Push-sum: conserved weights, an unbiased average, and the timing of the overlapped form."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timing
from timing import Data, Table, Window, least_squares, play, wide

import gossamer
from gossamer import BadInput, Experiment, Node
from gossamer.algorithms import SGP

NODES = 4
ARCS = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (2, 1), (2, 0)]
TIMES = [
    [0.3137, 0.1721, 0.7753],
    [0.2311, 0.5743],
    [1.1329, 0.4157, 0.0719],
    [0.2963, 0.8381, 0.1993, 0.6121],
]
LATENCY = 0.353


def directed(out: Path) -> dict[str, Any]:
    (out / "arcs.txt").write_text("".join(f"{i} {j}\n" for i, j in ARCS))
    return {"name": "edge-list", "path": str(out / "arcs.txt"), "directed": True}


class Watched(SGP):
    """SGP in which node 0 repeatedly sums all weights."""

    async def run(self, node: Node) -> None:
        _nodes.append(node)
        if node.rank == 0:
            node.spawn(self._watch(node))
        await super().run(node)

    async def _watch(self, node: Node) -> None:
        while True:
            await node.sleep(0.02371)
            if any(other._runtime._over for other in _nodes):  # a node that has ended takes no more weights
                return
            here = [waiting.payload["weight"] for other in _nodes for waiting in other._mailbox.messages]
            sent = [payload["weight"] for _, _, _, payload in timing.sent]
            received = [message.payload["weight"] for message in timing.arrived]
            at_nodes = sum(other.state["weight"] for other in _nodes)
            _seen.append((at_nodes, sum(here), sum(sent) - sum(received)))


_nodes: list[Node] = []
_seen: list[tuple[float, float, float]] = []


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_weights_always_sum_to_the_number_of_nodes(tmp_path: Path, overlap: int) -> None:
    timing.clear()
    _nodes.clear()
    _seen.clear()
    experiment = least_squares(
        NODES,
        20,
        algorithm=Watched(overlap=overlap),
        topology=directed(tmp_path),
        wrappers=[Window()],
        compute={"name": "log-normal", "median_seconds": 0.1, "sigma": 0.7},
        network={"name": "uniform", "latency_s": 0.1, "jitter_s": 0.03},
    )
    play(experiment, tmp_path)
    at_nodes, waiting, in_flight = np.array(_seen).T
    assert len(_seen) > 100
    np.testing.assert_allclose(at_nodes + waiting + in_flight, NODES, atol=1e-9)
    # Each of the three sums varied.
    for weights in (at_nodes, waiting, in_flight):
        assert np.ptp(weights) > 0.5


def test_push_sum_reaches_the_mean_where_averaging_is_biased(tmp_path: Path) -> None:
    """Row-stochastic weights on a directed graph lead to the mean weighted by their left Perron vector."""
    ends = {}
    for name in ("sgp", "d-psgd"):
        experiment = least_squares(
            NODES, 30, algorithm=name, topology=directed(tmp_path), optimizer={"name": "sgd", "lr": 1e-30}
        )
        run = play(experiment, tmp_path)
        assert run.parameters is not None
        ends[name] = wide(run.parameters)
    mean = Data(experiment).initial.mean(axis=0)
    np.testing.assert_allclose(ends["sgp"], np.tile(mean, (NODES, 1)), atol=1e-4)
    np.testing.assert_allclose(ends["d-psgd"], np.tile(ends["d-psgd"][0], (NODES, 1)), atol=1e-4)
    assert np.abs(ends["d-psgd"][0] - mean).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"network": {"name": "uniform", "loss": 0.01}}, "network: sgp tolerates no message loss"),
        ({"gather": {"timeout_s": 0.01}}, "gather: sgp needs every message"),
    ],
)
def test_message_loss_and_timeouts_are_refused(tmp_path: Path, changes: dict[str, Any], refused: str) -> None:
    experiment = least_squares(NODES, 3, algorithm="sgp", topology=directed(tmp_path), **changes)
    with pytest.raises(BadInput, match=refused):
        play(experiment, tmp_path)


# --- the overlapped form, modelled with numerators


class Pusher:
    """One node of the model: a generator that yields a time or a set of (source, exchange) to wait for."""

    def __init__(self, rank: int, data: Data, tau: int, lr: float) -> None:
        self.rank, self.data, self.tau, self.lr = rank, data, tau, lr
        self.x, self.w = data.initial[rank], 1.0
        self.box: dict[tuple[int, int], tuple[Any, float]] = {}
        self.out = [j for i, j in ARCS if i == rank]
        self.sources = [i for i, j in ARCS if j == rank]
        self.now = 0.0

    def live(self, rounds: int, post: Any) -> Iterator[float | set[tuple[int, int]]]:
        for r in range(rounds):
            yield self.now + TIMES[self.rank][r % len(TIMES[self.rank])]
            self.x = self.x - self.lr * self.data.gradient(self.rank, self.x / self.w)
            exchange = r // self.tau
            if r % self.tau == 0:
                share = 1 / (1 + len(self.out))
                self.x, self.w = share * self.x, share * self.w
                for j in self.out:
                    post(self.now + LATENCY, j, (self.rank, exchange), (self.x, self.w))
                if exchange > 0:
                    yield {(i, exchange - 1) for i in self.sources} - self.taken
            for key in [key for key in self.box if key[1] <= exchange]:
                x, w = self.box.pop(key)
                self.x, self.w = self.x + x, self.w + w
                self.taken.add(key)

    @property
    def model(self) -> Any:
        return self.x / self.w


def overlapped(data: Data, tau: int, rounds: int, lr: float) -> Any:
    """All models at the end, without the messages that arrive after a node's last round."""
    nodes = [Pusher(rank, data, tau, lr) for rank in range(NODES)]
    agenda: list[tuple[float, int, int, Any]] = []
    order = iter(range(10**6))

    def post(time: float, to: int, key: tuple[int, int], payload: Any) -> None:
        heapq.heappush(agenda, (time, next(order), to, (key, payload)))

    waits: dict[int, set[tuple[int, int]]] = {}
    lives = []
    for node in nodes:
        node.taken = set()  # type: ignore[attr-defined]
        lives.append(node.live(rounds, post))

    def advance(rank: int) -> None:
        wanted = next(lives[rank], None)
        while isinstance(wanted, set) and wanted <= nodes[rank].box.keys():
            wanted = next(lives[rank], None)
        if isinstance(wanted, set):
            waits[rank] = wanted
        elif wanted is not None:
            heapq.heappush(agenda, (wanted, next(order), rank, None))

    for rank in range(NODES):
        advance(rank)
    while agenda:
        time, _, rank, mail = heapq.heappop(agenda)
        nodes[rank].now = time
        if mail is None:
            advance(rank)
            continue
        nodes[rank].box[mail[0]] = mail[1]
        if rank in waits and waits[rank] <= nodes[rank].box.keys():
            del waits[rank]
            advance(rank)
    return np.stack([node.model for node in nodes])


@pytest.mark.parametrize("tau", [1, 2, 3])
def test_overlapped_form_matches_an_event_model(tmp_path: Path, tau: int) -> None:
    experiment = least_squares(
        NODES,
        14,
        algorithm={"name": "sgp", "overlap": tau},
        topology=directed(tmp_path),
        compute=Table(seconds_of=TIMES),
        network={"name": "uniform", "latency_s": LATENCY},
    )
    run = play(experiment, tmp_path)
    assert run.parameters is not None
    expected = overlapped(Data(experiment), tau, 14, 0.1)
    np.testing.assert_allclose(wide(run.parameters), expected, rtol=1e-5, atol=1e-5)


def test_overlap_hides_the_exchange_behind_the_steps(tmp_path: Path) -> None:
    """With steps of 0.5 s and links of 0.8 s a round takes 1.3 s; with tau = 1 two rounds do, since a message travels
    during the next step; with tau = 2 no node waits."""
    seconds = []
    for tau in (0, 1, 2):
        experiment = least_squares(
            4,
            10,
            algorithm={"name": "sgp", "overlap": tau},
            topology="one-peer-exponential",
            compute={"name": "constant", "seconds_per_step": 0.5},
            network={"name": "uniform", "latency_s": 0.8},
            evaluation={"every_rounds": 10},
        )
        seconds.append(play(experiment, tmp_path).metrics["time_s"].max())
    assert seconds == pytest.approx([10 * 1.3, 5 * 1.3, 10 * 0.5], abs=1e-6)


def _push_sum_weights(arcs: list[tuple[int, int]], nodes: int) -> np.ndarray:
    """The weights after 200 rounds."""
    P = np.zeros((nodes, nodes))
    for sender in range(nodes):
        receivers = [sender, *(to for source, to in arcs if source == sender)]
        P[receivers, sender] = 1 / len(receivers)
    return np.linalg.matrix_power(P, 200) @ np.ones(nodes)


@pytest.mark.parametrize(
    ("arcs", "edge"),
    [
        ([(0, 1), (1, 2), (2, 0), (3, 0)], (3, 0)),  # nobody sends to 3
        ([(0, 1), (1, 0), (1, 2), (2, 3), (3, 2)], (1, 2)),  # 0 and 1 get nothing back
        ([(0, 1), (1, 0), (2, 3), (3, 2)], None),  # two strongly connected parts, each with its own mean
        (ARCS, None),
    ],
)
def test_graphs_on_which_weights_vanish_are_refused(
    arcs: list[tuple[int, int]], edge: tuple[int, int] | None, tmp_path: Path
) -> None:
    assert (_push_sum_weights(arcs, 4).min() < 1e-9) == (edge is not None)
    (tmp_path / "arcs.txt").write_text("".join(f"{i} {j}\n" for i, j in arcs))
    experiment = Experiment.of(
        {
            "nodes": 4,
            "task": {"name": "least-squares", "features": 3, "samples": 40},
            "topology": {
                "name": "edge-list",
                "path": str(tmp_path / "arcs.txt"),
                "directed": True,
                "allow_disconnected": True,
            },
            "algorithm": "sgp",
            "stop": {"rounds": 60},
            "engine": {"name": "simulate", "trainer": "sequential"},
        }
    )
    if edge is None:
        assert gossamer.run(experiment, tmp_path / "runs").status == "done"
        return
    where = f"edge-list, where node {edge[0]} sends to node {edge[1]}, which can't reach it, for sgp"
    with pytest.raises(BadInput, match=f"^topology: {where}; accepted: strongly connected graphs$"):
        gossamer.run(experiment, tmp_path / "runs")
