"""Putting together what nodes recorded, each on its own machine, into one run."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gossamer.deploy.damage import keep_aside
from gossamer.deploy.parts import Part, read_parts
from gossamer.errors import BadInput
from gossamer.results.folder import RunFolder, Status, write_json, write_text
from gossamer.results.recorder import consensus_distance
from gossamer.results.run import Run, load_run
from gossamer.runtime.recording import NETWORK

MODELS = "models.safetensors"


@dataclass(frozen=True)
class Collected:
    """What was put together.

    Args:
        run: the whole run.
        missing: ranks of which there is no record.
        incomplete: ranks that did not get to their end, as far as their records say, and why.
        damaged: ranks whose model can't be used, and why.
        files: all files that can't be used, and why; copies of them are in the run's folder ``damaged``.
    """

    run: Run
    missing: list[int]
    incomplete: dict[int, str]
    damaged: dict[int, str]
    files: dict[Path, str]

    @property
    def whole(self) -> bool:
        """Whether there is a record of every rank, and every file could be used."""
        return not (self.missing or self.files)


def collect(paths: Sequence[str | Path], out: str | Path, *, run: str | None = None) -> Collected:
    """Put the records of a run's nodes together.

    Records may be incomplete (their node was killed), missing, and several of one rank (it was started again): of rows of
    one round the newest record's count, and so does its model. Models of nodes that did not get to their end are NaN,
    and so are those that can't be read. Of a record that is damaged, what can be read counts; the damaged files are named, an
    event each, and kept aside. The run's folder appears when all of it is written.

    Args:
        paths: folders of nodes' records, or folders that these are in, as copied from several machines.
        out: the run folder to make.
        run: which run's records are taken, as ``gossamer node --run`` called it; None where there are those of one alone.

    Raises:
        BadInput: for folders without records that can be read or with those of several runs, and for a place that is taken.
    """
    place = Path(out)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise BadInput(f"--out {place}: there already; accepted: a new folder")
    with tempfile.TemporaryDirectory(prefix="gossamer-collect-") as scratch:
        parts, files = read_parts(paths, Path(scratch), run)
        return _collect(parts, files, place)


def _collect(parts: dict[int, list[Part]], files: dict[Path, str], place: Path) -> Collected:
    newest = {rank: parts[rank][-1] for rank in sorted(parts)}
    first = next(iter(newest.values()))
    nodes = first.node.nodes
    missing = [rank for rank in range(nodes) if rank not in parts]
    incomplete = {rank: _how(part.run) for rank, part in newest.items() if part.run.status != "done"}
    setup = _setup(newest.values())
    text = _experiment(parts)
    found, damaged = _models(newest, setup)
    rows = pl.concat([_rows(own) for _, own in sorted(parts.items())], how="diagonal_relaxed")
    lost = {rank: f"model of node {rank} left out: {why}" for rank, why in damaged.items()}
    events = _events(parts, missing, incomplete, lost)
    files |= {newest[rank].folder / MODELS: why for rank, why in damaged.items()}
    timelines = [
        part.run.timeline.filter(pl.col("node") == rank) for rank, own in parts.items() for part in own
    ]
    walls = [part.run.wall_s or 0.0 for part in newest.values()]
    failed = [f"node {rank} {how}" for rank, how in incomplete.items() if newest[rank].run.status == "failed"]
    stopped = any(part.run.status == "stopped" for part in newest.values())
    status: Status = "failed" if len(failed) == len(newest) else "stopped" if stopped else "done"
    with _whole(place) as beside:
        write_text(beside / "experiment.yaml", text)
        folder = RunFolder.open(beside)
        write_json(beside / "environment.json", _environment(first, newest))
        write_json(beside / "setup.json", setup)
        if found:
            parameters, buffers = _together(nodes, found)
            folder.write_models(parameters, buffers)
            network = _network_row(rows, parameters, setup.get("outcome_ranks", range(nodes)))
            rows = pl.concat([rows, network], how="diagonal_relaxed")
        rows.write_parquet(beside / "metrics.parquet")
        events.write_parquet(beside / "events.parquet")
        if any(len(timeline) for timeline in timelines):
            pl.concat(timelines, how="diagonal_relaxed").unique(maintain_order=True).write_parquet(
                beside / "timeline.parquet"
            )
        keep_aside(files, beside / "damaged")
        folder.write_status(status, error="; ".join(failed) or None, wall_s=max(walls))
    return Collected(load_run(place), missing, incomplete, damaged, files)


@contextmanager
def _whole(place: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``place`` when the block succeeds, and else is gone."""
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    beside.mkdir()
    try:
        yield beside
        beside.replace(place)
    except BaseException:
        shutil.rmtree(beside)
        raise


