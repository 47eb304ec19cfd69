"""Claims of docs/security.md that are not tested elsewhere, and the existence of the tests that it names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import Experiment, Model, Node, NodeWrapper
from gossamer.messages.tags import Payload
from gossamer.results.segment import Segment, read_segment
from gossamer.results.verify import problems_of

ROOT = Path(__file__).parent.parent
SETTINGS: dict[str, Any] = {
    "nodes": 5,
    "task": {"name": "least-squares", "features": 4, "samples": 50, "test_samples": 20},
    "topology": "complete",
    "algorithm": "d-psgd",
    "optimizer": {"name": "sgd", "lr": 0.05},
    "stop": {"rounds": 6},
}


def test_tests_named_on_security_page_exist() -> None:
    page = (ROOT / "docs/security.md").read_text()
    named = re.findall(r"([\w/]+\.py): ([a-z0-9_]+)", page.replace(":\n", ": "))
    assert len(named) >= 20
    for file, name in named:
        assert f"def test_{name}(" in (ROOT / "tests" / file).read_text(), (file, name)


class Liar(NodeWrapper):
    """Node 4 sends a model that is finite and wrong."""

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        if node.rank != 4 or not isinstance(payload, Model):
            return payload
        return Model(torch.full_like(payload.parameters, 1e6), payload.buffers)


def test_wrong_model_moves_mean_but_not_median(tmp_path: Path) -> None:
    liar = {"wrappers": [f"{__name__}:Liar"]}
    mean = gossamer.run(Experiment.of({**SETTINGS, **liar}), tmp_path)
    median = gossamer.run(Experiment.of({**SETTINGS, **liar, "aggregator": "median"}), tmp_path)
    honest = gossamer.run(Experiment.of({**SETTINGS, "aggregator": "median"}), tmp_path)
    assert mean.parameters is not None
    assert median.parameters is not None
    assert honest.parameters is not None
    assert (mean.parameters[:4].abs() > 1e4).all()
    assert (median.parameters[:4] - honest.parameters[:4]).abs().max() < 1


def test_forged_row_with_checksum_is_accepted(tmp_path: Path) -> None:
    """Checksums have no key, so a forger can write a matching one."""
    with Segment(tmp_path / "metrics-0.jsonl", "run") as segment:
        segment.append({"node": 0, "test_accuracy": 0.5})
    [row] = read_segment(tmp_path / "metrics-0.jsonl", "run")
    (tmp_path / "metrics-0.jsonl").unlink()
    with Segment(tmp_path / "metrics-0.jsonl", "run") as segment:
        segment.append({**row, "test_accuracy": 0.9})
    assert list(read_segment(tmp_path / "metrics-0.jsonl", "run")) == [{"node": 0, "test_accuracy": 0.9}]


def test_resume_executes_code_named_in_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {"checkpoint": {"every_rounds": 2}, "stop": {"rounds": 4}}
    run = gossamer.run(Experiment.of({**SETTINGS, **checkpoint}), tmp_path / "runs")
    (tmp_path / "somebodys_code.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file = run.path / "experiment.yaml"
    file.write_text(file.read_text().replace("name: d-psgd", "name: somebodys_code:Algorithm"))
    assert gossamer.load_run(run.path).metrics.height  # reading a record runs nothing
    problems_of(run.path)
    with pytest.raises(SystemExit, match="it ran"):
        gossamer.resume(run.path)
