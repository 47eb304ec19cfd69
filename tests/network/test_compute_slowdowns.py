"""Exact integration of work over slowdowns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.network import Constant, Slowdowns, SlowdownWindow
from gossamer.network.compute import RandomSlowdowns

SECOND = Constant(seconds_per_step=1.0)
CELL = 1e-3

windows = st.lists(
    st.builds(
        lambda start, length, factor: SlowdownWindow(
            from_s=start / 10, to_s=(start + length) / 10, factor=factor
        ),
        st.integers(0, 100),
        st.integers(1, 50),
        st.sampled_from([0.5, 1.5, 2, 7]),
    ),
    min_size=1,
    max_size=5,
)


def test_step_times_before_in_and_across_a_slowdown() -> None:
    profile = Slowdowns(base=SECOND, windows=(SlowdownWindow(from_s=10, to_s=14, factor=2),))
    for start_s, seconds in ((0, 1), (9, 1), (9.5, 1.5), (10, 2), (13, 1.5), (13.5, 1.25), (14, 1), (99, 1)):
        assert profile.seconds(1, 0, 0, 1, start_s) == seconds
    assert profile.seconds(1, 0, 0, 5, 9) == 1 + 4 + 2
    assert profile.seconds(1, 0, 0, 0, 12) == 0
    assert profile.step_seconds(1, 0, 0) == 1


def test_overlapping_slowdowns_multiply_for_their_nodes() -> None:
    within = (
        SlowdownWindow(from_s=0, to_s=10, factor=2, ranks=(1,)),
        SlowdownWindow(from_s=2, to_s=5, factor=3),
    )
    profile = Slowdowns(base=SECOND, windows=within)
    assert profile.seconds(1, 0, 0, 4, 0) == 2 + 3 + 1
    assert profile.seconds(1, 1, 0, 3.5, 0) == pytest.approx(2 + 3 + 4)  # 1 + 0.5 + 2 done


@settings(max_examples=50)
@given(windows, st.integers(0, 120), st.floats(0.01, 10))
def test_step_times_match_a_numerical_integral(
    given_windows: list[SlowdownWindow], start: int, work: float
) -> None:
    profile = Slowdowns(base=SECOND, windows=tuple(given_windows))
    seconds = profile.seconds(1, 0, 0, work, start / 10)
    middles = start / 10 + CELL * (np.arange(100_000) + 0.5)
    slowness = np.ones_like(middles)
    for window in given_windows:
        slowness[(middles >= window.from_s) & (middles < window.to_s)] *= window.factor
    done = np.cumsum(CELL / slowness)
    if done[-1] > work:
        assert seconds == pytest.approx(CELL * np.searchsorted(done, work), abs=3 * CELL)
    else:
        assert seconds > 100 - CELL


@settings(max_examples=50)
@given(st.floats(0, 50), st.floats(0, 20), st.floats(0, 20))
def test_split_work_takes_as_long_as_the_whole(start_s: float, work: float, more: float) -> None:
    profile = Slowdowns(
        base=SECOND,
        windows=(SlowdownWindow(from_s=7, to_s=30, factor=3),),
        random=RandomSlowdowns(per_hour=720, mean_s=4, factor=5),
    )
    first = profile.seconds(1, 2, 0, work, start_s)
    second = profile.seconds(1, 2, 0, more, start_s + first)
    assert first + second == pytest.approx(profile.seconds(1, 2, 0, work + more, start_s), abs=1e-6)


def test_random_slowdowns_have_the_given_rate_and_length() -> None:
    """In the long run a node is slow for mean_s of every mean_s + 3600 / per_hour seconds."""
    profile = Slowdowns(base=SECOND, random=RandomSlowdowns(per_hour=60, mean_s=40, factor=1e9))
    horizon, nodes = 12_000.0, 10
    done = [_done(profile, rank, horizon) for rank in range(nodes)]
    cycles = nodes * horizon / 100
    assert np.mean(done) / horizon == pytest.approx(0.6, abs=5 * 0.5 / np.sqrt(cycles))
    assert len(set(done)) == nodes


def _done(profile: Slowdowns, rank: int, horizon: float) -> float:
    """The work that a node completes by a time, found by bisection."""
    low, high = 0.0, horizon
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if profile.seconds(1, rank, 0, middle, 0) < horizon else (low, middle)
    return low


def test_random_slowdowns_do_not_depend_on_earlier_calls() -> None:
    def fresh() -> Slowdowns:
        return Slowdowns(base=SECOND, random=RandomSlowdowns(per_hour=600, mean_s=3, factor=4))

    times = [5000.0, 1.0, 300.0, 0.0]
    reused = fresh()
    together = {(time, rank): reused.seconds(7, rank, 0, 9, time) for time in times for rank in (0, 1)}
    apart = {(time, rank): fresh().seconds(7, rank, 0, 9, time) for time in sorted(times) for rank in (1, 0)}
    assert together == apart
    assert reused == fresh()
    assert reused.seconds(7, 0, 0, 9, 0.0) != reused.seconds(8, 0, 0, 9, 0.0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "accepted: windows, random, or both"),
        (
            {"windows": [{"from_s": 2, "to_s": 2, "factor": 2}]},
            r"compute\.windows\.0: .*accepted: to_s after from_s",
        ),
        ({"windows": [{"from_s": 2, "to_s": 3, "factor": 0}]}, r"compute\.windows\.0\.factor: got 0"),
        ({"windows": [{"from_s": 2, "to_s": 3}]}, r"compute\.windows\.0\.factor: missing"),
        (
            {"windows": [{"from_s": 2, "to_s": 3, "factor": 2, "ranks": [4]}]},
            r"compute\.windows\.0\.ranks: node 4 of 4",
        ),
        ({"random": {"per_hour": 0, "mean_s": 1, "factor": 1}}, r"compute\.random\.per_hour: got 0"),
        (
            {"base": {"name": "slowdowns", "random": {"per_hour": 1, "mean_s": 1, "factor": 1}}},
            r"compute\.base: .*accepted: a profile that does not depend on the time",
        ),
    ],
)
def test_invalid_descriptions_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        build("compute", {"name": "slowdowns", **fields}).for_nodes(4, 1)  # type: ignore[attr-defined]