def _how(run: Run) -> str:
    """Why a record isn't that of a node that has completed its rounds."""
    if run.status == "failed":
        return f"failed: {run.error}"
    return "was stopped" if run.status == "stopped" else "was killed, or still runs"


def _rows(own: list[Part]) -> pl.DataFrame:
    """The rows of one node; where it was started again, up to the first round of which the newer record has a row the
    older one's. Times count from when its first process went."""
    kept: list[pl.DataFrame] = []
    begin = next((part.node.start_unix_s for part in own if part.node.start_unix_s is not None), None)
    before: float = math.inf
    for part in reversed(own):
        rows = part.run.metrics.filter(pl.col("node") == part.node.rank)
        later_s = (part.node.start_unix_s or begin or 0.0) - (begin or 0.0)
        if later_s:
            rows = rows.with_columns(pl.col("time_s", "wall_s") + later_s)
        kept.insert(0, rows.filter(pl.col("round") < before))
        if len(rows):
            before = min(before, int(rows["round"].min()))  # type: ignore[arg-type]
    return pl.concat(kept, how="diagonal_relaxed")


def _models(
    newest: dict[int, Part], setup: dict[str, Any]
) -> tuple[dict[int, dict[str, Tensor]], dict[int, str]]:
    """Each node's parameters [1, P], and buffers [1, B] if it has any; and of those whose file can't be used, why."""
    found: dict[int, dict[str, Tensor]] = {}
    damaged: dict[int, str] = {}
    accepted: dict[str, tuple[int, ...]] = {}
    if "parameters" in setup:
        accepted["parameters"] = (1, int(setup["parameters"]))
    for rank, part in newest.items():
        path = part.folder / MODELS
        if not (path.exists() or path.is_symlink()):
            continue
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            damaged[rank] = f"{path}: {error}"
            continue
        for name in ("parameters", "buffers"):
            shape = tuple(tensors[name].shape) if name in tensors else None
            if shape is None and name == "buffers":
                continue
            if shape is None or len(shape) != 2 or shape != accepted.setdefault(name, (1, shape[1])):
                damaged[rank] = f"{path}: {name} of shape {shape}; accepted: {accepted.get(name, '[1, P]')}"
        if rank not in damaged:
            found[rank] = tensors
    return found, damaged


def _together(nodes: int, found: dict[int, dict[str, Tensor]]) -> tuple[Tensor, Tensor | None]:
    """All nodes' parameters [nodes, P] and buffers [nodes, B], NaN where there are none."""
    together = []
    for name in ("parameters", "buffers"):
        width = max(tensors[name].shape[1] if name in tensors else 0 for tensors in found.values())
        rows = torch.full((nodes, width), math.nan)
        for rank, tensors in found.items():
            if name in tensors:
                rows[rank] = tensors[name][0]
        together.append(rows)
    return together[0], together[1] if together[1].shape[1] else None


