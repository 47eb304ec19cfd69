from __future__ import annotations

import numpy as np
import pytest

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.network import Path, StarNetwork, Stragglers

MBPS = 125_000


def mbps(network: Stragglers, nodes: int, seed: int = 1) -> list[list[float]]:
    """Uplinks and downlinks."""
    rates = network.conditions(nodes, seed).rates / MBPS
    return rates.reshape(2, nodes).tolist()


def test_first_nodes_have_the_bandwidth_divided_by_the_factor() -> None:
    network = Stragglers(bandwidth_mbps=60, uplink_mbps=30, count=2, which="first", latency_s=0.1)
    assert mbps(network, 4) == [[6, 6, 30, 30], [12, 12, 60, 60]]
    assert network.conditions(4, 1).path(0, 3) == Path((0, 7), 0.1)


def test_stragglers_are_given_by_ranks_or_fraction() -> None:
    assert mbps(Stragglers(bandwidth_mbps=10, ranks=(3, 1), factor=2), 4)[0] == [10, 5, 10, 5]
    for nodes, slow in ((5, 3), (4, 2), (1, 1), (60, 30)):
        up, _ = mbps(Stragglers(bandwidth_mbps=10, fraction=0.5), nodes)
        assert sorted(up) == [2] * slow + [10] * (nodes - slow)


def test_slow_nodes_are_drawn_by_the_seed() -> None:
    network = Stragglers(bandwidth_mbps=10, count=5)
    drawn = {tuple(mbps(network, 20, seed)[0]) for seed in range(10)}
    assert len(drawn) == 10
    assert mbps(network, 20, 3) == mbps(Stragglers(bandwidth_mbps=10, count=5, latency_s=1), 20, 3)


def test_deviations_are_normal_and_equal_in_both_directions() -> None:
    network = Stragglers(bandwidth_mbps=60, factor=5, spread_mbps=1, fraction=1)
    up, down = (np.array(rates) for rates in mbps(network, 2000))
    np.testing.assert_array_equal(up, down)
    assert up.mean() == pytest.approx(12, abs=5 / np.sqrt(2000))
    assert up.std() == pytest.approx(1, rel=0.1)
    fewer, _ = mbps(network, 10)
    assert fewer == up[:10].tolist()  # independent of the number of nodes


def test_bandwidth_of_a_straggler_is_positive() -> None:
    up, _ = mbps(Stragglers(bandwidth_mbps=5, factor=5, spread_mbps=4, fraction=1), 500)
    assert min(up) > 0
    assert np.mean(np.array(up) < 1) < 0.5  # truncated, not reflected


def test_star_paths_combine_their_two_links() -> None:
    star = StarNetwork(
        uplink_mbps=(1, 2, 3),
        downlink_mbps=4,
        latency_s=(0.1, 0.2, 0.4),
        jitter_s=(0.3, 0.4, 0),
        loss=(0.5, 0, 0.2),
    )
    conditions = star.conditions(3, 1)
    assert (conditions.rates / MBPS).tolist() == [1, 2, 3, 4, 4, 4]
    path = conditions.path(0, 1)
    assert path is not None
    assert path.links == (0, 4)
    assert (path.latency_s, path.jitter_s, path.loss) == pytest.approx((0.3, 0.5, 0.5))
    path = conditions.path(2, 0)
    assert path is not None
    assert (path.links, path.loss) == ((2, 3), pytest.approx(0.6))
    assert conditions.common_latency() is None


def test_uniform_star_has_a_common_latency() -> None:
    assert StarNetwork(latency_s=0.25).conditions(3, 1).common_latency() == 0.5
    assert StarNetwork(latency_s=0.25, jitter_s=0.1).conditions(3, 1).common_latency() is None
    assert StarNetwork(latency_s=(0.25, 0.25, 0.3)).conditions(3, 1).common_latency() is None
    assert np.isinf(StarNetwork().conditions(3, 1).rates).all()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"name": "stragglers", "bandwidth_mbps": 1}, "accepted: exactly one of count, fraction and ranks"),
        (
            {"name": "stragglers", "bandwidth_mbps": 1, "count": 1, "ranks": [0]},
            "exactly one of count, fraction and ranks",
        ),
        (
            {"name": "stragglers", "bandwidth_mbps": 1, "ranks": [2], "which": "first"},
            'accepted: which "first" with count or fraction, not with ranks',
        ),
        ({"name": "stragglers", "bandwidth_mbps": 1, "count": 1, "factor": 0}, r"network\.factor: got 0; "),
        ({"name": "stragglers", "bandwidth_mbps": 1, "fraction": 1.5}, r"network\.fraction: got 1\.5"),
        ({"name": "stragglers", "count": 1}, r"network\.bandwidth_mbps: null; accepted: "),
        (
            {"name": "stragglers", "bandwidth_mbps": 1, "count": 5},
            r"network\.count: 5 of 4 nodes; accepted: 0 to 4",
        ),
        (
            {"name": "stragglers", "bandwidth_mbps": 1, "ranks": [1, 4]},
            r"network\.ranks: node 4 of 4 nodes; accepted: ranks 0 to 3",
        ),
        ({"name": "star", "uplink_mbps": [1, 2]}, r"network\.uplink_mbps: 2 values for 4 nodes; accepted"),
        ({"name": "star", "loss": [0, 0, 0, 0, 0]}, r"network\.loss: 5 values for 4 nodes; accepted"),
        ({"name": "star", "loss": 1}, r"network\.loss: got 1; accepted: less than 1"),
        ({"name": "star", "latency_s": [0, -1, 0, 0]}, r"network\.latency_s\.1: got -1"),
    ],
)
def test_invalid_descriptions_are_refused(spec: dict[str, object], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        build("network", spec).conditions(4, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "stragglers", "bandwidth_mbps": 60.0, "ranks": [0, 2]},
        {"name": "star", "uplink_mbps": [1.0, 2.0], "sharing": "fair"},
    ],
)
def test_saved_network_is_equal(spec: dict[str, object]) -> None:
    network = build("network", spec)
    assert build("network", network.spec()) == network
    assert spec.items() <= network.spec().items()
