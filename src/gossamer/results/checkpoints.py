"""The checkpoints of a run, in its folder: ``checkpoints/<number>/node-<rank>.safetensors``
(:mod:`gossamer.node.checkpoint`), and ``manifest.json``, which is written last. Files are written under another name,
flushed and renamed, and older checkpoints are removed only when a newer one is complete: a kill at any time leaves the
newest complete one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.config import Experiment
from gossamer.errors import BadInput
from gossamer.node import checkpoint
from gossamer.node.checkpoint import Checkpoint, Place
from gossamer.results.folder import atomic, sync, write_json
from gossamer.results.run import flat

_FREE = ("name", "stop", "checkpoint", "data_root", "trackers")
"""Fields of an experiment that may change when a run is resumed."""


@dataclass(frozen=True)
class Cut:
    """A complete checkpoint of a run; of each node that was not lost, the rounds that it had completed and its clock.
    ``number`` is larger for later ones; ``trainer`` is the one that computed, None if none had to yet."""

    folder: Path
    number: int
    rounds: Mapping[int, int]
    times_s: Mapping[int, float]
    wall_s: float
    experiment: Mapping[str, Any]
    trainer: str | None

    @property
    def even(self) -> bool:
        """Whether all nodes were saved after the same round."""
        return len(set(self.rounds.values())) == 1

    @property
    def needs_even(self) -> bool:
        """Whether nodes must be saved after the same round, because what they agreed on for a round is not saved."""
        return self.experiment.get("secure_aggregation") is not None

    def read(self, rank: int, place: Place | None = None) -> Checkpoint:
        """A node's part; arguments and errors as for :func:`gossamer.node.checkpoint.read`."""
        return checkpoint.read(self.folder / _file(rank), _digest(self.experiment), place)

    def verify(self) -> None:
        """Read every part; a missing or damaged one is bad input."""
        for rank in self.rounds:
            self.read(rank)

    def check(self, experiment: Experiment) -> None:
        """Refuse to resume another experiment, naming the first field that differs."""
        before, now = flat(_essence(self.experiment)), flat(_essence(_dump(experiment)))
        for name in (name for name in {**before, **now} if before.get(name) != now.get(name)):
            raise BadInput(
                f"{name}: {now.get(name)!r}, but {before.get(name)!r} when the checkpoint {self.folder} was made; accepted:"
                " the same experiment (with another stop, if need be)"
            )


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, path: Path, experiment: Experiment, digest: str | None = None) -> None:
        self._path = path
        self._experiment = _dump(experiment)
        self.digest = digest or _digest(self._experiment)
        self._keep = experiment.checkpoint.keep

    def write(self, number: int, saved: Checkpoint) -> None:
        """Write one node's part of a checkpoint (OSError if it can't be written)."""
        folder = self._path / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / _file(saved.rank)) as temporary:
            checkpoint.write(saved, temporary, self.digest)

    def complete(
        self,
        number: int,
        rounds: Mapping[int, int],
        times_s: Mapping[int, float],
        wall_s: float,
        trainer: str | None = None,
    ) -> None:
        """Write the manifest of a checkpoint whose parts are all written, and remove superseded checkpoints; arguments as
        for :class:`Cut`."""
        manifest = {"number": number, "rounds": dict(rounds), "times_s": dict(times_s), "wall_s": wall_s}
        manifest |= {"trainer": trainer, "experiment": self._experiment}
        write_json(_manifest(self._path, number), manifest)
        for folder in (self._path, self._path.parent):  # before older ones are removed
            sync(folder)
        kept = set(_complete(self._path)[-self._keep :])
        for other in _numbers(self._path):
            if other not in kept and other < number:
                # Without its manifest it is incomplete, even if the rest can't be removed.
                _manifest(self._path, other).unlink(missing_ok=True)
                shutil.rmtree(self._path / str(other))


def newest(path: Path) -> Cut | None:
    """The newest complete checkpoint in a run's folder of checkpoints from which it can go on, or None; a manifest that can't
    be read is bad input. It has at least one node, and under secure aggregation all nodes after the same round."""
    cuts = (_read_manifest(_manifest(path, number)) for number in reversed(_complete(path)))
    return next((cut for cut in cuts if cut.rounds and (cut.even or not cut.needs_even)), None)


def highest(path: Path) -> int:
    """The highest number of a checkpoint, complete or not; 0 without any."""
    return max(_numbers(path), default=0)


def _file(rank: int) -> str:
    return f"node-{rank}.safetensors"


def _manifest(path: Path, number: int) -> Path:
    return path / str(number) / "manifest.json"


def _numbers(path: Path) -> list[int]:
    return sorted(int(each.name) for each in path.glob("*") if each.name.isdecimal())


def _complete(path: Path) -> list[int]:
    return [number for number in _numbers(path) if _manifest(path, number).exists()]


def _read_manifest(path: Path) -> Cut:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return Cut(
            folder=path.parent,
            number=int(said["number"]),
            rounds={int(rank): int(rounds) for rank, rounds in said["rounds"].items()},
            times_s={int(rank): float(time_s) for rank, time_s in said["times_s"].items()},
            wall_s=float(said["wall_s"]),
            experiment=dict(said["experiment"]),
            trainer=said["trainer"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: {error!r}; accepted: what gossamer has written") from None


def _dump(experiment: Experiment) -> dict[str, Any]:
    return experiment.model_dump(mode="json")


def _essence(experiment: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in experiment.items() if name not in _FREE}
    return {**kept, "engine": kept["engine"]["name"]}


def _digest(experiment: Mapping[str, Any]) -> str:
    text = json.dumps(_essence(experiment), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
