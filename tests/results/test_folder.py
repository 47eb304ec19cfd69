from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gossamer.errors import BadInput
from gossamer.results.closing import compact
from gossamer.results.folder import RunFolder, atomic, environment, write_json, write_text


def create(out: Path, name: str = "test") -> RunFolder:
    return RunFolder.create(out, name, experiment="name: test\n", environment={"command": []})


def test_simultaneous_runs_get_distinct_sorted_folders(tmp_path: Path) -> None:
    folders = [create(tmp_path) for _ in range(20)]
    ids = [folder.path.name for folder in folders]
    assert len(set(ids)) == 20
    assert ids == sorted(ids)
    assert all(folder.path.parent == tmp_path / "test" for folder in folders)
    assert (folders[0].path / "experiment.yaml").read_text() == "name: test\n"


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a\nb", "a  b", " a"])
def test_invalid_folder_name_is_bad_input(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="name: got"):
        create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_out_path_that_is_a_file_is_named(tmp_path: Path) -> None:
    out = tmp_path / "file"
    out.write_text("")
    with pytest.raises(BadInput, match=r"--out .*file: not a directory"):
        create(out)


def test_read_only_out_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(BadInput, match=r"--out .*: read-only file system"):
        create(tmp_path)


def test_open_requires_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no experiment\.yaml"):
        RunFolder.open(tmp_path)
    made = create(tmp_path)
    assert RunFolder.open(made.path) == made


def test_models_are_written_without_padding_as_float32(tmp_path: Path) -> None:
    folder = create(tmp_path)
    padded = torch.arange(32, dtype=torch.float64).reshape(2, 16)
    folder.write_models(padded[:, :5], torch.tensor([[1], [2]]))
    read = load_file(folder.path / "models.safetensors")
    assert read["parameters"].dtype == torch.float32
    assert read["parameters"].tolist() == [[0, 1, 2, 3, 4], [16, 17, 18, 19, 20]]
    assert read["buffers"].tolist() == [[1], [2]]
    assert (folder.path / "models.safetensors").stat().st_mode == (
        folder.path / "experiment.yaml"
    ).stat().st_mode


def test_failed_write_keeps_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_text(path, "old")

    def fail() -> None:
        with atomic(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_status_and_graphs_are_recorded(tmp_path: Path) -> None:
    folder = create(tmp_path)
    write_json(folder.path / "setup.json", {"nodes": 2, "graphs": {"0": [[0, 1]]}})
    with folder.segment("graphs") as graphs:
        graphs.append({"round": 10, "edges": []})
    compact(folder)
    folder.write_status(
        "failed", error="node 1: loss is nan", wall_s=2.5, profile={"train": 1.5}, peak_vectors=12
    )
    assert json.loads((folder.path / "setup.json").read_text())["graphs"] == {"0": [[0, 1]], "10": []}
    status = json.loads((folder.path / "status.json").read_text())
    assert {*status.pop("files")} == {
        "environment.json",
        "events.parquet",
        "experiment.yaml",
        "metrics.parquet",
        "setup.json",
    }
    assert len(status.pop("crc32")) == 8
    assert status == {
        "run": folder.path.name,
        "status": "failed",
        "error": "node 1: loss is nan",
        "wall_s": 2.5,
        "profile": {"train": 1.5},
        "peak_vectors": 12,
    }


def test_environment_records_versions_machine_and_command() -> None:
    recorded = environment(["gossamer", "run", "x.yaml"])
    assert recorded["command"] == ["gossamer", "run", "x.yaml"]
    assert recorded["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert recorded["packages"]["polars"] == metadata.version("polars")
    assert "gossamer" in recorded["packages"]
    assert recorded["machine"]["cpus"] >= 1
    assert json.loads(json.dumps(recorded)) == recorded
