"""Settings of all tests of sweeps."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    """A run clears the heap before it starts: a tenth of a second among all that the tests have imported."""
    with mock.patch("gc.collect"):
        yield
