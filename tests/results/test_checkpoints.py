"""Checkpoints on disk: a kill at any time leaves a complete one, and damaged ones are refused."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gossamer import Experiment
from gossamer.errors import BadInput, RecordError
from gossamer.messages.tags import Model
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.checkpoints import CheckpointFolder, highest, newest
from gossamer.results.folder import write_json

NODES = 2


class Killed(BaseException):
    """The process ends here."""


def experiment(**changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "nodes": NODES,
        "task": {"name": "least-squares", "samples": 16},
        "algorithm": "d-psgd",
        "topology": "complete",
        "checkpoint": {"every_rounds": 1, "keep": 2},
        "stop": {"rounds": 3},
    }
    return Experiment.of({**fields, **changes})


def node(rank: int, number: int) -> Checkpoint:
    model = Model(torch.full((3,), float(number)), torch.zeros(0))
    return Checkpoint(rank, 10 * number, float(number), model, None, {}, {})


def make(path: Path, number: int, described: Experiment | None = None) -> None:
    folder = CheckpointFolder(path, described or experiment())
    for rank in range(NODES):
        folder.write(number, node(rank, number))
    rounds = dict.fromkeys(range(NODES), 10 * number)
    folder.complete(number, rounds, dict.fromkeys(range(NODES), float(number)), 2.5)


@contextmanager
def killed_at(step: int) -> Iterator[list[str]]:
    """Kill the process at a given step of those that change the disk."""
    steps: list[str] = []

    def count(name: str, call: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            steps.append(name)
            if len(steps) == step:
                raise Killed(name)
            return call(*arguments, **options)

        return counted

    with (
        mock.patch("gossamer.results.folder.sync", count("flush", lambda path: None)),
        mock.patch("gossamer.results.checkpoints.sync", count("flush the folders", lambda path: None)),
        mock.patch.object(Path, "replace", count("rename", Path.replace)),
        mock.patch.object(Path, "write_text", count("write", Path.write_text)),
        mock.patch("gossamer.node.checkpoint.zlib.crc32", count("write", zlib.crc32)),
        mock.patch.object(Path, "unlink", count("remove", Path.unlink)),
        mock.patch.object(shutil, "rmtree", count("drop", shutil.rmtree)),
    ):
        yield steps


def test_kill_at_any_step_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    step, finished = 0, False
    while not finished:
        step += 1
        path = tmp_path / str(step)
        with mock.patch("gossamer.results.folder.sync"):
            for number in (1, 2):
                make(path, number)
        with killed_at(step) as steps:
            try:
                make(path, 3)
                finished = True
            except Killed:
                pass
        checkpoint = newest(path)
        assert checkpoint is not None
        assert checkpoint.number in (2, 3)
        if checkpoint.number == 2:
            checkpoint.verify()
            assert checkpoint.read(1).round == 20
            assert "drop" not in steps  # old checkpoints are dropped last
    assert checkpoint.number == 3
    assert step > 15
    # The new checkpoint is flushed before old ones are dropped.
    assert steps.index("flush the folders") < steps.index("drop")


def test_failed_write_removes_unfinished_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, 1)
    folder = CheckpointFolder(tmp_path, experiment())
    folder.write(2, node(0, 2))
    full = mock.patch(
        "gossamer.node.checkpoint.save_file", side_effect=OSError(28, "No space left on device")
    )
    with full, pytest.raises(RecordError, match=r"node-1.safetensors can't be written: No space left"):
        folder.write(2, node(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    checkpoint = newest(tmp_path, verified=True)
    assert checkpoint is not None
    assert checkpoint.number == 1


def test_checkpoint_without_nodes_is_ignored(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (tmp_path / "2").mkdir()
    CheckpointFolder(tmp_path, experiment()).complete(2, {}, {}, 2.5)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.number == 1


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert highest(tmp_path) == 0
    for number in (1, 2, 4):
        make(tmp_path, number)
    CheckpointFolder(tmp_path, experiment()).write(5, node(0, 5))  # incomplete
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.number, checkpoint.rounds, checkpoint.times_s) == (4, {0: 40, 1: 40}, {0: 4.0, 1: 4.0})
    assert checkpoint.wall_s == 2.5
    assert highest(tmp_path) == 5


def test_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    make(tmp_path, 1)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    file = tmp_path / "1" / "node-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        BadInput, match=r"node-1.safetensors: its checksum does not match: it is damaged; accepted"
    ):
        checkpoint.verify()
    file.unlink()
    with pytest.raises(
        BadInput, match=r"node-1.safetensors: No such file or directory; accepted: a checkpoint"
    ):
        checkpoint.verify()
    (tmp_path / "1" / "manifest.json").write_text('{"number": 1}')
    with pytest.raises(
        BadInput,
        match=r"manifest.json: Object missing required field .*; accepted: data written by gossamer",
    ):
        newest(tmp_path)


def test_node_file_of_another_experiment_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 1)
    CheckpointFolder(tmp_path, experiment(seed=2)).write(1, node(1, 1))
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    with pytest.raises(BadInput, match="node-1.safetensors: its experiment is [0-9a-f]{16}, not "):
        checkpoint.verify()


def test_node_file_of_another_checkpoint_run_or_rank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    write_json(tmp_path / "here" / "environment.json", {"run": "here"})
    for number in (1, 2):
        make(tmp_path / "here" / "checkpoints", number)
    (tmp_path / "there").mkdir()
    write_json(tmp_path / "there" / "environment.json", {"run": "there"})
    make(tmp_path / "there" / "checkpoints", 2)
    checkpoint = newest(tmp_path / "here" / "checkpoints")
    assert checkpoint is not None
    for other, message in (
        (checkpoint.folder.parent / "1" / "node-1.safetensors", "its checkpoint is 1, not 2"),
        (tmp_path / "there" / "checkpoints" / "2" / "node-1.safetensors", "its run is there, not here"),
        (checkpoint.folder / "node-0.safetensors", "its rank is 0, not 1"),
    ):
        shutil.copy(other, checkpoint.folder / "node-1.safetensors")
        with pytest.raises(BadInput, match=f"node-1.safetensors: {message}"):
            checkpoint.verify()


def test_checkpoint_accepts_only_the_same_experiment(tmp_path: Path) -> None:
    make(tmp_path, 1)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    for same in (
        {"stop": {"rounds": 9}},
        {"checkpoint": {}},
        {"name": "x"},
        {"engine": {"name": "simulate", "workers": 1}},
    ):
        checkpoint.check(experiment(**same))
    for name, other in (
        ("optimizer.lr", {"optimizer": {"name": "sgd", "lr": 0.5}}),
        ("seed", {"seed": 2}),
        ("engine", {"engine": "processes"}),
        ("topology.name", {"topology": "ring"}),
    ):
        with pytest.raises(
            BadInput, match=rf"^{name}: .* when the checkpoint .*/1 was made; accepted: the same"
        ):
            checkpoint.check(experiment(**other))
