"""Where tables are printed for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_ANY_WIDTH = 100_000


def table_console() -> Console:
    """Standard output: a terminal has its width, and the lines of a file or a pipe are as long as they need to be."""
    from rich.console import Console

    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _ANY_WIDTH)
