"""gossamer: decentralized learning. Write an algorithm once; simulate it in virtual time; run it over TCP."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gossamer import numerics
from gossamer.version import __version__ as __version__

if TYPE_CHECKING:
    from gossamer.algorithms import Algorithm as Algorithm
    from gossamer.api import resume as resume
    from gossamer.api import run as run
    from gossamer.codecs import Codec as Codec
    from gossamer.config import Experiment as Experiment
    from gossamer.errors import BadInput as BadInput
    from gossamer.errors import Deadlock as Deadlock
    from gossamer.errors import GossamerError as GossamerError
    from gossamer.errors import RunFailed as RunFailed
    from gossamer.messages.tags import Message as Message
    from gossamer.messages.tags import Model as Model
    from gossamer.messages.tags import Part as Part
    from gossamer.node import Inbox as Inbox
    from gossamer.node import Measure as Measure
    from gossamer.node import Measurement as Measurement
    from gossamer.node import Middleware as Middleware
    from gossamer.node import Node as Node
    from gossamer.node import NodeProxy as NodeProxy
    from gossamer.node import NodeWrapper as NodeWrapper
    from gossamer.node import PeerLost as PeerLost
    from gossamer.results.observer import Observer as Observer
    from gossamer.results.run import Run as Run
    from gossamer.results.run import load_run as load_run
    from gossamer.results.run import load_runs as load_runs
    from gossamer.results.trackers import Tracker as Tracker
    from gossamer.sweep.execute import run_sweep as run_sweep
    from gossamer.sweep.sweep import Sweep as Sweep
    from gossamer.tasks import Poison as Poison
    from gossamer.tasks import Task as Task

# Before anything imports torch: the bits of a run must not depend on memory alignment.
numerics.set_default_mode()

# Imported on first use, so that `gossamer --help` does not wait for torch.
_NAMES = {
    "gossamer.algorithms": ("Algorithm",),
    "gossamer.api": ("resume", "run"),
    "gossamer.codecs": ("Codec",),
    "gossamer.config": ("Experiment",),
    "gossamer.errors": ("BadInput", "Deadlock", "GossamerError", "RunFailed"),
    "gossamer.messages.tags": ("Message", "Model", "Part"),
    "gossamer.node": (
        "Inbox",
        "Measure",
        "Measurement",
        "Middleware",
        "Node",
        "NodeProxy",
        "NodeWrapper",
        "PeerLost",
    ),
    "gossamer.results.observer": ("Observer",),
    "gossamer.results.run": ("Run", "load_run", "load_runs"),
    "gossamer.results.trackers": ("Tracker",),
    "gossamer.sweep.execute": ("run_sweep",),
    "gossamer.sweep.sweep": ("Sweep",),
    "gossamer.tasks": ("Poison", "Task"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
