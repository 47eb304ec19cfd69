"""The interface of an engine, the signals that end its run, and its result."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from gossamer.config import Experiment
from gossamer.config.experiment import Stop
from gossamer.errors import PeerFailure, RecordError, RunFailed, begin_at_own_line, cause, running
from gossamer.faults import FaultSchedule
from gossamer.fingerprint import Fingerprint
from gossamer.messages.tags import Traffic
from gossamer.results.checkpoints import RunCheckpoint
from gossamer.results.folder import RunFolder
from gossamer.results.observer import Observer
from gossamer.results.schema import Totals

_MAX_NAMED = 16  # ranks named for one wait
_MAX_CLAUSES = 5  # waits described


SILENT_ROUNDS = 1000
_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""The signal of a terminal that was closed; Windows has none."""


def nothing_sent(stop: Stop, sent: float, rounds: float) -> RunFailed | None:
    """The failure of a run that only bytes can end, if nodes have completed this many rounds (on average) and sent none."""
    if sent or not stop.bytes_alone or rounds < SILENT_ROUNDS:
        return None
    text = f"no node has sent a byte in {SILENT_ROUNDS} rounds, and stop has bytes alone, so the run would never end"
    return RunFailed(f"{text}; accepted: stop.rounds or stop.time_s as well")


def nobody_took_part(experiment: Experiment, outcome: Outcome, steps: Callable[[], int]) -> RunFailed | None:
    """The failure of a run in which no node took a step or sent a message, and each of them is away at times. (A node that is
    always present is slow, which is no failure. Rounds don't tell, since a node that returns goes on in a later one.)
    ``steps`` counts those that are recorded."""
    if outcome.totals is None or outcome.totals["messages_sent"] or outcome.reason in ("stopped", "failed"):
        return None
    affected = FaultSchedule(experiment.faults, experiment.nodes, experiment.seed).affected
    if len(affected) < experiment.nodes or steps():
        return None
    return RunFailed(
        f"no node took a step or sent a message in {outcome.time_s:g} s: the faults let none be present for long enough;"
        " accepted: a later end, or nodes that are present for longer"
    )


def add_up(
    time_s: float,
    traffic: Iterable[Traffic],
    rounds: Iterable[int],
    present: Iterable[int],
    *,
    exact: bool = True,
) -> Totals:
    """The totals of a run that ends at ``time_s``, from each node's traffic. ``rounds`` are those that each node has
    completed, and ``present`` those of the nodes that are present at the end."""
    total = Traffic()
    for counters in traffic:
        total.add(counters)
    used = total.messages_taken + total.messages_late + total.messages_superseded + total.messages_refused
    return {
        **asdict(total),  # type: ignore[typeddict-item]
        "messages_in_flight": max(total.messages_sent - total.messages_received - total.messages_lost, 0),
        "messages_unread": max(total.messages_received - used, 0),
        "time_s": time_s,
        "rounds_most": max(rounds, default=None),
        "rounds_least": min(present, default=None),
        "exact": exact,
    }


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of an engine."""

    reason: str  # "rounds", "time", "bytes", "target", "diverged", "stopped" (by the user) or "failed"
    time_s: float  # the engine's clock at the end, seconds
    wall_s: float  # real seconds
    parameters: Float[Tensor, "nodes params"] | None  # of every node; None if it failed before its end
    buffers: Float[Tensor, "nodes buffers"] | None  # of every node, if there are any
    failure: RunFailed | None  # the cause if the reason is "failed"
    trainer: str  # the trainer's name
    totals: Totals | None = None  # counted by the engine
    # Real seconds by part ("train", "mix", "evaluate", "record"); the rest of wall_s is event handling.
    profile: Mapping[str, float] = field(default_factory=dict)
    peak_vectors: int | None = None  # most parameter vectors that existed at once, if counted
    # Bytes that a node's process shared with no other at its end: "mean" and "max" over the nodes.
    private_bytes: Mapping[str, float] | None = None


@runtime_checkable
class Engine(Protocol):
    """Runs an experiment. The constructor loads and checks everything, so that it rejects bad input early."""

    description: dict[str, Any]
    """See ``Setup.description``."""
    fingerprint: Fingerprint
    """See ``Setup.fingerprint``."""

    def run(self, folder: RunFolder, observer: Observer, checkpoint: RunCheckpoint | None = None) -> Outcome:
        """Run to the end and record into ``folder``. With ``checkpoint``, resume from it; the record
        has been rewound to it."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *_: object) -> None:
        """End the engine's processes and threads. A second call does nothing."""


@contextmanager
def ending_signals(
    stop: Callable[[], object],
    say: Callable[[str], object],
    what: str = "the run ends and keeps its record",
) -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP (a closed terminal, unless this process ignores it, as with nohup) end the run
    gracefully, with its results; a second signal interrupts at once. ``say`` tells the user so at the first one, also while
    an algorithm keeps running and so keeps the run from ending. ``what`` happens then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if _HANGUP is not None and signal.getsignal(_HANGUP) is not signal.SIG_IGN:
        before[_HANGUP] = signal.getsignal(_HANGUP)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        if number == _HANGUP:  # a closed session may send a second one, from its shell and from the system
            del before[signal.SIGHUP]
            signal.signal(number, signal.SIG_IGN)
        stop()
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        with suppress(OSError, RuntimeError):  # RuntimeError: the signal came while a line was being printed
            say(f"{name}: {what}; once more ends it at once{running(frame)}")

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
    """Describe in one line what ranks wait for, and which protocols have returned (rank -> rounds)."""
    alike: dict[str, list[str]] = {}  # text -> the ranks that it describes
    for rank, messages in sorted(waits.items()):
        if messages:
            alike.setdefault(f"for {'; '.join(messages)}", []).append(str(rank))
    if not alike:
        alike["for something other than a message: a timer, a computation or a task"] = []
    for rank, count in sorted(returned.items()):
        alike.setdefault(f"returned after {count} rounds", []).append(str(rank))
    texts = []
    for text, ranks in alike.items():
        more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
        named = f"node{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:_MAX_NAMED])}{more} " if ranks else ""
        texts.append(named + text)
    left = [f"and {len(texts) - _MAX_CLAUSES} more waits"] if len(texts) > _MAX_CLAUSES else []
    return "; ".join(texts[:_MAX_CLAUSES] + left)


def describe_failure(error: BaseException, rank: int, round: int | None) -> RunFailed:
    """An error that names the node, the round (None: at start) and the cause, and carries the traceback."""
    if isinstance(error, RecordError) or (isinstance(error, RunFailed) and error.node is not None):
        return error
    begin_at_own_line(error)
    text = "" if isinstance(error, PeerFailure) else "".join(traceback.format_exception(error))
    where = "at start" if round is None else f"in round {round}"
    message = f"node {rank} failed {where}: {cause(error)}"
    return RunFailed(message, node=rank, round=round, traceback=text)
