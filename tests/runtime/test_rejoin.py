"""How a newcomer asks for a model, despite nonsensical peers and wrappers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import Algorithm, Experiment, Message, Node, NodeWrapper
from gossamer.layers import layers_of
from gossamer.layers.newcomer import run_newcomer
from gossamer.messages.tags import PrivateTag
from gossamer.results.observer import Observer
from gossamer.results.segment import Segment
from gossamer.runtime.outcome import Outcome
from gossamer.runtime.setup import prepare
from gossamer.runtime.simulate.simulation import Simulation

Act = Callable[[Node], Coroutine[Any, Any, None]]


class Acts(Algorithm):
    """Each node acts as the test says."""

    def __init__(self, *acts: Act) -> None:
        super().__init__()
        object.__setattr__(self, "_acts", acts)

    async def run(self, node: Node) -> None:
        """Run this node's part."""
        await self._acts[node.rank](node)


def simulated(folder: Path, *acts: Act, rounds: int = 8, **settings: Any) -> Outcome:
    """Simulate nodes that answer requests for their model; messages take 0.1 s."""
    experiment = Experiment.of(
        {
            "nodes": len(acts),
            "task": {"name": "least-squares", "features": 3, "samples": 8, "test_samples": 1},
            "topology": "complete",
            "algorithm": Acts(*acts),
            "gather": {"lost_peer": "skip"},
            "network": {"name": "uniform", "latency_s": 0.1},
            "evaluation": {"every_rounds": None},
            "stop": {"rounds": rounds},
            "engine": {"name": "simulate", "trainer": "sequential"},
            **settings,
        }
    )
    # As with a fault by which nodes join later.
    layers = layers_of(experiment, sampled=False, asks_neighbors=True)
    setup = replace(prepare(experiment), layers=layers)
    with (
        Segment(folder / "metrics") as metrics,
        Segment(folder / "graphs") as graphs,
        Segment(folder / "events") as events,
    ):
        return Simulation(setup, metrics, graphs, events, Observer()).run()


class Noise(NodeWrapper):
    """Works on vectors only."""

    def outgoing(self, node: Node, to: int, payload: Any, tag: tuple[str | int, ...]) -> Any:
        """Add to every vector."""
        return payload + torch.ones(len(payload))


class Deaf(NodeWrapper):
    """Drops every message."""

    def incoming(self, node: Node, message: Message) -> Message | None:
        """Drop it."""
        return None


@pytest.mark.parametrize("wrapper", [Noise(), Deaf()])
def test_wrappers_do_not_touch_a_newcomers_model(wrapper: NodeWrapper, tmp_path: Path) -> None:
    taken = []

    async def nothing(node: Node) -> None:
        taken.append(node.parameters)

    async def newcomer(node: Node) -> None:
        await run_newcomer(nothing, node._runtime, 1.0)

    async def giver(node: Node) -> None:
        taken.append(node.parameters)
        await node.sleep(2.0)

    outcome = simulated(tmp_path, newcomer, giver, wrappers=[wrapper], initial="independent")
    assert outcome.failure is None
    given, received = taken
    assert torch.equal(given, received)


def test_nonsensical_requests_and_answers_do_no_harm(tmp_path: Path) -> None:
    unchanged = []

    async def liar(node: Node) -> None:
        for tag, payload in [
            (("give", 7), torch.zeros(2)),
            (("give", 1), torch.zeros(2)),  # the requested tag, but another shape
            (("nothing",), None),
        ]:
            node.send(0, payload, PrivateTag(("~newcomer", *tag)))
        await node.sleep(1.0)

    async def newcomer(node: Node) -> None:
        before = node.parameters

        async def algorithm(node: Node) -> None:
            unchanged.append(torch.equal(node.parameters, before))

        await run_newcomer(algorithm, node._runtime, 0.5)
        assert node._runtime.mailbox.first.get(1, 0) == 0
        assert node.drain() == []

    assert simulated(tmp_path, newcomer, liar).failure is None
    assert unchanged == [True]


def test_repeated_requests_get_one_model_at_a_time(tmp_path: Path) -> None:
    received = []

    async def asker(node: Node) -> None:
        for number in range(100):
            node.send(1, None, PrivateTag(("~newcomer", "ask", number)))
        await node.sleep(60.0)
        received.append(node.traffic.messages_received)

    async def giver(node: Node) -> None:
        await node.sleep(60.0)

    simulation = simulated(
        tmp_path,
        asker,
        giver,
        task={"name": "least-squares", "features": 3000, "samples": 8, "test_samples": 1},
        network={"name": "uniform", "latency_s": 0.1, "uplink_mbps": 0.1},  # a second for each model
    )
    assert simulation.failure is None
    assert 1 <= received[0] <= 3
