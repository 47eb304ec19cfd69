"""The ranges of numbers in an experiment. Each follows from what is done with the number: a time becomes whole nanoseconds in
63 bits, a number that meets parameters becomes a float32, and products of factors, bandwidths and times are finite."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LONGEST_ACCEPTED_S = 4e9
"""The longest time that an experiment accepts, in seconds: 126 years. Twice as much has less than 2^63 nanoseconds."""
LARGEST_FLOAT32 = 3.4028234663852886e38

Seconds = Annotated[float, Field(ge=0, le=LONGEST_ACCEPTED_S, allow_inf_nan=False)]
"""A time or a duration, in seconds."""
PositiveSeconds = Annotated[float, Field(gt=0, le=LONGEST_ACCEPTED_S, allow_inf_nan=False)]
"""A time or a duration above 0, in seconds."""
Factor = Annotated[float, Field(ge=1e-9, le=1e9)]
"""What multiplies or divides a time, a bandwidth or a score."""
LogDeviation = Annotated[float, Field(ge=0, le=100)]
"""The standard deviation of a logarithm, sigma in e^(sigma z)."""
LARGEST_MBPS = 1e12
Mbps = Annotated[float, Field(gt=0, le=LARGEST_MBPS)]
"""A bandwidth, 10^6 bits per second."""
Float32 = Annotated[float, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]
"""A number that becomes a float32."""
NonNegativeFloat32 = Annotated[float, Field(ge=0, le=LARGEST_FLOAT32)]
"""A number from 0 on that becomes a float32."""
PositiveFloat32 = Annotated[float, Field(gt=0, le=LARGEST_FLOAT32)]
"""A number above 0 that becomes a float32."""
Layers = Annotated[int, Field(ge=1, le=1000)]
"""The number of equal layers of a model, which torch makes one by one."""
