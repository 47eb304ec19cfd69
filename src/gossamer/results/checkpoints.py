"""The checkpoints of a run, in its folder: ``checkpoints/<number>/node-<rank>.safetensors``
(:mod:`gossamer.node.checkpoint`), and ``manifest.json``, which is written last. Each file has a checksum and
the identity of its run and checkpoint. Files are written under another name, flushed and renamed, and older
checkpoints are removed only when a newer one is complete, so a kill at any time leaves the newest complete
checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from gossamer import files
from gossamer.config import Checkpoints, Experiment, engine_name
from gossamer.errors import BadInput
from gossamer.node import checkpoint
from gossamer.node.checkpoint import Checkpoint, Place
from gossamer.results.closing import compact
from gossamer.results.folder import RunFolder, atomic, run_id, sync, write_json, write_table
from gossamer.results.formatting import flat
from gossamer.results.reading import MEASURED_BEFORE, MOMENTS, NETWORK, read_setup
from gossamer.results.schema import ManifestFile, RecordedExperiment

_MAY_CHANGE = ("name", "stop", "checkpoint", "data_root", "trackers")
"""Fields of an experiment that may change when a run is resumed."""


@dataclass(frozen=True)
class RunCheckpoint:
    """A complete checkpoint of a run, with the completed rounds and the clock of each node that was not lost.
    ``time_s`` is the clock of a simulation when the checkpoint was complete; ``number`` increases over time;
    ``run`` identifies the run (:func:`gossamer.results.folder.run_id`)."""

    folder: Path
    number: int
    rounds: Mapping[int, int]
    times_s: Mapping[int, float]
    wall_s: float
    experiment: Mapping[str, Any]
    run: str = ""
    time_s: float | None = None

    @property
    def resumable(self) -> bool:
        """Whether a run can continue from it: some node was saved and, under secure aggregation, all nodes
        were saved after the same round, because their agreements for a round are not saved."""
        rounds = set(self.rounds.values())
        return len(rounds) == 1 or bool(rounds and self.experiment.get("secure_aggregation") is None)

    def read(self, rank: int, place: Place | None = None) -> Checkpoint:
        """Read a node's part. Arguments and errors are as in :func:`gossamer.node.checkpoint.read`."""
        identity = _identity(_digest(self.experiment), self.run, self.number)
        identity |= {"rank": str(rank), "round": str(self.rounds[rank])}
        return checkpoint.read(self.path(rank), identity, place)

    def ends_apart(self, rounds: int | None) -> bool:
        """Whether, in a simulation, some nodes had ended after this many rounds while others continued."""
        ended = [rank for rank, count in self.rounds.items() if count == rounds]
        return any(self.time_s is not None and self.times_s[rank] < self.time_s for rank in ended)

    def snapshots(self, options: Checkpoints) -> int:
        """The number of snapshots that some node has already taken, and that a resumed run need not take."""
        return max(options.due(self.rounds[rank], self.times_s[rank]) for rank in self.rounds)

    def path(self, rank: int) -> Path:
        """The file of a node."""
        return self.folder / _file(rank)

    def verify(self) -> None:
        """Read every part. BadInput for a missing or damaged one."""
        for rank in self.rounds:
            self.read(rank)

    def check(self, experiment: Experiment) -> None:
        """Refuse to resume another experiment, naming the first field that differs."""
        before = {"evaluation.of": MEASURED_BEFORE, **flat(_fixed_fields(self.experiment))}
        now = flat(_fixed_fields(experiment.model_dump(mode="json")))
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise BadInput(
                    f"{name}: {now.get(name)!r}, but {before.get(name)!r} when the checkpoint {self.folder} was made;"
                    " accepted: the same experiment (except for name, stop, checkpoint, data_root and trackers)"
                )


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, path: Path, experiment: Experiment, digest: str | None = None) -> None:
        self._path = path
        self._experiment = experiment.model_dump(mode="json")
        self.digest = digest or _digest(self._experiment)
        self._run = run_id(path.parent)
        self._keep = experiment.checkpoint.keep

    def write(self, number: int, saved: Checkpoint) -> None:
        """Write one node's part of a checkpoint. If it can't be written, all parts are removed and OSError is
        raised."""
        folder = self._path / str(number)
        with self._all_or_nothing(number):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic(folder / _file(saved.rank)) as temporary:
                checkpoint.write(saved, temporary, _identity(self.digest, self._run, number))

    def complete(
        self,
        number: int,
        rounds: Mapping[int, int],
        times_s: Mapping[int, float],
        wall_s: float,
        time_s: float | None = None,
    ) -> None:
        """Write the manifest of a checkpoint whose parts are all written, and remove superseded checkpoints.
        Arguments are as in :class:`RunCheckpoint`."""
        identity = {"run": self._run, "number": number, "experiment": self._experiment}
        state = {"rounds": dict(rounds), "times_s": dict(times_s), "time_s": time_s, "wall_s": wall_s}
        with self._all_or_nothing(number):
            write_json(_manifest(self._path, number), {**identity, **state})
        for folder in (self._path, self._path.parent):  # before older ones are removed
            sync(folder)
        kept = set(complete_numbers(self._path)[-self._keep :])
        for other in _numbers(self._path):
            if other not in kept and other < number:
                _remove(self._path, other)

    def drop(self, number: int) -> None:
        """Remove the written parts of an abandoned checkpoint, since rows may need the space."""
        shutil.rmtree(self._path / str(number), ignore_errors=True)

    @contextmanager
    def _all_or_nothing(self, number: int) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.drop(number)
            raise


