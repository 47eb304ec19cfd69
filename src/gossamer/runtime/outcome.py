"""How a run ended."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from gossamer.errors import RunFailed, cause

_MOST_NAMED = 16
"""Ranks that are named of those that wait for the same."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an engine hands back.

    Args:
        reason: "rounds", "time", "target", "stopped" (by the user) or "failed".
        time_s: the engine's clock at the end, seconds.
        wall_s: real seconds.
        parameters: every node's parameters [nodes, P]; None after a failure.
        buffers: every node's buffers [nodes, B], if there are any.
        failure: why, for "failed".
        trainer: which trainer computed.
        profile: real seconds by part ("train", "mix", "evaluate", "record"); the rest of ``wall_s`` are events.
        peak_vectors: the most parameter vectors that were alive at once; None if they are not counted.
        private_bytes: memory that a node's process shared with no other at its end, "mean" and "max" over the nodes.
        link_shares: how much of the shared links was used, "mean" and "max" over those that carried anything.
        execution: of "train" and "evaluate", how many shapes of input ran as recorded operations ("recorded") and through
            Python ("eager: ..."), see :meth:`~gossamer.learning.capture.Captured.forms`; of "mix", how many sums were
            computed together and one at a time.
    """

    reason: str
    time_s: float
    wall_s: float
    parameters: Float[Tensor, "nodes params"] | None
    buffers: Float[Tensor, "nodes buffers"] | None
    failure: RunFailed | None
    trainer: str
    profile: Mapping[str, float] = field(default_factory=dict)
    peak_vectors: int | None = None
    private_bytes: Mapping[str, float] | None = None
    link_shares: Mapping[str, float] | None = None
    execution: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def describe_waits(waits: Mapping[int, list[str]], returned: Mapping[int, int] | None = None) -> str:
    """What each of some ranks waits for, in one line, and which protocols have returned (rank -> rounds)."""
    alike: dict[str, list[int]] = {}  # what is waited for -> the ranks that wait for it
    for rank, each in sorted(waits.items()):
        if each:
            alike.setdefault("; ".join(each), []).append(rank)
    waiting = [f"{_nodes(ranks)} for {text}" for text, ranks in alike.items()]
    gone = [
        f"node {rank} has returned after {count} rounds" for rank, count in sorted((returned or {}).items())
    ]
    said = _first(20, waiting) or "for something that is not a message"
    return f"{said}; {_first(5, gone)}" if gone else said


def _nodes(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"node{'s' if len(ranks) > 1 else ''} {named}{more}"


def _first(most: int, texts: list[str]) -> str:
    more = f" (and {len(texts) - most} more)" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def describe_failure(error: BaseException, rank: int, round: int) -> RunFailed:
    """One clear error that names the node, the round and the cause; the traceback goes with it."""
    if isinstance(error, RunFailed) and error.node is not None:
        return error
    text = "".join(traceback.format_exception(error))
    return RunFailed(
        f"node {rank} failed in round {round}: {cause(error)}", node=rank, round=round, traceback=text
    )
