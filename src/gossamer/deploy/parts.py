"""The records of a run's nodes, as they are found in folders: which there are, and that they are of one run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from gossamer.deploy.damage import damage_of, without
from gossamer.deploy.record import FILE, NodeRecord
from gossamer.errors import BadInput, listed
from gossamer.results.run import Run

_DEEP = 6
"""Levels below a folder at which records are looked for."""
_CLOCKS_APART_S = 60.0
"""How much later than the end of another machine's record one must have begun to be of another run."""


@dataclass(frozen=True)
class Part:
    """One record of one node: of one process of it.

    Args:
        node: whose it is.
        run: what it recorded, as far as it can be read.
        folder: where its files are.
        damaged: files that can't be used, or not all of which can, and why.
    """

    node: NodeRecord
    run: Run
    folder: Path
    damaged: dict[Path, str]

    @property
    def done_unix_s(self) -> float | None:
        """When the node had completed its rounds, by its machine's clock; None where it is not known to have."""
        if self.run.status != "done" or self.node.start_unix_s is None:
            return None
        return self.node.start_unix_s + (self.run.wall_s or 0.0)


def read_parts(
    paths: Iterable[str | Path], scratch: Path, run: str | None = None
) -> tuple[dict[int, list[Part]], dict[Path, str]]:
    """The records of each rank, the oldest first; and the files that can't be used, and why.

    Args:
        paths: folders of nodes' records, or folders that these are in.
        scratch: a folder for what is made on the way; to be kept while the records are read.
        run: of which run; None for the only one.

    Raises:
        BadInput: for folders without records that can be read, or with those of several runs.
    """
    nodes: dict[Path, NodeRecord] = {}
    files: dict[Path, str] = {}
    for folder in _folders(paths):
        try:
            nodes[folder] = NodeRecord.read(folder)
        except BadInput as error:
            files[folder / FILE] = "; ".join(error.problems)
    if not nodes:
        raise BadInput(*files.values())
    if run is not None:
        known = sorted({node.run for node in nodes.values()})
        nodes = {folder: node for folder, node in nodes.items() if node.run == run}
        if not nodes:
            raise BadInput(f"--run: got {run!r}; accepted: {listed([repr(each) for each in known])}")
    _refuse_several_runs(nodes)
    parts: dict[int, list[Part]] = {}
    for number, (folder, node) in enumerate(nodes.items()):
        damage = damage_of(folder, node)
        sound = without(folder, damage.unusable, scratch / str(number)) if damage.unusable else folder
        damaged = damage.unusable | damage.mixed
        files |= damaged
        parts.setdefault(node.rank, []).append(Part(node, Run(sound), folder, damaged))
    for own in parts.values():
        own.sort(key=lambda part: (part.node.incarnation, part.run.id))
    _refuse_times_of_several_runs(parts)
    return parts, files


def _folders(paths: Iterable[str | Path]) -> list[Path]:
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        found = [file.parent for depth in range(_DEEP) for file in path.glob("*/" * depth + FILE)]
        if not found:
            raise BadInput(f"{path}: no record of a node in it; accepted: what gossamer node has written")
        folders |= dict.fromkeys(each.resolve() for each in found)
    return list(folders)


def _refuse_several_runs(nodes: dict[Path, NodeRecord]) -> None:
    runs: dict[tuple[str, str, int], Path] = {}
    for folder, node in nodes.items():
        runs.setdefault((node.run, node.digest, node.nodes), folder)
    if len(runs) > 1:
        said = "; ".join(
            f"{folder} is of run {run!r} of experiment {digest[:8]} with {count} nodes"
            for (run, digest, count), folder in runs.items()
        )
        named = len({run for run, _, _ in runs}) > 1
        raise BadInput(
            f"records of {len(runs)} runs ({said}); accepted: those of one{', which --run ID picks' * named}"
        )


def _refuse_times_of_several_runs(parts: dict[int, list[Part]]) -> None:
    """Runs that were given no ID differ in nothing but when they were."""
    # A rank that was done was not started again; by one clock, if not by the clocks of two machines.
    for own in parts.values():
        for older, newer in pairwise(own):
            # (A copy of a record, and one that has been gone on with since, have kept their start.)
            if older.run.status == "done" and older.node.start_unix_s != newer.node.start_unix_s:
                raise _of_several_runs(older, newer)
    every = [part for own in parts.values() for part in own]
    ends = [(part.done_unix_s, part) for part in every if part.done_unix_s is not None]
    begins = [(part.node.start_unix_s, part) for part in every if part.node.start_unix_s is not None]
    if ends:
        (end, first), (begin, last) = (
            min(ends, key=lambda each: each[0]),
            max(begins, key=lambda each: each[0]),
        )
        if begin > end + _CLOCKS_APART_S:
            raise _of_several_runs(first, last)


def _of_several_runs(older: Part, newer: Part) -> BadInput:
    return BadInput(
        f"records of several runs ({older.folder} was done, {_day(older)}, before {newer.folder} began,"
        f" {_day(newer)}); accepted: folders with the records of one run"
    )


def _day(part: Part) -> str:
    start = part.node.start_unix_s
    if start is None:
        return "which never went"
    return "which went at " + datetime.fromtimestamp(start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