def newest(
    path: Path,
    say: Callable[[str], object] = lambda _: None,
    *,
    verified: bool = False,
    fits: Callable[[RunCheckpoint], bool] = lambda _: True,
) -> RunCheckpoint | None:
    """The newest complete checkpoint in a run's folder of checkpoints that is resumable and ``fits``, or
    None. Checkpoints with a damaged manifest or (``verified``) any damaged part are skipped and reported to
    ``say``. BadInput if only damaged ones are left."""
    damaged = []
    for number in reversed(complete_numbers(path)):
        try:
            candidate = read_run_checkpoint(path, number)
            if verified:
                candidate.verify()
        except BadInput as error:
            damaged.append(f"checkpoint {number} can't be used: {error}")
            continue
        if candidate.resumable and fits(candidate):
            for problem in damaged:
                say(problem)
            return candidate
    if damaged:
        raise BadInput(*damaged)
    return None


def read_run_checkpoint(path: Path, number: int) -> RunCheckpoint:
    """The complete checkpoint with this number in a run's folder of checkpoints. BadInput for a damaged manifest."""
    manifest, run = _manifest(path, number), run_id(path.parent)
    manifest_data = files.read_json(manifest, ManifestFile, path.parent)
    files.conforming(manifest_data["experiment"], RecordedExperiment, str(manifest))
    rounds = {int(rank): rounds for rank, rounds in manifest_data["rounds"].items()}
    times_s = {int(rank): float(time_s) for rank, time_s in manifest_data["times_s"].items()}
    if (manifest_data["number"], manifest_data["run"], [*times_s]) != (number, run, [*rounds]):
        raise BadInput(f"{manifest}: of another run or checkpoint; accepted: a manifest of this checkpoint")
    rest = {name: manifest_data[name] for name in ("wall_s", "experiment", "run", "time_s")}
    return RunCheckpoint(manifest.parent, number, rounds, times_s, **rest)


