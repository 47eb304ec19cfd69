"""The experiment file of the command tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import SMALL


@pytest.fixture(autouse=True)
def small(tmp_path: Path) -> None:
    """Write small.yaml into the working directory."""
    (tmp_path / "small.yaml").write_text(SMALL)
