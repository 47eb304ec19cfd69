"""What a round ends with: the declarations of algorithms, and the table in docs/algorithms.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import Experiment
from gossamer.config.registry import names

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"

VARIANTS: dict[str, dict[str, Any]] = {
    "d-psgd": {"overlap": True},
    "gradient-tracking": {"variant": "diging"},
    "sgp": {"overlap": 3},
}
"""The parameters with which a round ends with local steps."""


def documented() -> set[str]:
    section = DOCS.read_text().split("## What a round ends with")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name.strip().strip("`") for row in rows for name in row.split(",")}


def test_table_lists_the_algorithms_whose_rounds_end_with_steps() -> None:
    declared = set()
    for name, kind in names("algorithm").items():
        if kind(**VARIANTS.get(name, {})).ends_with_steps():
            declared.add(name)
    assert declared == documented()


def test_variants_that_mix_last_end_with_mixing() -> None:
    kinds = names("algorithm")
    assert not kinds["d-psgd"]().ends_with_steps()
    assert not kinds["gradient-tracking"]().ends_with_steps()
    assert not kinds["gossip-learning-on-receipt"](create="um").ends_with_steps()
    assert not kinds["gossip-learning-on-receipt"](create="rw").ends_with_steps()  # never mixes
    assert not kinds["sgp"](overlap=1).ends_with_steps()


SETTINGS: dict[str, dict[str, Any]] = {
    "choco-sgd": {"codec": {"name": "top-k", "fraction": 0.5}},
    "deepsqueeze": {"codec": {"name": "top-k", "fraction": 0.5}},
    "beer": {"codec": {"name": "top-k", "fraction": 0.5}},
    "d2": {"algorithm": {"name": "d2", "exact_diffusion": True}},
    "relay-sum": {"algorithm": {"name": "relay-sum", "tree": "spanning"}},
    "epidemic-oracle": {"algorithm": {"name": "epidemic-oracle", "degree": 2}},
    "epidemic-local": {"algorithm": {"name": "epidemic-local", "degree": 2}},
}


def models(out: Path, name: str, of: str) -> tuple[torch.Tensor, str | None]:
    described: dict[str, Any] = {
        "nodes": 6,
        "task": {"name": "least-squares", "features": 4, "samples": 60, "test_samples": 20},
        "topology": "ring",
        "algorithm": {"name": name, **VARIANTS.get(name, {})},
        "optimizer": {"name": "sgd", "lr": 0.02},
        "network": {"name": "uniform", "latency_s": 0.001},
        "initial": "independent",
        "evaluation": {"every_rounds": 5, "of": of},
        "stop": {"rounds": 10},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    run = gossamer.run(Experiment.of({**described, **SETTINGS.get(name, {})}), out)
    assert run.parameters is not None
    said = run.events.filter(event="never-mixed")["detail"].to_list()
    return run.parameters, said[0] if said else None


@pytest.mark.parametrize("name", sorted(names("algorithm")))
def test_last_mixing_differs_from_the_end_of_the_round_where_a_round_ends_with_steps(
    tmp_path: Path, name: str
) -> None:
    by_round, _ = models(tmp_path, name, "round")
    mixed, said = models(tmp_path, name, "mixed")
    kind = names("algorithm")[name](**VARIANTS.get(name, {}))
    if name in ("local", "centralized"):
        assert said is not None
    elif name in ("fedavg", "gossip-learning"):
        # Only the server of fedavg is shown. A round of gossip-learning in which no model arrived mixes nothing.
        assert said is None
    else:
        assert said is None
        assert torch.equal(by_round, mixed) != kind.ends_with_steps()
