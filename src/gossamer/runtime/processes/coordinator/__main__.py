"""The process of a coordinator: ``python -m gossamer.runtime.processes.coordinator CHANNEL MEMORY PARENT``."""

from __future__ import annotations

import gc
import sys

from gossamer.runtime.processes.system import die_with

if __name__ == "__main__":
    channel, memory, parent = (int(argument) for argument in sys.argv[1:4])
    die_with(parent)  # before the imports, which take seconds
    gc.disable()  # nothing that is imported is garbage, and to look for it takes a fifth of the time
    from gossamer.runtime.processes.coordinator.coordinator import serve

    gc.enable()
    serve(channel, memory)
