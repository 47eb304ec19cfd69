"""gossamer: decentralized learning. Write an algorithm once; simulate it in virtual time; run it over TCP."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gossamer import numerics

if TYPE_CHECKING:
    from gossamer.algorithms import Algorithm
    from gossamer.api import resume, run
    from gossamer.codecs import Codec
    from gossamer.config import Experiment
    from gossamer.errors import BadInput, Deadlock, GossamerError, RunFailed
    from gossamer.messages.tags import Message, Model, Part
    from gossamer.node import Node, NodeWrapper, PeerLost
    from gossamer.results.run import Run, load_run, load_runs
    from gossamer.results.trackers import Tracker
    from gossamer.sweep.execute import run_sweep
    from gossamer.sweep.sweep import Sweep
    from gossamer.tasks import Poison, Task

__version__ = "0.1.0"

# Before anything imports torch: the bits of a run must not depend on memory alignment.
numerics.set_default_mode()

# Imported on first use, so that `gossamer --help` does not wait for torch.
_HOMES = {
    "Algorithm": "gossamer.algorithms",
    "BadInput": "gossamer.errors",
    "Codec": "gossamer.codecs",
    "Deadlock": "gossamer.errors",
    "Experiment": "gossamer.config",
    "GossamerError": "gossamer.errors",
    "Message": "gossamer.messages.tags",
    "Model": "gossamer.messages.tags",
    "Node": "gossamer.node",
    "NodeWrapper": "gossamer.node",
    "Part": "gossamer.messages.tags",
    "PeerLost": "gossamer.node",
    "Poison": "gossamer.tasks",
    "Run": "gossamer.results.run",
    "RunFailed": "gossamer.errors",
    "Sweep": "gossamer.sweep.sweep",
    "Task": "gossamer.tasks",
    "Tracker": "gossamer.results.trackers",
    "load_run": "gossamer.results.run",
    "load_runs": "gossamer.results.run",
    "resume": "gossamer.api",
    "run": "gossamer.api",
    "run_sweep": "gossamer.sweep.execute",
}

__all__ = [
    "Algorithm",
    "BadInput",
    "Codec",
    "Deadlock",
    "Experiment",
    "GossamerError",
    "Message",
    "Model",
    "Node",
    "NodeWrapper",
    "Part",
    "PeerLost",
    "Poison",
    "Run",
    "RunFailed",
    "Sweep",
    "Task",
    "Tracker",
    "load_run",
    "load_runs",
    "resume",
    "run",
    "run_sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