def _network_row(rows: pl.DataFrame, parameters: Tensor, evaluated: Iterable[int]) -> pl.DataFrame:
    """How far the models are apart at the end, of the nodes that got there."""
    there = [rank for rank in evaluated if not parameters[rank].isnan().any()]
    last = (
        rows.filter(pl.col("node").is_in(there))
        .group_by("node")
        .agg(pl.col("round", "time_s", "wall_s").max())
    )
    if not there or not len(last):
        return pl.DataFrame(schema={"node": pl.Int32, "round": pl.Int64})
    moments = rows.filter(pl.col("node").is_in(there))["moment"].drop_nulls()
    row = {
        "node": NETWORK,
        "round": last["round"].min(),
        "time_s": last["time_s"].max(),
        "wall_s": last["wall_s"].max(),
        "moment": "end" if moments.str.contains("end").any() else "round",
        "consensus_distance": consensus_distance([parameters[rank] for rank in there]),
    }
    return pl.DataFrame([row]).cast({"node": pl.Int32})


def _events(
    parts: dict[int, list[Part]],
    missing: Iterable[int],
    incomplete: dict[int, str],
    lost_models: dict[int, str],
) -> pl.DataFrame:
    """What all nodes saw. That a node was lost is an event of the first who noticed it; of one that has completed its
    rounds all the same, it is "unreachable". What can't be used is an event too."""
    tables = [part.run.events for own in parts.values() for part in own]
    events = (
        pl.concat(tables, how="diagonal_relaxed").unique(maintain_order=True).sort("time_s", nulls_last=True)
    )
    # Many have noticed each loss and each return: the first of those who follow one another says it all.
    shared = pl.col("event").is_in(["lost", "leave", "found"])
    again = pl.col("event") == pl.col("event").shift().over("node")
    noted = events.filter(shared).filter(again.fill_null(False).not_())
    events = pl.concat([events.filter(~shared), noted]).sort("time_s", nulls_last=True, maintain_order=True)
    # (A rank with an older record was lost, though it has come back.)
    whole = [rank for rank, own in parts.items() if rank not in incomplete and len(own) == 1]
    kind = pl.when((pl.col("event") == "lost") & pl.col("node").is_in(whole)).then(pl.lit("unreachable"))
    events = events.with_columns(event=kind.otherwise(pl.col("event")))
    noticed = set(events.filter(pl.col("event") == "lost")["node"])
    unnoticed = dict.fromkeys(missing, "has left no record") | {
        rank: how for rank, how in incomplete.items() if how.startswith("was killed")
    }
    rows = [
        {"node": rank, "event": "lost", "detail": f"node {rank} {how}"}
        for rank, how in sorted(unnoticed.items())
        if rank not in noticed
    ]
    damaged = list(lost_models.items())
    for rank, own in parts.items():
        damaged += [
            (rank, f"{file} of node {rank} left out: {why}")
            for part in own
            for file, why in part.damaged.items()
        ]
    rows += [{"node": rank, "event": "damaged", "detail": text} for rank, text in damaged]
    if rows:
        events = pl.concat([events, pl.DataFrame(rows).cast({"node": pl.Int32})], how="diagonal_relaxed")
    return events


def _experiment(parts: dict[int, list[Part]]) -> str:
    """The experiment, from the first record that has it."""
    every = [part for _, own in sorted(parts.items()) for part in own]
    for part in every:
        if (part.run.path / "experiment.yaml").is_file():
            return part.run.experiment_text
    raise BadInput(*(f"{file}: {why}" for part in every for file, why in part.damaged.items()))


def _environment(first: Part, newest: dict[int, Part]) -> dict[str, Any]:
    said = dict(first.run.environment)
    said["nodes"] = {
        str(rank): {key: part.run.environment.get(key) for key in ("command", "started", "machine")}
        for rank, part in newest.items()
    }
    return said


def _setup(parts: Iterable[Part]) -> dict[str, Any]:
    """What was known at the start, with all graphs that any of the nodes has recorded."""
    setups = [part.run.setup for part in parts]
    graphs = {round: edges for setup in setups for round, edges in setup.get("graphs", {}).items()}
    known = next((setup for setup in setups if "nodes" in setup), setups[0])
    merged = {**known, "graphs": dict(sorted(graphs.items(), key=lambda item: int(item[0])))}
    result: dict[str, Any] = json.loads(json.dumps(merged))
    return result
