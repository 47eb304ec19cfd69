"""The ranges of numbers in an experiment. Each follows from what is done with the number: a time becomes whole nanoseconds in
63 bits, a number that meets parameters becomes a float32, and products of factors, bandwidths and times are finite.
What is not 0 must not become 0."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

LONGEST_ACCEPTED_S = 4e9
"""The longest time that an experiment accepts, in seconds: 126 years. Twice as much has less than 2^63 nanoseconds."""
SHORTEST_S = 1e-9
LARGEST_FLOAT32 = 3.4028234663852886e38
SMALLEST_FLOAT32 = 1.1754943508222875e-38
"""The smallest positive float32 of full precision. What is smaller loses digits, and at last becomes 0."""


def _positive_from(least: float) -> AfterValidator:
    """Refuse numbers below ``least``."""

    def check(value: float) -> float:
        if value < least:
            raise ValueError(f"at least {least:.8g}")
        return value

    return AfterValidator(check)


def _zero_or_from(least: float) -> AfterValidator:
    """Refuse numbers between -``least`` and ``least``, but for 0."""

    def check(value: float) -> float:
        if 0 < abs(value) < least:
            raise ValueError(f"0, or at least {least:.8g}")
        return value

    return AfterValidator(check)


def _not_one_as_float32(value: float) -> float:
    if value > 1 - 2**-25:
        raise ValueError("at most 0.9999999; as a float32, more is 1")
    return value


Seconds = Annotated[float, Field(ge=0, le=LONGEST_ACCEPTED_S, allow_inf_nan=False), _zero_or_from(SHORTEST_S)]
"""A time or a duration, in seconds."""
PositiveSeconds = Annotated[
    float, Field(gt=0, le=LONGEST_ACCEPTED_S, allow_inf_nan=False), _positive_from(SHORTEST_S)
]
"""A time or a duration above 0, in seconds."""
Factor = Annotated[float, Field(ge=1e-9, le=1e9)]
"""What multiplies or divides a time, a bandwidth or a score."""
LogDeviation = Annotated[float, Field(ge=0, le=100)]
"""The standard deviation of a logarithm, sigma in e^(sigma z)."""
LARGEST_MBPS = 1e12
Mbps = Annotated[float, Field(gt=0, le=LARGEST_MBPS)]
"""A bandwidth, 10^6 bits per second."""
Float32 = Annotated[float, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32), _zero_or_from(SMALLEST_FLOAT32)]
"""A number that becomes a float32."""
NonNegativeFloat32 = Annotated[float, Field(ge=0, le=LARGEST_FLOAT32), _zero_or_from(SMALLEST_FLOAT32)]
"""A number from 0 on that becomes a float32."""
PositiveFloat32 = Annotated[float, Field(gt=0, le=LARGEST_FLOAT32), _positive_from(SMALLEST_FLOAT32)]
"""A number above 0 that becomes a float32."""
ShareFloat32 = Annotated[float, Field(ge=0, le=1), _zero_or_from(SMALLEST_FLOAT32)]
"""A factor from 0 to 1 that becomes a float32."""
PositiveShareFloat32 = Annotated[float, Field(gt=0, le=1), _positive_from(SMALLEST_FLOAT32)]
"""A factor above 0 and up to 1 that becomes a float32."""
Decay = Annotated[
    float, Field(ge=0, lt=1), _zero_or_from(SMALLEST_FLOAT32), AfterValidator(_not_one_as_float32)
]
"""A factor from 0 on and below 1 that becomes a float32, such as a momentum."""
PositiveDecay = Annotated[
    float, Field(gt=0, lt=1), _positive_from(SMALLEST_FLOAT32), AfterValidator(_not_one_as_float32)
]
"""A factor above 0 and below 1 that becomes a float32."""
Layers = Annotated[int, Field(ge=1, le=1000)]
"""The number of equal layers of a model, which torch makes one by one."""
