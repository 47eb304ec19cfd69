from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.randomness import generator
from gossamer.results.formatting import interval_text
from gossamer.results.tidy import Interval, confidence, student_t

TABLE = {
    # degrees of freedom: the quantiles at 0.95, 0.975 and 0.995 of printed tables
    1: (6.314, 12.706, 63.657),
    2: (2.920, 4.303, 9.925),
    3: (2.353, 3.182, 5.841),
    4: (2.132, 2.776, 4.604),
    5: (2.015, 2.571, 4.032),
    9: (1.833, 2.262, 3.250),
    10: (1.812, 2.228, 3.169),
    30: (1.697, 2.042, 2.750),
    120: (1.658, 1.980, 2.617),
}


@pytest.mark.parametrize("degrees", TABLE)
def test_quantiles_match_printed_table(degrees: int) -> None:
    for p, expected in zip((0.95, 0.975, 0.995), TABLE[degrees], strict=True):
        assert student_t(degrees, p) == pytest.approx(expected, abs=5.1e-4)


def test_quantiles_match_closed_forms_for_small_degrees() -> None:
    for p in (0.6, 0.9, 0.975):
        assert student_t(1, p) == pytest.approx(math.tan(math.pi * (p - 0.5)))
        assert student_t(2, p) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)))


def test_many_degrees_approach_normal_distribution() -> None:
    assert student_t(10**6) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), rel=1e-5)


def test_interval_matches_hand_calculation() -> None:
    interval = confidence([1.0, 2.0, 3.0])
    assert interval is not None
    assert (interval.mean, interval.count) == (2.0, 3)
    assert interval.half_width == pytest.approx(4.303 * 1.0 / math.sqrt(3), rel=1e-3)
    assert interval_text(interval.mean, interval.half_width) == "2.0 ± 2.5"


def test_one_value_has_a_mean_and_no_interval() -> None:
    assert confidence([0.5]) == Interval(0.5, None, 1)
    assert interval_text(0.5, None) == "0.5"
    assert interval_text(998e3, 534e3, "kB", 1e3) == "998 ± 530 kB"
    assert confidence([]) is None


def test_equal_values_have_zero_width_interval() -> None:
    assert confidence([0.7, 0.7, 0.7]) == Interval(0.7, 0.0, 3)


@pytest.mark.parametrize("values", [[1.0, math.nan], [1.0, math.inf], [math.inf, -math.inf]])
def test_non_finite_values_have_no_interval(values: list[float]) -> None:
    interval = confidence(values)
    assert interval is not None
    assert not math.isfinite(interval.mean)
    assert interval.half_width is None


def test_largest_floats_do_not_overflow() -> None:
    interval = confidence([1.7e308, 1.7e308])
    assert interval is not None
    assert interval.mean == pytest.approx(1.7e308)


def test_interval_has_nominal_coverage() -> None:
    rng = generator(1, "confidence")
    draws = rng.normal(3.0, 2.0, size=(2000, 4))
    held = 0
    for draw in draws:
        interval = confidence(draw.tolist())
        assert interval is not None
        assert interval.half_width is not None
        held += abs(interval.mean - 3.0) <= interval.half_width
    assert held / len(draws) == pytest.approx(0.95, abs=0.015)  # three standard deviations of the share


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=8), st.floats(0.1, 10), st.floats(-1e3, 1e3))
def test_interval_shifts_and_scales_with_the_values(values: list[float], factor: float, shift: float) -> None:
    plain, moved = confidence(values), confidence([factor * value + shift for value in values])
    assert plain is not None
    assert moved is not None
    assert plain.half_width is not None
    assert moved.mean == pytest.approx(factor * plain.mean + shift, rel=1e-9, abs=1e-6)
    assert moved.half_width == pytest.approx(factor * plain.half_width, rel=1e-9, abs=1e-6)
