"""What the tests of deployments share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Fleet, Forker


@pytest.fixture(scope="package")
def forker() -> Iterator[Forker]:
    """One process that has imported everything, for all tests here."""
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def made(forker: Forker, tmp_path: Path) -> Iterator[Fleet]:
    """Processes in the test's own folder; none of them is left afterwards."""
    fleet = Fleet(forker, tmp_path)
    try:
        yield fleet
    finally:
        fleet.close()
