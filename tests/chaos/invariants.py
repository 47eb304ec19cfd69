"""Invariants of the record of every run, under any disturbance. Each gives one line for each violation."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chaos.schedule import Schedule
from gossamer import Run
from gossamer.messages.tags import Traffic
from gossamer.results.verify import problems_of
from gossamer.runtime.setup import prepare

COUNTERS = tuple(counter.name for counter in fields(Traffic))
NAMES_A_FAULT = re.compile(r"no node is left|No space left on device|can't be written")
"""The errors with which a run may fail."""
TAKES_PART, CHECKPOINT = (
    re.compile(r"takes part from round (\d+) on"),
    re.compile(r"checkpoint of round (\d+)$"),
)


@dataclass(eq=False)
class Record:
    """The record of a run: rows, events, and final models. ``folder`` is None if nothing was written."""

    status: str
    error: str | None
    parameters: Tensor | None
    metrics: Sequence[Mapping[str, Any]]
    happened: Sequence[Mapping[str, Any]]
    virtual: bool = True
    folder: Path | None = None
    rows: dict[int, list[Mapping[str, Any]]] = field(init=False)  # by node, in order of its clock
    events: dict[int, list[tuple[float, str, str]]] = field(init=False)  # by node: time, kind and detail

    def __post_init__(self) -> None:
        self.rows, self.events = defaultdict(list), defaultdict(list)
        for row in sorted(self.metrics, key=itemgetter("time_s", "round")):
            self.rows[row["node"]].append(row)
        for event in self.happened:
            rank = -1 if event["node"] is None else event["node"]
            self.events[rank].append((event["time_s"], event["event"], event["detail"]))

    @classmethod
    def of(cls, run: Run) -> Record:
        tables = run.metrics.to_dicts(), run.events.to_dicts()
        return cls(run.status, run.error, run.parameters, *tables, run.virtual, run.path)

    @property
    def away(self) -> set[int]:
        """The nodes that are absent at the end without having left gracefully: their models are unknown."""
        moves, last = ("lost", "left", "absent", "joined", "returned", "found"), {}
        for rank, events in self.events.items():
            last[rank] = [kind for _, kind, _ in events if kind in moves][-1:]
        return {rank for rank, kinds in last.items() if kinds in (["lost"], ["absent"])}


def violations(schedule: Schedule, run: Record) -> list[str]:
    """The violations of a run, one line each."""
    return [f"{check.__name__}: {line}" for check in INVARIANTS for line in check(schedule, run)]


def ends_as_stated(schedule: Schedule, run: Record) -> Iterator[str]:
    failed = run.status == "failed" and NAMES_A_FAULT.search(run.error or "") and "\n" not in str(run.error)
    if not failed and (run.status != "done" or run.parameters is None):
        yield f"{run.status}: {run.error}"
    if run.folder is not None:
        yield from problems_of(run.folder)


def rows_once_and_in_order(schedule: Schedule, run: Record) -> Iterator[str]:
    """Rounds increase by one, except for those that an absent node misses; undisturbed nodes have all."""
    nodes, last = range(schedule.fields["nodes"]), schedule.fields["stop"].get("rounds")
    for rank, rows in run.rows.items():
        keys = [(row["round"], row["moment"]) for row in rows]
        if len(set(keys)) < len(keys):
            yield f"node {rank} has a row twice: {keys}"
    for rank in nodes if run.status == "done" else ():
        if not (run.rows[rank] or run.events[rank]):
            yield f"no row of node {rank}"
    for rank in nodes:
        rows, events = [row for row in run.rows[rank] if "round" in row["moment"]], run.events[rank]
        returns = {detail.rpartition(" from round ")[2] for _, _, detail in events}
        for before, row in pairwise(rows):
            after = row["round"] - before["round"]
            if after < 1 or (after > 1 and f"{row['round'] - 1} on" not in returns):
                yield f"node {rank} goes from round {before['round']} to {row['round']} at {row['time_s']:.3f} s"
        if last and (furthest := max((row["round"] for row in run.rows[rank]), default=0)) > last:
            yield f"node {rank} has a row of round {furthest} of {last}"
        undisturbed = {kind for _, kind, _ in events} <= {"slowed", "full-speed", "slow"}
        if undisturbed and run.status == "done" and last and rows[-1:] and rows[-1]["round"] != last:
            yield f"node {rank} ends after round {rows[-1]['round']} of {last}"


def clocks_and_counters_go_on(schedule: Schedule, run: Record) -> Iterator[str]:
    # (The clocks of real nodes stop during evaluations.)
    names = (*COUNTERS, *(["wall_s"] if run.virtual else []))
    for rank in range(schedule.fields["nodes"]):
        for before, row in pairwise(run.rows[rank]):
            for name in names:
                if row[name] < before[name]:
                    yield f"node {rank}: {name} goes from {before[name]} back to {row[name]} in round {row['round']}"


def rows_show_the_last_model(schedule: Schedule, run: Record) -> Iterator[str]:
    """A row shows the model with which the node's last round ended, or with which the node began. Back from a checkpoint, it
    shows the checkpoint's until it has completed a round, and only then its round goes back."""
    for rank in range(schedule.fields["nodes"]):
        rows, first, began, saved = run.rows[rank], 0, {0}, []
        for _, kind, detail in run.events[rank]:
            if found := TAKES_PART.search(detail):
                first = int(found[1])
            if kind == "begins" and (found := CHECKPOINT.search(detail)):
                saved.append(int(found[1]))
            elif kind == "begins":
                began.add(first)
        completed = {row["round"]: _completed_s(row) for row in rows if "round" in row["moment"]}
        checkpoints = iter(saved)
        for before, row in pairwise(rows):
            round = row["round"]
            if round < before["round"] and round not in checkpoints:  # the iterator passes the earlier ones
                yield f"node {rank}: round goes from {before['round']} back to {round} at {row['time_s']:.3f} s"
        for row in rows:
            # (A node that has ended its rounds may still average with others, and is shown as it is.)
            round, ended = row["round"], row["round"] == schedule.fields["stop"].get("rounds")
            off = abs(_completed_s(row) - completed.get(round, math.inf))
            if "tick" in row["moment"] and off > 1e-6 and round not in began and not ended:
                yield f"node {rank} shows at {row['time_s']:.3f} s a model of {_completed_s(row):.3f} s as that of round {round}"


