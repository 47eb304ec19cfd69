"""What nodes may report in a run, as far as the schemas of their messages (``protocol``) can't say it.

Whatever passes leaves a record that can be read: the rows of a run fit into a table, belong to nodes where they live, and
have numbers where readers expect them. A node may still report wrong values within these limits."""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import polars as pl

from gossamer import files
from gossamer.node.node import ROW_COLUMNS
from gossamer.results.checkpoints import RunCheckpoint
from gossamer.results.reading import METRICS, TRAFFIC
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.protocol import Violation
from gossamer.runtime.setup import Setup

SKEW_S = 60.0
"""Seconds by which a node's clock may be ahead of the coordinator's, in addition to ``failures.detection_s``."""
FASTEST = 10**6
"""Most rounds that a node can complete in a second."""
MAX_RECORDED = 5_000
"""Most columns of all rows together, beyond those of every row and of the evaluation sets. A report takes some 50 ms
for each."""
MAX_EVENTS = 10_000
"""Most events of one node that are recorded."""


class Checks:
    """The checks of one run, which resumes from ``checkpoint``, if given. Nodes on this machine (``local``) may listen on
    loopback only."""

    def __init__(self, setup: Setup, checkpoint: RunCheckpoint | None, *, local: bool) -> None:
        experiment = setup.experiment
        self._nodes, self._local = experiment.nodes, local
        self._began = time.monotonic()
        self._ahead_s = SKEW_S + experiment.failures.detection_s
        self._before_s, self._wall_before_s, self._rounds_before = 0.0, 0.0, 0
        if checkpoint is not None:
            self._before_s, self._wall_before_s = max(checkpoint.times_s.values()), checkpoint.wall_s
            self._rounds_before = max(checkpoint.rounds.values())
        self._evaluated = ("test_", *setup.set_prefixes)
        measures = setup.metrics
        self._numbers = {prefix + name for prefix in setup.set_prefixes for name in measures.numbers()}
        values = {column for name in measures.names for column in measures.columns.get(name, (name,))}
        self._known = {
            *METRICS,
            *TRAFFIC,
            *(prefix + name for prefix in setup.set_prefixes for name in values),
        }
        self._columns = set(self._known)
        self._rows: Counter[int] = Counter()  # by rank
        self._events: Counter[int] = Counter()

    def resume(self, metrics: pl.DataFrame) -> None:
        """Count the rows on record."""
        self._columns |= set(metrics.columns)
        self._rows = Counter(metrics["node"].to_list())

    def check(self, rank: int, message: protocol.FromProcess) -> None:
        """Raise Violation for a message that node ``rank`` can't have sent in this run."""
        match message:
            case protocol.Ready(host=host):
                if self._local and not ipaddress.ip_address(host).is_loopback:
                    raise Violation(f"the address {host} of node {rank}; accepted: loopback on one machine")
            case protocol.Progress(round=round, time_s=time_s) | protocol.Saved(round=round, time_s=time_s):
                self._check_time(rank, round, time_s, self._before_s)
            case protocol.Done(round=round) | protocol.FinalModel(round=round):
                self._check_time(rank, round, 0.0, 0.0)
            case protocol.CurrentRound(round=round, rank=about):
                self._check_time(rank, round, 0.0, 0.0)
                self._check_ranks(rank, about)
            case protocol.Unreachable(rank=peer) | protocol.Reached(rank=peer):
                self._check_ranks(rank, peer)
            case protocol.Marked(sent=sent):
                self._check_ranks(rank, *sent)
            case protocol.Row():
                self._check_row(rank, message)

    def records(self, rank: int) -> bool | None:
        """Whether one more event of a node is recorded; None for the first one that is not."""
        self._events[rank] += 1
        return None if self._events[rank] == MAX_EVENTS + 1 else self._events[rank] <= MAX_EVENTS

    def _check_time(self, rank: int, round: int, time_s: float, before_s: float) -> None:
        passed_s = time.monotonic() - self._began + self._ahead_s
        if time_s > before_s + passed_s:
            raise Violation(
                f"{time_s:g} s on the clock of node {rank}; accepted: at most {before_s + passed_s:.0f} s by now"
            )
        if round > self._rounds_before + FASTEST * passed_s:
            raise Violation(f"round {round} of node {rank}, which no node can have reached")

    def _check_ranks(self, rank: int, *named: int) -> None:
        if (highest := max(named, default=0)) >= self._nodes:
            raise Violation(f"a message of node {rank} about node {highest} of {self._nodes}")

    def _check_row(self, rank: int, message: protocol.Row) -> None:
        values = message.values
        self._check_time(rank, values.round, values.time_s, self._before_s)
        self._check_time(rank, values.round, values.wall_s, self._wall_before_s)
        if len(view := message.view or ()) > self._nodes:
            raise Violation(f"a view of node {rank} with {len(view):,} of {self._nodes:,} nodes")
        self._check_ranks(rank, *view)
        if values.model_age_s > values.time_s:
            raise Violation(f"a model of node {rank} that is older than the run")
        self._check_columns(rank, message.columns)
        self._rows[rank] += 1
        # The network has rows, too.
        most = files.MAX_VALUES // ((self._nodes + 1) * len(self._columns))
        if self._rows[rank] > most:
            raise Violation(
                f"row {most + 1:,} of node {rank}; accepted: {most:,} rows, so that a table of {len(self._columns):,}"
                f" columns and {self._nodes:,} nodes can be read"
            )

    def _check_columns(self, rank: int, columns: Mapping[str, Any]) -> None:
        for name, value in columns.items():
            if name in ROW_COLUMNS and name != "test_loss":
                raise Violation(f"two columns {name!r} of node {rank}")
            if name in self._numbers:
                accepted = isinstance(value, int | float | None)
            else:
                accepted = not name.startswith(self._evaluated) or _are_numbers(value)
            if not accepted:
                raise Violation(f"a {type(value).__name__} of node {rank} in {name!r}; accepted: numbers")
        if new := columns.keys() - self._columns:
            if len(self._columns) + len(new) > len(self._known) + MAX_RECORDED:
                raise Violation(
                    f"new columns of node {rank}; accepted: {MAX_RECORDED:,} recorded columns in all"
                )
            self._columns |= new


def _are_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_are_numbers, value))
    return isinstance(value, int | float | None)
