"""Complete runs over networks: refusals, and the effects of losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from links_scene import SHARINGS, Drawn, Map

from gossamer import BadInput, Experiment, run
from gossamer.algorithms import Algorithm
from gossamer.network import Conditions, Network
from gossamer.node import Node
from gossamer.runtime.setup import prepare


def described(**fields: Any) -> Experiment:
    return Experiment.of(
        {
            "nodes": 6,
            "task": {"name": "least-squares", "features": 3, "samples": 48, "test_samples": 20},
            "topology": "ring",
            "algorithm": "d-psgd",
            "optimizer": {"name": "sgd", "lr": 0.1},
            "compute": {"name": "constant", "seconds_per_step": 0.01},
            "stop": {"rounds": 10},
            "engine": {"name": "simulate", "trainer": "sequential"},
            **fields,
        }
    )


class Idle(Algorithm):
    """Never waits for a peer."""

    gathers = False

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            await node.sleep(1.0)


class Tiny(Network):
    """Has room for two nodes."""

    def conditions(self, nodes: int, seed: int) -> Conditions:
        raise BadInput(f"network: {nodes} nodes; accepted: 2")


LOSSY = {"name": "uniform", "loss": 0.1}
NOWHERE = Drawn(first=Map([8.0] * 12, lambda source, to: None))


@pytest.mark.parametrize("network", [LOSSY, NOWHERE])
def test_unbounded_gather_on_a_lossy_network_is_refused(network: Any) -> None:
    message = r"gather\.timeout_s: null, although messages are lost; accepted: seconds"
    with pytest.raises(BadInput, match=message):
        prepare(described(network=network))
    prepare(described(network=network, gather={"timeout_s": 1.0}))
    prepare(described(network=network, algorithm=Idle()))


def test_network_of_the_wrong_size_is_refused_before_the_run() -> None:
    with pytest.raises(BadInput, match="network: 6 nodes; accepted: 2"):
        prepare(described(network=Tiny()))


def test_synchronous_losses_do_not_depend_on_link_sharing(tmp_path: Path) -> None:
    outcomes = []
    for sharing in SHARINGS:
        network = {
            "name": "uniform",
            "loss": 0.2,
            "sharing": sharing,
            "bandwidth_mbps": 8.0,
            "jitter_s": 0.001,
        }
        recorded = run(described(network=network, gather={"timeout_s": 1.0}), tmp_path)
        rows = recorded.metrics.filter((pl.col("node") >= 0) & (pl.col("round") == 10)).sort("node")
        outcomes.append((rows["messages_lost"].to_list(), recorded.parameters.tolist()))
    assert 8 < sum(outcomes[0][0]) < 50
    assert outcomes[0] == outcomes[1] == outcomes[2]