def _completed_s(row: Mapping[str, Any]) -> float:
    """When the shown model was complete."""
    return float(row["time_s"] - row["model_age_s"])


def messages_add_up(schedule: Schedule, run: Record) -> Iterator[str]:
    """Every sent message has arrived, is lost, or is under way, briefly; every arrived one was taken or dropped, or waits."""
    instants: dict[tuple[float, str], list[Mapping[str, Any]]] = defaultdict(list)
    for rank in range(schedule.fields["nodes"]):
        # (A node that starts from a checkpoint takes the checkpoint's messages again.)
        again = any(kind == "begins" and "checkpoint" in detail for _, kind, detail in run.events[rank])
        for row in run.rows[rank]:
            if run.virtual and row["moment"] != "round":
                instants[row["time_s"], row["moment"]].append(row)
            used = sum(row[f"messages_{name}"] for name in ("taken", "late", "superseded", "refused"))
            left = row["messages_received"] - used
            settled = schedule.synchronous and schedule.lossless and run.virtual
            if (left < 0 and not again) or (
                left and settled and row["round"] == schedule.fields["stop"]["rounds"]
            ):
                yield f"node {rank} has received {used + left} messages and used {used} in round {row['round']}"
    under_way = 0
    soon = schedule.fields["network"]["bandwidth_mbps"] is None and "freeze" not in schedule.kinds
    for (time_s, moment), rows in sorted(instants.items()):
        if len(rows) < schedule.fields["nodes"]:
            under_way = 0
            continue
        sent, received, lost = (
            sum(row[f"messages_{name}"] for row in rows) for name in ("sent", "received", "lost")
        )
        if received + lost > sent or (lost and schedule.lossless):
            yield f"{sent} messages were sent by {time_s:g} s, {received} received and {lost} lost"
        if "tick" in moment:
            if soon and received + lost < under_way:
                yield f"{under_way} messages were sent long before {time_s:g} s, {received} received and {lost} lost"
            under_way = sent


def models_stay_sums(schedule: Schedule, run: Record) -> Iterator[str]:
    """Models of present nodes are finite; without training, mixing keeps their mean, or stays within their range."""
    if run.parameters is None:
        return
    models, nodes = run.parameters.double(), range(len(run.parameters))
    for rank in nodes:
        # (A real node may be killed after it has delivered its model.)
        known = bool(models[rank].isfinite().all())
        if known == (rank in run.away) and (run.virtual or not known):
            yield f"the model of node {rank}: {models[rank].tolist()}, and nodes {run.away} are away"
    if not schedule.frozen:
        return
    setup = prepare(schedule.experiment("simulate"))
    initial = torch.stack([setup.initial(rank).parameters for rank in nodes]).double()
    present = models[models.isfinite().all(dim=1)]
    over = torch.maximum(initial.amin(0) - present, present - initial.amax(0)).flatten().tolist()
    if schedule.has_property("averages") and max(over, default=0.0) > 1e-5:
        yield f"a model lies {max(over):.2g} outside of the initial ones"
    off = float((models.mean(0) - initial.mean(0)).abs().max())
    if (
        schedule.has_property("keeps")
        and schedule.lossless
        and "rounds" in schedule.fields["stop"]
        and off > 1e-5
    ):
        yield f"the mean of all models is off by {off:.2g}"


INVARIANTS = (
    ends_as_stated,
    rows_once_and_in_order,
    clocks_and_counters_go_on,
    rows_show_the_last_model,
    messages_add_up,
    models_stay_sums,
)


def differences(first: Record, second: Record, *tables: str) -> Iterator[str]:
    """The differences between two runs that must agree bitwise; rows of the named tables are compared without real times."""
    if first.parameters is None or second.parameters is None:
        if first.status != second.status:
            yield f"one run is {first.status}, the other one {second.status}"
    elif not torch.equal(first.parameters.nan_to_num(7.0), second.parameters.nan_to_num(7.0)):
        yield "two runs have other models"
    for name in tables:
        left, right = (
            sorted(repr({**row, "wall_s": 0.0}) for row in getattr(record, name))
            for record in (first, second)
        )
        if left != right:
            yield f"two runs have other rows ({name})"
