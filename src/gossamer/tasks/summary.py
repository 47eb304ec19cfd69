"""A task's data, described in one line and as a record: samples, shapes, classes, and samples that the sets share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8, UInt64
from torch import Tensor

from gossamer.tasks.splits import some
from gossamer.tasks.task import INTEGERS, Pair, Task

MOST_ROWS = 1 << 20
"""The most samples of a set that are compared with those of another set."""
MOST_BYTES = 1 << 31
"""The most bytes of a set that are compared, or searched for values that are not finite."""
_LISTED = 100  # the most names of files in a record
_SAMPLED = 32  # values of each tensor that are compared first
_ROWS = 1 << 12  # samples at a time

SampleNumbers = Int64[np.ndarray, " _"]  # numbers of samples


@dataclass(frozen=True)
class Shared:
    """How many ``samples`` of an evaluation set are also in the training set, with equal inputs and targets, bit for bit.
    ``compared`` samples were looked for among ``training`` ones; if these are not all, they are evenly spaced."""

    samples: int
    compared: int
    training: int


def summary(task: Task) -> dict[str, Any]:
    """The summary of a task's data for ``setup.json``. ``line`` is for the user; the other fields are what it is made of."""
    origin, classes = task.provenance, _classes(task)
    files = {} if origin is None else origin.files
    shared = {
        name: compared for name, pair in task.tests.items() if (compared := shared_samples(task.train, pair))
    }
    record = {
        "source": None if origin is None else origin.source,
        "test_from": None if origin is None else origin.test,
        "files": {
            split: {"count": len(paths), "first": [str(path) for path in paths[:_LISTED]]}
            for split, paths in files.items()
        },
        "samples": {name: len(targets) for name, (_, targets) in {"train": task.train, **task.tests}.items()},
        "inputs": _described(task.train[0]),
        "targets": _described(task.train[1]),
        "classes": None if classes is None else len(classes),
        "shared": {name: asdict(compared) for name, compared in shared.items()},
        "remarks": [*_not_finite(task), *_not_learned(task), *(() if origin is None else origin.remarks)],
    }
    return {"line": _line(task, record, classes, shared), **record}


def shared_samples(train: Pair, test: Pair) -> Shared | None:
    """The samples that a test set shares with the training set. None for tensors of other types, and for tensors that can't
    be compared as rows.

    From each set, at most :data:`MOST_ROWS` samples and :data:`MOST_BYTES` bytes are compared. A hash of some values of each
    sample finds the candidates, and a hash of all values decides."""
    tensors, others = _tensors(train), _tensors(test)
    if not tensors or not all(map(_in_memory, (*tensors, *others))) or _kinds(tensors) != _kinds(others):
        return None
    rows, looked_for = _spaced(tensors), _spaced(others)
    keys, wanted = _keys(tensors, rows), _keys(others, looked_for)
    candidates, suspects = rows[np.isin(keys, wanted)], looked_for[np.isin(wanted, keys)]
    digests = set(_digests(tensors, candidates))
    found = sum(digest in digests for digest in _digests(others, suspects))
    return Shared(found, len(looked_for), len(rows))


def _tensors(pair: Pair) -> list[Tensor]:
    """The tensors of inputs, by name, and targets, without those that have no values."""
    inputs, targets = pair
    return (
        [*(inputs[name] for name in sorted(inputs)), targets]
        if isinstance(inputs, dict)
        else [inputs, targets]
    )


