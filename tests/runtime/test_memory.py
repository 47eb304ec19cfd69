"""A simulation that cannot fit into memory is refused before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import BadInput, Experiment, process_memory
from gossamer.runtime import memory
from gossamer.runtime.setup import prepare

PARAMETERS = 64 * 10 + 10


def experiment(**changes: Any) -> Experiment:
    return Experiment.of(
        {
            "nodes": 10,
            "task": {"name": "digits", "model": "logistic", "samples": 80},
            "algorithm": "d-psgd",
            "stop": {"rounds": 1},
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "vectors"),
    [
        # A node's own model, and the one with which its last round ended.
        ({}, 2),
        ({"evaluation": {"of": "instant"}}, 1),
        ({"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}, 3),
        ({"optimizer": {"name": "adam", "lr": 0.1}}, 4),
        ({"optimizer": {"name": "adam", "lr": 0.1, "reset_every_round": True}}, 2),
    ],
)
def test_models_and_optimizer_states_must_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], vectors: int
) -> None:
    needed = 4 * 10 * vectors * PARAMETERS
    monkeypatch.setattr(memory, "available_bytes", lambda: needed)
    prepare(experiment(**changes))
    monkeypatch.setattr(memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(BadInput, match=r"^nodes: 10 with 650 parameters each take at least .* GiB"):
        prepare(experiment(**changes))


@pytest.mark.parametrize(
    ("trainer", "vectors"),
    [("auto", 8), ("sequential", 8), ("batched", 38)],
)
def test_proof_of_the_trainer_must_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch, trainer: str, vectors: int
) -> None:
    """It counts where few nodes need less."""
    few = experiment(nodes=2, engine={"name": "simulate", "trainer": trainer})
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * vectors * PARAMETERS)
    prepare(few)
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * vectors * PARAMETERS - 1)
    with pytest.raises(
        BadInput, match=r"^task.model: the first steps of 650 parameters take at least .* GiB"
    ):
        prepare(few)


def test_files_that_the_system_keeps_do_not_count_as_memory_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container whose memory is full of files that were read, as much is free as without them."""
    monkeypatch.setattr(process_memory, "_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{100 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{99 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon {19 * 2**20}\nfile {80 * 2**20}\nactive_file {30 * 2**20}\ninactive_file {50 * 2**20}\n"
    )
    assert process_memory.available_bytes() == 81 * 2**20
    (tmp_path / "memory.max").write_text("max\n")
    free = process_memory.available_bytes()
    assert free is not None
    assert free > 100 * 2**20


def test_nothing_is_refused_if_available_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    prepare(experiment())


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch with CUDA can't be imported with so little")
def test_too_small_address_space_is_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(experiment().to_yaml())
    program = [sys.executable, "-m", "gossamer", "run", str(path), "--out", str(tmp_path / "runs")]
    limited = ["sh", "-c", 'ulimit -v 1500000 && exec "$@"', "sh", *program]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == "error: ulimit -v: 1.43 GiB of address space; accepted: at least 2 GiB\n"
    assert done.returncode == 2
