"""The supervisor's estimate of the clock of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gossamer.runtime.events import EstimatedClock


class Real:
    """Real time, set by the test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_clock_advances_between_reports() -> None:
    real = Real()
    clock = EstimatedClock(real)
    real.now_s += 5
    assert clock.now() == 0.0  # it does not run before the first report
    clock.update(0.0)
    real.now_s += 0.5
    assert clock.now() == 0.5
    clock.update(0.25)  # the nodes' clocks stopped during an evaluation
    real.now_s += 0.125
    assert clock.now() == 0.5
    clock.update(0.125)  # the report of a node that is behind
    real.now_s += 0.5
    assert clock.now() == 0.875


def test_clock_of_a_resumed_run_continues() -> None:
    real = Real()
    clock = EstimatedClock(real)
    clock.update(7.0, runs=False)
    real.now_s += 100
    assert clock.now() == 7.0
    clock.update(clock.now())
    real.now_s += 1
    assert clock.now() == 8.0


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 3.0]), st.floats(0, 10))))
def test_clock_never_goes_back(steps: list[tuple[float, float]]) -> None:
    real = Real()
    clock = EstimatedClock(real)
    before = clock.now()
    for elapsed_s, report_s in steps:
        real.now_s += elapsed_s
        clock.update(report_s)
        assert clock.now() >= max(before, report_s)
        before = clock.now()
