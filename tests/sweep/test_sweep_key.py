"""The key of a run: the fields of its experiment, and the bytes of the files that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweeps import make_sweep, run_here

from gossamer.sweep.execute import Counts

RING = "0 1\n1 2\n2 3\n3 0\n"
WEIGHTS = "0.5 0.25 0 0.25\n0.25 0.5 0.25 0\n0 0.25 0.5 0.25\n0.25 0 0.25 0.5\n"


def edge_list(path: Path, **more: Any) -> dict[str, Any]:
    return {"topology": {"name": "edge-list", "path": str(path), **more}}


def test_edited_graph_file_repeats_its_runs(tmp_path: Path) -> None:
    graph = tmp_path / "graph.txt"
    cells = {"file": edge_list(graph), "none": {"topology": "ring"}}
    graph.write_text(RING)
    assert run_here(make_sweep(tmp_path, cells=cells)).counts == Counts(2, done=2)
    graph.write_text(RING + "0 2\n")
    edited = make_sweep(tmp_path, cells=cells)
    assert run_here(edited).counts == Counts(2, skipped=1, done=1)
    messages = edited.results().filter(cell="file")["bytes_sent"].to_list()
    graph.write_text(RING)
    restored = make_sweep(tmp_path, cells=cells)
    assert run_here(restored).counts == Counts(2, skipped=2)
    assert restored.results().filter(cell="file")["bytes_sent"].to_list() < messages


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ({"topology": {"name": "edge-list", "path": "ring.txt"}}, "ring.txt"),
        ({"topology": {"name": "ring", "weights": {"name": "given", "path": "weights.txt"}}}, "weights.txt"),
        ({"network": {"name": "matrix", "latency_ms": "weights.txt"}}, "weights.txt"),
        (
            {
                "network": {
                    "name": "varying",
                    "base": {"name": "matrix", "latency_ms": "weights.txt"},
                    "rate_changes": [{"at_s": 1, "factor": 0.5}],
                }
            },
            "weights.txt",
        ),
        ({"faults": [{"name": "churn", "path": "churn.csv"}]}, "churn.csv"),
    ],
)
def test_every_named_file_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: dict[str, Any], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ring.txt").write_text(RING)
    Path("weights.txt").write_text(WEIGHTS)
    Path("churn.csv").write_text("time_s,node,event\n0.5,1,leave\n")

    def runs() -> list[str]:
        return [planned.run for planned in make_sweep(tmp_path, base=base, seeds=2).planned]

    first = runs()
    assert runs() == first
    assert len(set(first)) == 2
    with Path(name).open("a") as file:
        file.write("\n")
    assert not set(runs()) & set(first)
    Path(name).unlink()  # the run will report the missing file
    missing = runs()
    assert not set(missing) & set(first)


def test_data_root_contents_are_not_part_of_the_key(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("one")
    before = make_sweep(tmp_path, base={"data_root": str(data)}).planned[0].run
    data.write_text("another")
    assert make_sweep(tmp_path, base={"data_root": str(data)}).planned[0].run == before


def test_files_in_a_named_folder_are_part_of_the_key(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.csv").write_text("a,b\n" + "1,2\n" * 20)
    task = {"name": "hub", "path": str(data), "inputs": "a", "targets": "b"}

    def key() -> str:
        [planned] = make_sweep(tmp_path, base={"task": task}).planned
        return planned.run

    before = key()
    assert key() == before
    (data / "train.csv").write_text("a,b\n" + "1,3\n" * 20)
    assert key() != before
