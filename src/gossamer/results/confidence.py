"""The mean of a few runs, and how far it can be trusted: Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

LEVEL = 0.95
"""How often the interval holds the true mean, if the values are independent and normal."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval, ``mean - half_width`` to ``mean + half_width``.

    Args:
        mean: of the values.
        half_width: None where there are fewer than two values, of which no spread is known.
        count: how many values.
    """

    mean: float
    half_width: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if self.half_width is None else f"{self.mean:.4g} ± {self.half_width:.2g}"


def confidence(values: Iterable[float], level: float = LEVEL) -> Interval | None:
    """The mean of independent values and its confidence interval.

    The half-width is t s / sqrt(n): s the standard deviation of the sample (divisor n - 1), t the quantile of
    Student's distribution with n - 1 degrees of freedom that leaves (1 - level) / 2 above it.

    Args:
        values: one of each run.
        level: between 0 and 1.

    Returns:
        None where there is no value. A value that is not finite leaves no interval.
    """
    numbers = [float(value) for value in values]
    if not numbers:
        return None
    count = len(numbers)
    mean = statistics.mean(numbers)  # exact, whatever their size
    if count < 2 or not math.isfinite(mean):
        return Interval(mean, None, count)
    spread = math.hypot(*(number - mean for number in numbers)) / math.sqrt(count - 1)
    return Interval(mean, student_t((1 + level) / 2, count - 1) * spread / math.sqrt(count), count)


def student_t(p: float, degrees: int) -> float:
    """The quantile of Student's distribution: a variable of so many degrees of freedom is below it with
    probability p."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # a fifth of a second, which one run can do without

    return float(stdtrit(degrees, p))
