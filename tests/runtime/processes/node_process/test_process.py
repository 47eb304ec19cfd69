"""A node's process, without a supervisor's: the test is the overseer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import jaxtyping
import pytest
from transport_scene import TOKEN, on_loop

from gossamer import Node
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.node_process.environment import Place
from gossamer.runtime.processes.node_process.process import NodeProcess
from gossamer.runtime.processes.node_process.warmup import Stage
from gossamer.runtime.processes.system.shared_file import shared_file
from gossamer.runtime.processes.transport.transport import listen
from gossamer.runtime.setup import prepare
from scenario import LR, experiment

Hear = Callable[[protocol.ToNode], None]


class Overseer:
    """Has a node begin with a round as soon as it is ready, and end when it is done."""

    def __init__(self, hear: Hear, first: int) -> None:
        self._hear, self._first = hear, first

    def send(self, message: protocol.FromNode) -> None:
        if isinstance(message, protocol.Ready):
            self._hear(protocol.Go(time.monotonic(), protocol.Arrival(self._first, [], "initial", 0, {})))
        elif isinstance(message, protocol.Done | protocol.Failed):
            self._hear(protocol.Finish("rounds"))


@on_loop
async def test_a_node_that_begins_later_has_the_learning_rate_of_its_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether a worker is a host is checked by asking for its traffic, which it has none of before it lives.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    seen: list[tuple[int, float]] = []

    async def script(node: Node) -> None:
        async for r in node.rounds():
            seen.append((r, node.lr))

    described = experiment(
        script,
        optimizer={"name": "sgd", "lr": LR, "schedule": {"name": "exponential", "factor": 0.5}},
        engine="processes",
        stop={"rounds": 5},
    )
    setup, listener = prepare(described), listen()
    folder = RunFolder.create(tmp_path, "late", experiment=described.to_yaml(), environment={})
    place = Place(
        listener,
        None,
        [listener.getsockname()] * 2,
        TOKEN,
        shared_file(),
        at_once=1,
        trims=False,
        oversee=lambda hear: Overseer(hear, 3),
    )
    assert place.news is None  # alone in its process, it opens nothing to tell others
    assert await NodeProcess(0, setup, place, Stage(setup), folder).live() == 0
    assert seen == [(3, LR * 0.5**3), (4, LR * 0.5**4)]
