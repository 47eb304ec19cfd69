"""Records rewound to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gossamer.results.checkpoints import RunCheckpoint, rewind
from gossamer.results.folder import RunFolder
from gossamer.results.reading import NETWORK, read_metrics


def row(round: int, moment: str = "round") -> dict[str, Any]:
    return {"node": 1, "round": round, "step": round, "time_s": float(round), "moment": moment}


def test_line_torn_within_a_character_is_dropped(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", experiment="", environment={})
    with folder.segment("metrics", 1) as segment:
        segment.append({**row(1), "place": "Genève"})
        segment.append({**row(2), "place": "Genève"})
        segment.append({**row(3), "place": "Zürich"})
    [path] = (folder.path / "segments").iterdir()
    intact, _, torn = path.read_bytes().partition("ü".encode())
    assert torn
    path.write_bytes(intact + "ü".encode()[:1])
    rewind(folder, RunCheckpoint(tmp_path, 1, {1: 5}, {1: 5.0}, 5.0, {}), evaluated=[1])
    assert read_metrics(folder.path)["round"].to_list() == [1, 2]
    rewind(folder, RunCheckpoint(tmp_path, 1, {1: 1}, {1: 1.0}, 5.0, {}), evaluated=[1])
    assert read_metrics(folder.path)["place"].to_list() == ["Genève"]


def test_network_rows_stay_when_all_evaluated_nodes_are_lost(tmp_path: Path) -> None:
    """The rows precede the loss."""
    checkpoint = RunCheckpoint(tmp_path, 1, {0: 4, 1: 3}, {0: 4.0, 1: 3.0}, 5.0, {})
    folder = RunFolder.create(tmp_path, "run", experiment="", environment={})
    with folder.segment("metrics", 9) as segment:
        for round in range(3):
            segment.append({**row(round), "node": NETWORK})
    with folder.segment("metrics", 1) as segment:
        for round in range(5):
            segment.append(row(round))
    rewind(folder, checkpoint, evaluated=[2])
    kept = read_metrics(folder.path)
    assert kept.filter(node=NETWORK)["round"].to_list() == [0, 1, 2]
    assert kept.filter(node=1)["round"].to_list() == [0, 1, 2, 3]
