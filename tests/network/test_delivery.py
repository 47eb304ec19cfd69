"""Delivery of single messages, and which networks can lose them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gossamer.network import (
    Access,
    Conditions,
    Matrix,
    Network,
    Path,
    StarNetwork,
    UniformNetwork,
    Varying,
    delivery,
)


def test_delivery_takes_the_latency_without_loss_and_jitter() -> None:
    assert delivery(Path((), latency_s=0.25), 1, 0, 1, 0) == 0.25
    assert delivery(None, 1, 0, 1, 0) is None
    assert all(delivery(Path((), loss=1.0), 1, 0, 1, k) is None for k in range(100))


def test_share_of_lost_messages_matches_the_loss() -> None:
    drawn = [delivery(Path((), loss=0.2), 1, 0, 1, k) for k in range(3000)]
    assert set(drawn) == {None, 0.0}
    assert drawn.count(None) == pytest.approx(600, abs=5 * np.sqrt(3000 * 0.2 * 0.8))


@pytest.mark.parametrize(
    ("latency_s", "jitter_s", "every_s", "mean_ms"),
    [(0.02, 0.05, 1.0, 31.5), (0.5, 0.05, 1.0, 500), (0.5, 0.05, 0.01, 545)],
)
def test_jitter_makes_the_mean_latency_larger(
    latency_s: float, jitter_s: float, every_s: float, mean_ms: float
) -> None:
    """The table of docs/networks.md. The first mean is that of max(X, 0) for a normal X, mu Phi(mu / sigma) + sigma phi(mu /
    sigma); the last one that of 400,000 NumPy draws, each with at least the arrival of the one before it."""
    count = 3000
    sent = every_s * np.arange(count)
    drawn = [delivery(Path((), latency_s, jitter_s), 1, 0, 1, k) for k in range(count)]
    mean_s = (np.maximum.accumulate(sent + np.array(drawn, dtype=float)) - sent).mean()
    # Neighbouring delays in a queue are alike: about as many independent ones as there are waits of 50 ms.
    independent = count * min(every_s / jitter_s, 1)
    assert 1000 * mean_s == pytest.approx(mean_ms, abs=1000 * 4 * jitter_s / np.sqrt(independent))


def test_jitter_is_normal_and_clamped_at_zero() -> None:
    wide = np.array([delivery(Path((), 1.0, jitter_s=0.1), 1, 0, 1, k) for k in range(2000)])
    assert wide.mean() == pytest.approx(1.0, abs=5 * 0.1 / np.sqrt(2000))
    assert wide.std() == pytest.approx(0.1, rel=0.1)
    narrow = np.array([delivery(Path((), 0.1, jitter_s=0.1), 1, 0, 1, k) for k in range(1000)])
    assert narrow.min() == 0
    assert (narrow == 0).mean() == pytest.approx(0.159, abs=0.06)


def test_delivery_of_each_message_is_drawn_independently() -> None:
    path = Path((), latency_s=1.0, jitter_s=0.2)
    keys = [(1, 0, 1, 0), (2, 0, 1, 0), (1, 1, 0, 0), (1, 0, 2, 0), (1, 0, 1, 1)]
    assert len({delivery(path, *key) for key in keys}) == len(keys)
    assert delivery(path, 1, 0, 1, 0) == delivery(Path((7,), 1.0, 0.2, loss=1e-9), 1, 0, 1, 0)


class Pairs(Conditions):
    """A network with one lossy path."""

    def __init__(self, lossy: Path | None) -> None:
        self.rates, self._lossy = np.ones(6), lossy

    def path(self, source: int, to: int) -> Path | None:
        return self._lossy if (source, to) == (2, 1) else Path((source, 3 + to))


SLOWER = ({"at_s": 1.0, "factor": 0.5},)


class Changing(UniformNetwork):
    """Changes its rates after a second."""

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        return iter([(1.0, Access(np.ones(2 * nodes)))])


@pytest.mark.parametrize(("lossy", "loses"), [(Path(()), False), (Path((), loss=0.1), True), (None, True)])
def test_one_lossy_path_makes_conditions_lossy(lossy: Path | None, loses: bool) -> None:
    assert Pairs(lossy).loses(3) is loses


@pytest.mark.parametrize(
    ("network", "loses"),
    [
        (UniformNetwork(), False),
        (UniformNetwork(jitter_s=1.0), False),
        (UniformNetwork(loss=0.1), True),
        (Changing(), True),
        (StarNetwork(jitter_s=1.0), False),
        (StarNetwork(loss=0.1), True),
        (Matrix(bandwidth_mbps="aws-ten-regions"), False),
        (Matrix(bandwidth_mbps="aws-ten-regions", loss=0.1), True),
        (Varying(base=UniformNetwork(bandwidth_mbps=1.0), rate_changes=SLOWER), False),
        (Varying(base=UniformNetwork(bandwidth_mbps=1.0, loss=0.1), rate_changes=SLOWER), True),
    ],
)
def test_networks_know_whether_they_lose_messages(network: Network, loses: bool) -> None:
    assert network.loses(10**6, 1) is loses


def access(**options: Any) -> Access:
    return Access(np.ones(4), **options)


def test_all_paths_of_an_access_network_are_equal() -> None:
    assert access(latency_s=0.1, jitter_s=0.2, loss=0.3).path(0, 1) == Path((0, 3), 0.1, 0.2, 0.3)
    assert access(jitter_s=0.1).loses(2) is False
