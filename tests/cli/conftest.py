"""The experiment that the commands run."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import SMALL


@pytest.fixture(autouse=True)
def small(tmp_path: Path) -> None:
    """An experiment in the folder in which gossamer runs."""
    (tmp_path / "small.yaml").write_text(SMALL)
