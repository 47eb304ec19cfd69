"""The process of a fork server: ``python -m gossamer.runtime.processes.worker SOCKET PARENT``."""

from __future__ import annotations

import gc
import sys

from gossamer.runtime.processes.system import die_with

if __name__ == "__main__":
    end, parent = (int(argument) for argument in sys.argv[1:3])
    die_with(parent)  # before the imports, which take seconds
    gc.disable()  # imports leave no garbage, and the search for it takes a fifth of the time
    from gossamer.runtime.processes.worker.worker import serve

    gc.enable()
    serve(end)