def _in_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def _kinds(tensors: list[Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]


def _spaced(tensors: list[Tensor]) -> SampleNumbers:
    """All samples, or as many evenly spaced ones as may be read."""
    count = len(tensors[-1])
    size = max(sum(tensor[:1].numel() * tensor.element_size() for tensor in tensors), 1)
    most = max(min(count, MOST_ROWS, MOST_BYTES // size), 1)
    return np.arange(count) if most == count else np.linspace(0, count - 1, most).astype(np.int64)


def _chunks(tensor: Tensor, rows: SampleNumbers) -> Iterator[Tensor]:
    """The given samples, some at a time; views if they follow each other."""
    follow = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows)
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        yield (
            tensor[int(part[0]) : int(part[-1]) + 1] if follow else tensor[torch.from_numpy(part)]
        ).detach()


def _bytes(chunk: Tensor) -> UInt8[np.ndarray, "rows bytes"]:
    return chunk.cpu().contiguous().view(torch.uint8).numpy().reshape(len(chunk), -1)


def _keys(tensors: list[Tensor], rows: SampleNumbers) -> UInt64[np.ndarray, " rows"]:
    """A hash of some values of each sample: the sum of their words times fixed random factors, modulo 2^64."""
    keys, rng = np.zeros(len(rows), np.uint64), np.random.default_rng(0)
    for tensor in tensors:
        width = tensor[:1].numel()
        columns = torch.linspace(0, width - 1, min(width, _SAMPLED), dtype=torch.float64).long().unique()  # type: ignore[no-untyped-call]
        words = -(-len(columns) * tensor.element_size() // 8)
        factors = rng.integers(0, 1 << 63, words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        end = 0
        for chunk in _chunks(tensor, rows):
            read = _bytes(chunk.reshape(len(chunk), -1)[:, columns])
            padded = np.pad(read, ((0, 0), (0, 8 * words - read.shape[1]))).view(np.uint64)
            start, end = end, end + len(chunk)
            keys[start:end] += (padded * factors).sum(1, dtype=np.uint64)
    return keys


def _digests(tensors: list[Tensor], rows: SampleNumbers) -> Iterator[bytes]:
    """A hash of all values of each sample."""
    for chunks in zip(*(_chunks(tensor, rows) for tensor in tensors), strict=True):
        parts = [_bytes(chunk.reshape(len(chunk), -1)) for chunk in chunks]
        for row in np.concatenate(parts, axis=1):
            yield hashlib.blake2b(row, digest_size=16).digest()


def _described(inputs: Any) -> dict[str, Any]:
    """The type and the shape of a sample's tensor, or of each by name."""
    if isinstance(inputs, dict):
        return {name: _described(tensor) for name, tensor in inputs.items()}
    return {"dtype": str(inputs.dtype).removeprefix("torch."), "shape": list(inputs.shape[1:])}


def _classes(task: Task) -> list[str] | None:
    """The names of the classes, or else their numbers in the training set if the targets are class numbers."""
    labels = task.labels()
    if task.classes is None:
        return None if labels is None else [str(number) for number in torch.unique(labels).tolist()]
    return [str(name) if str(name).strip() else repr(name) for name in task.classes]


def _not_finite(task: Task) -> Iterator[str]:
    """A remark on each set with values that are not finite. (Tasks that read files refuse them.)"""
    for name, pair in {"train": task.train, **task.tests}.items():
        tensors = [tensor for tensor in _tensors(pair) if tensor.is_floating_point() and _in_memory(tensor)]
        rows, wrong = _spaced(tensors) if tensors else np.arange(0), set[int]()
        for tensor in tensors:
            for start, chunk in enumerate(_chunks(tensor, rows)):
                if not chunk.sum().isfinite():  # else all values are finite, which takes longer to see
                    finite = chunk.reshape(len(chunk), -1).isfinite().all(1).numpy(force=True)
                    wrong.update(rows[start * _ROWS + np.flatnonzero(~finite)].tolist())
        if wrong:
            count = f"{len(wrong):,} of {len(rows):,} samples of {name}"
            yield f"{count} have values that are not finite, the first one sample {min(wrong)}"


def _not_learned(task: Task) -> Iterator[str]:
    """A remark on each evaluation set with classes that no training sample has."""
    labels = task.labels()
    if labels is None:
        return
    known = torch.unique(labels)
    for name, (_, targets) in task.tests.items():
        if targets.dim() == 1 and targets.dtype in INTEGERS:
            unknown = ~torch.isin(targets, known.to(targets.dtype))
            if count := int(unknown.sum()):
                numbers = torch.unique(targets[unknown]).tolist()
                fits = task.classes is not None and max(numbers) < len(task.classes)
                names = [str(task.classes[number] if fits and task.classes else number) for number in numbers]
                which = f"{some(names)} ({count:,} of {len(targets):,} {name} samples)"
                yield f"classes without a training sample: {which}"


def _line(task: Task, record: dict[str, Any], classes: list[str] | None, shared: dict[str, Shared]) -> str:
    """The summary for the user."""
    origin, numbers = task.provenance, record["samples"]
    files = {} if origin is None else origin.files
    root = Path("" if origin is None else origin.source)
    read = {split: f" ({some([_named(path, root) for path in paths])})" for split, paths in files.items()}
    sets = [
        f"{count:,} {'training' if name == 'train' else name} samples{read.get(name, '')}"
        for name, count in numbers.items()
    ]
    source, drawn = "", ""
    if origin is not None:
        alone = [str(path) for paths in files.values() for path in paths] == [origin.source]
        source = f"{origin.source}{'' if alone else read.get('all', '')}: "
        drawn = f"; test set: {origin.test}"
    inputs = record["inputs"] if isinstance(task.train[0], dict) else {"": record["inputs"]}
    kinds = [f"{name} {kind['dtype']} {kind['shape']}".strip() for name, kind in inputs.items()]
    if classes is None:
        outputs = f"targets {record['targets']['dtype']} {record['targets']['shape']}"
    else:
        outputs = f"{len(classes)} class{'es' if len(classes) > 1 else ''} ({some(classes)})"
    overlaps = [_overlap(name, found, numbers[name], numbers["train"]) for name, found in shared.items()]
    facts = [f"{source}{', '.join(sets)}{drawn}", f"inputs {', '.join(kinds)}, {outputs}", *overlaps]
    return "data: " + "; ".join([*facts, *record["remarks"]])


def _named(path: Path, root: Path) -> str:
    """A file's name, with the folders that lead to it from the root."""
    return path.relative_to(root).as_posix() if root in path.parents else path.name


def _overlap(name: str, found: Shared, samples: int, training: int) -> str:
    """A sentence on the samples that an evaluation set shares with the training set."""
    of = "" if found.compared == samples else f" of {found.compared:,} compared"
    among = (
        "the training set" if found.training == training else f"{found.training:,} compared training samples"
    )
    count = f"{found.samples:,}" if found.samples else "no"
    verb, noun = ("is", "sample") if found.samples <= 1 else ("are", "samples")
    return f"{count}{of} {name} {noun} {verb} in {among}"
