"""How nodes meet where nobody tells them in which round: whatever comes late, and whatever wrappers do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import Algorithm, Experiment, Message, Node, NodeWrapper
from gossamer.api import Silent
from gossamer.results.segment import Segment
from gossamer.runtime.outcome import Outcome
from gossamer.runtime.rejoin import come_back, meet_again, newcomer
from gossamer.runtime.setup import prepare
from gossamer.runtime.simulate.engine import Simulation

Act = Callable[[Node], Coroutine[Any, Any, None]]


class Acts(Algorithm):
    """Each node does what a test says."""

    def __init__(self, *acts: Act) -> None:
        super().__init__()
        object.__setattr__(self, "_acts", acts)

    async def run(self, node: Node) -> None:
        """Run this node's part."""
        await self._acts[node.rank](node)


def simulated(folder: Path, *acts: Act, rounds: int = 8, **settings: Any) -> Outcome:
    """A simulation of hospitable nodes, whose messages take 0.1 s."""
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
    with Segment(folder / "metrics") as metrics, Segment(folder / "graphs") as graphs:
        return Simulation(replace(prepare(experiment), hospitable=True), metrics, graphs, Silent()).run()


class Cut(NodeWrapper):
    """Loses what is sent in the first four rounds."""

    def incoming(self, node: Node, message: Message) -> Message | None:
        """Drop it."""
        return None if message.tag[0] == "m" and int(message.tag[1]) <= 3 else message


class Noise(NodeWrapper):
    """Can do with vectors alone."""

    def outgoing(self, node: Node, to: int, payload: Any, tag: tuple[str | int, ...]) -> Any:
        """Add to every vector."""
        return payload + torch.ones(len(payload))


class Deaf(NodeWrapper):
    """Takes nothing."""

    def incoming(self, node: Node, message: Message) -> Message | None:
        """Drop it."""
        return None


async def slowly(node: Node, pause_s: float = 0.3) -> None:
    """Send a message in each round."""
    async for r in node.rounds():
        node.send(0, 1.0, ("m", r))
        await node.sleep(pause_s)


@pytest.mark.parametrize("timeout_s", [0.05, 5.0])
def test_an_answer_that_comes_late_is_not_taken_for_that_to_a_later_question(
    timeout_s: float, tmp_path: Path
) -> None:
    since = []

    async def meets(node: Node) -> None:
        async for r in node.rounds():
            if r == 1:
                node.spawn(meet_again(node._runtime, 1, timeout_s))  # the answer takes 0.2 s
            if r == 2:
                assert not node.drain()
                await node.sleep(1.0)
                assert not [message for message in node.drain() if message.tag[0] != "m"]
                await meet_again(node._runtime, 1, 5.0)
                since.append(node._runtime.first_of(1))
            if r >= 3:
                await node.gather([1], ("m", r))
            await node.sleep(0.01)

    outcome = simulated(tmp_path, meets, slowly, wrappers=[Cut()])
    assert (outcome.reason, outcome.failure) == ("rounds", None)
    assert since[0] > 3


def test_who_does_not_answer_in_time_is_asked_on_until_it_does(tmp_path: Path) -> None:
    before, after = [], []

    async def meets(node: Node) -> None:
        await come_back(node._runtime, [1], 0.05)
        before.append(node._runtime.first_of(1))
        async for _ in node.rounds():
            await node.sleep(0.1)
        after.append(node._runtime.first_of(1))

    async def is_asked(node: Node) -> None:
        await slowly(node)
        assert node._runtime.first_of(0) > 0

    assert simulated(tmp_path, meets, is_asked).failure is None
    assert before == [0]
    assert after[0] > 0


@pytest.mark.parametrize("wrapper", [Noise(), Deaf()])
def test_wrappers_neither_see_nor_change_how_nodes_meet(wrapper: NodeWrapper, tmp_path: Path) -> None:
    taken = []

    async def nothing(node: Node) -> None:
        taken.append((node._runtime.first_of(1), node.parameters))

    async def comes(node: Node) -> None:
        await newcomer(nothing, node._runtime, 1.0, lambda: come_back(node._runtime, [1], 1.0))

    async def gives(node: Node) -> None:
        taken.append((0, node.parameters))
        node.round = 5
        await node.sleep(2.0)
        assert node._runtime.first_of(0) == 6

    outcome = simulated(tmp_path, comes, gives, wrappers=[wrapper], initial="independent")
    assert outcome.failure is None
    (_, given), (since, own) = taken
    assert since == 6
    assert torch.equal(given, own)


def test_no_question_and_no_answer_that_makes_no_sense_does_harm(tmp_path: Path) -> None:
    own = []

    async def lies(node: Node) -> None:
        for tag, payload in [
            (("meet",), True),
            (("meet", "one"), True),
            (("from",), -1),
            (("from",), True),
            (("from",), 2**40),
            (("at", 1), 7),
            (("give", 7), torch.zeros(2)),
            (("give", 1), torch.zeros(2)),  # which is what was asked for, but of another shape
            (("nothing",), None),
        ]:
            node.send(0, payload, ("gossamer/newcomer", *tag))
        await node.sleep(1.0)

    async def hears(node: Node) -> None:
        before = node.parameters

        async def goes_on(node: Node) -> None:
            own.append(torch.equal(node.parameters, before))

        await newcomer(goes_on, node._runtime, 0.5)
        assert node._runtime.first_of(1) == 0
        assert node.drain() == []

    assert simulated(tmp_path, hears, lies).failure is None
    assert own == [True]


def test_who_asks_all_the_time_is_sent_one_model_at_a_time(tmp_path: Path) -> None:
    received = []

    async def asks(node: Node) -> None:
        for number in range(100):
            node.send(1, None, ("gossamer/newcomer", "ask", number))
        await node.sleep(60.0)
        received.append(node.traffic.messages_received)

    async def gives(node: Node) -> None:
        await node.sleep(60.0)

    simulation = simulated(
        tmp_path,
        asks,
        gives,
        task={"name": "least-squares", "features": 3000, "samples": 8, "test_samples": 1},
        network={"name": "uniform", "latency_s": 0.1, "uplink_mbps": 0.1},  # a second for each model
    )
    assert simulation.failure is None
    assert 1 <= received[0] <= 3
