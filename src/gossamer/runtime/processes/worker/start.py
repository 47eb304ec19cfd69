"""The start of a fork server's process."""

from __future__ import annotations

import gc
import sys

from gossamer.runtime.processes.system import die_with
from gossamer.startup import begin


def main() -> None:
    """The program of a fork server; its arguments are the number of its socket and the process id of its parent."""
    end, parent = (int(argument) for argument in sys.argv[1:3])
    die_with(parent)  # before the imports, which take seconds
    begin()
    gc.disable()  # imports leave no garbage, and the search for it takes a fifth of the time
    from gossamer.runtime.processes.worker.worker import serve

    gc.enable()
    serve(end)
