"""The interface of an engine, the signals that end its run, and its result."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from gossamer.errors import PeerFailure, RecordError, RunFailed, cause
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.recording import Observer

_MOST_NAMED = 16  # ranks that are named of those that wait for the same, and different waits


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of an engine."""

    reason: str  # "rounds", "time", "bytes", "target", "diverged", "stopped" (by the user) or "failed"
    time_s: float  # the engine's clock at the end, seconds
    wall_s: float  # real seconds
    parameters: Float[Tensor, "nodes params"] | None  # of every node; None after a failure
    buffers: Float[Tensor, "nodes buffers"] | None  # of every node, if there are any
    failure: RunFailed | None  # why, for "failed"
    trainer: str  # which trainer computed
    # Real seconds by part ("train", "mix", "evaluate", "record"); the rest of wall_s are events.
    profile: Mapping[str, float] = field(default_factory=dict)
    peak_vectors: int | None = None  # the most parameter vectors that existed at once, if they are counted
    # Memory that a node's process shared with no other at its end, "mean" and "max" over the nodes.
    private_bytes: Mapping[str, float] | None = None


@runtime_checkable
class Engine(Protocol):
    """Carries an experiment out. Its construction loads and checks everything, so that bad input is found before work
    starts."""

    description: dict[str, Any]
    """The record of the start; see ``Setup.description``."""

    def run(self, folder: RunFolder, observer: Observer, cut: Cut | None = None) -> Outcome:
        """Run to the end, recording into a folder; from a checkpoint on, to which its record is rewound, if one is given."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *_: object) -> None:
        """End all that works for it; a second time does nothing."""


@contextmanager
def ending_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run in order, with its results; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: object) -> None:
        restore()
        stop()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


def describe_waits(waits: Mapping[int, list[str]], returned: Mapping[int, int]) -> str:
    """The waits of some ranks, in one line, and the protocols that have returned (rank -> rounds)."""
    alike: dict[str, list[str]] = {}  # what is said -> the ranks that it is said of
    for rank, each in sorted(waits.items()):
        if each:
            alike.setdefault(f"for {'; '.join(each)}", []).append(str(rank))
    if not alike:
        alike["for something that is not a message"] = []
    for rank, count in sorted(returned.items()):
        alike.setdefault(f"returned after {count} rounds", []).append(str(rank))
    said = []
    for text, ranks in alike.items():
        more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        named = (
            f"node{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:_MOST_NAMED])}{more} " if ranks else ""
        )
        said.append(named + text)
    return "; ".join(said[:_MOST_NAMED])


def describe_failure(error: BaseException, rank: int, round: int | None) -> RunFailed:
    """One clear error that names the node, the round (None: it starts) and the cause; the traceback goes with it."""
    if isinstance(error, RecordError) or (isinstance(error, RunFailed) and error.node is not None):
        return error
    text = "" if isinstance(error, PeerFailure) else "".join(traceback.format_exception(error))
    where = "at start" if round is None else f"in round {round}"
    said = f"node {rank} failed {where}: {cause(error)}"
    return RunFailed(said, node=rank, round=round, traceback=text)