def rewind(folder: RunFolder, checkpoint: RunCheckpoint, evaluated: Iterable[int]) -> None:
    """Keep the part of a record that is older than a checkpoint, and remove the run's status. It can be
    repeated after a kill. For a simulation, all rows up to the instant of the checkpoint are kept. For real
    processes, rows up to their node's round (on the time grid: its time) are kept, and those rows of the
    network to which all ``evaluated`` nodes had contributed."""
    folder.reserve()
    for name in ("status.json", "models.safetensors", "report.html"):
        (folder.path / name).unlink(missing_ok=True)
    compact(folder)
    node, time_s = pl.col("node"), pl.col("time_s")
    present = [rank for rank in evaluated if rank in checkpoint.rounds]

    def limit(by_rank: Mapping[int, Any]) -> pl.Expr:
        last = max(by_rank.values())
        # If all evaluated nodes are lost, the network's rows are complete.
        common = min((by_rank[rank] for rank in present), default=last)
        return node.replace_strict({**by_rank, NETWORK: common}, default=last)

    moments = pl.col("moment").fill_null("round")
    if checkpoint.time_s is None:  # of real processes
        times_s = limit(checkpoint.times_s)
        of_round = moments.str.split(MOMENTS).list.contains("round")
        on_time = (moments != "end") & (time_s < times_s)
        metrics = pl.when(of_round).then(pl.col("round") <= limit(checkpoint.rounds)).otherwise(on_time)
    else:
        times_s = pl.lit(checkpoint.time_s)
        # A row of both a tick and the end has the values of the end; the tick is recorded again.
        metrics = (moments != "end") & ~moments.str.contains("tick.*end") & (time_s <= times_s)
    # A node that was lost later was alive at the checkpoint, and will be again.
    lost = (pl.col("event") == "lost") & node.is_in([*checkpoint.rounds, NETWORK]).fill_null(value=False)
    kept = {
        "metrics": metrics,
        "events": ~lost & (time_s.fill_null(0.0) <= times_s) | (pl.col("event") == "resumed"),
        "timeline": pl.col("end_s") < times_s,  # intervals in progress are cut off at the end of a run
    }
    for kind, keep in kept.items():
        path = folder.path / f"{kind}.parquet"
        if path.exists():
            table = files.read_table(path, folder.path).filter(keep)
            if kind == "metrics" and "moment" in table.columns:
                table = table.with_columns(pl.col("moment").str.replace(f"{MOMENTS}end", "", literal=True))
            write_table(path, table)
    if checkpoint.time_s is None and (folder.path / "setup.json").exists():
        setup, last = read_setup(folder.path), max(checkpoint.rounds.values())
        graphs = {first: edges for first, edges in setup["graphs"].items() if int(first) <= last}
        write_json(folder.path / "setup.json", {**setup, "graphs": graphs})


def remove_later(path: Path, number: int) -> None:
    """Remove the checkpoints after this one, which depend on rows that are lost when the record is rewound."""
    for later in _numbers(path):
        if later > number:
            _remove(path, later)


def _remove(path: Path, number: int) -> None:
    # Without its manifest a checkpoint is incomplete, even if the rest can't be removed.
    _manifest(path, number).unlink(missing_ok=True)
    shutil.rmtree(path / str(number))


def highest(path: Path) -> int:
    """The highest number of a checkpoint, complete or not; 0 if there is none."""
    return max(_numbers(path), default=0)


def _file(rank: int) -> str:
    return f"node-{rank}.safetensors"


def _manifest(path: Path, number: int) -> Path:
    return path / str(number) / "manifest.json"


def _numbers(path: Path) -> list[int]:
    return sorted(int(folder.name) for folder in path.glob("*") if folder.name.isdecimal())


def complete_numbers(path: Path) -> list[int]:
    """The numbers of the complete checkpoints in a run's folder of checkpoints, oldest first."""
    return [number for number in _numbers(path) if _manifest(path, number).exists()]


def _identity(digest: str, run: str, number: int) -> dict[str, str]:
    """The header that the files of all nodes in a checkpoint share."""
    return {"experiment": digest, "run": run, "checkpoint": str(number)}


def _fixed_fields(experiment: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in experiment.items() if name not in _MAY_CHANGE}
    return {**kept, "engine": engine_name(kept.get("engine"))}


def _digest(experiment: Mapping[str, Any]) -> str:
    text = json.dumps(_fixed_fields(experiment), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
