from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.network import Constant, LogNormal, Path, UniformNetwork


def test_megabit_is_a_million_bits() -> None:
    conditions = UniformNetwork(bandwidth_mbps=8.0, latency_s=0.25).conditions(4, 1)
    assert conditions.rates.tolist() == [1_000_000] * 8
    assert conditions.path(0, 3) == Path((0, 7), 0.25)


def test_uplink_and_downlink_are_set_separately() -> None:
    network = UniformNetwork(bandwidth_mbps=8.0, uplink_mbps=1.0)
    assert network.conditions(2, 1).rates.tolist() == [125_000, 125_000, 1_000_000, 1_000_000]
    network = UniformNetwork(downlink_mbps=2.0)
    assert network.conditions(2, 1).rates.tolist() == [math.inf, math.inf, 250_000, 250_000]


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"latency_s": -0.1}, r"network\.latency_s: got -0\.1; accepted: greater than or equal to 0"),
        ({"bandwidth_mbps": 0}, r"network\.bandwidth_mbps: got 0; accepted: greater than 0"),
        ({"bandwith_mbps": 1}, r"network\.bandwith_mbps: unknown field \(did you mean 'bandwidth_mbps'\?\)"),
    ],
)
def test_invalid_networks_are_refused(parameters: dict[str, float], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        build("network", {"name": "uniform", **parameters})


@given(st.just(0.0) | st.floats(1e-9, 10), st.integers(0, 100), st.floats(0, 20))
def test_constant_steps_take_the_given_time(step_s: float, first: int, work: float) -> None:
    assert Constant(seconds_per_step=step_s).seconds(1, 0, first, work, 0.0) == pytest.approx(work * step_s)


@given(st.integers(0, 20), st.integers(1, 10), st.integers(1, 10))
def test_drawn_durations_add_up_step_by_step(first: int, count: int, more: int) -> None:
    profile = LogNormal(median_seconds=0.1, sigma=0.5)
    whole = profile.seconds(1, 3, first, count + more, 0.0)
    parts = profile.seconds(1, 3, first, count, 0.0) + profile.seconds(1, 3, first + count, more, 0.0)
    assert whole == pytest.approx(parts)
    half = profile.seconds(1, 3, first, count + 0.5, 0.0) - profile.seconds(1, 3, first, count, 0.0)
    assert half == pytest.approx(profile.step_seconds(1, 3, first + count) / 2)


def test_log_normal_steps_have_their_median_and_spread() -> None:
    profile = LogNormal(median_seconds=0.1, sigma=0.5)
    drawn = np.array([profile.step_seconds(1, rank, step) for rank in range(20) for step in range(100)])
    logs = np.log(drawn)
    assert logs.mean() == pytest.approx(np.log(0.1), abs=5 * 0.5 / np.sqrt(2000))
    assert logs.std() == pytest.approx(0.5, rel=0.1)
    assert len(set(drawn.tolist())) == 2000
    assert profile.step_seconds(1, 0, 0) == profile.step_seconds(1, 0, 0) != profile.step_seconds(2, 0, 0)
    assert LogNormal(median_seconds=0.1, sigma=0.0).step_seconds(1, 0, 5) == pytest.approx(0.1)


def test_common_latency_requires_no_jitter_and_no_loss() -> None:
    assert UniformNetwork(latency_s=0.5).conditions(2, 1).common_latency() == 0.5
    assert UniformNetwork(latency_s=0.5, jitter_s=0.1).conditions(2, 1).common_latency() is None
    assert UniformNetwork(latency_s=0.5, loss=0.1).conditions(2, 1).common_latency() is None
