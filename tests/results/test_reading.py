from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import BadInput
from gossamer.results import closing
from gossamer.results.closing import compact
from gossamer.results.consensus import consensus_distance
from gossamer.results.folder import RunFolder
from gossamer.results.reading import read_events, read_metrics


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "test", experiment="name: test\n", environment={})


def fill(folder: RunFolder, kind: Any, rank: int, *rows: dict[str, Any]) -> None:
    with folder.segment(kind, rank) as segment:
        for row in rows:
            segment.append(row)


def test_rows_of_several_processes_are_sorted_and_columns_fixed(folder: RunFolder) -> None:
    fill(
        folder, "metrics", 0, {"node": 0, "round": 1, "zeta": 1}, {"node": 0, "round": 0, "test_accuracy": 1}
    )
    fill(folder, "metrics", 1, {"node": 1, "round": 0, "alpha": "x", "test_loss": math.nan})
    table = read_metrics(folder.path)
    assert table.columns == [
        *("node", "round", "step", "time_s", "wall_s", "model_age_s", "network_bytes", "moment"),
        *("train_loss", "test_loss", "test_accuracy"),
        *(
            "bytes_sent",
            "bytes_received",
            *("messages_sent", "messages_received", "messages_cancelled", "messages_lost"),
            *(
                "messages_unsent",
                "messages_late",
                "messages_superseded",
                "messages_taken",
                "messages_refused",
            ),
            *("staleness_s", "staleness_max_s"),
            *("idle_share", "uplink_share", "downlink_share"),
            "consensus_distance",
            "alpha",
            "zeta",
        ),
    ]
    assert table.select("node", "round").rows() == [(0, 0), (1, 0), (0, 1)]
    assert table["node"].dtype == pl.Int32
    assert table["test_accuracy"].dtype == pl.Float64  # also with whole numbers only
    assert table["messages_lost"].dtype == pl.Int64
    assert math.isnan(table["test_loss"][1])
    assert table["test_loss"][0] is None


def test_compacting_keeps_the_table_and_removes_the_segments(folder: RunFolder) -> None:
    fill(folder, "metrics", 0, *({"node": n, "round": r, "x": n * r} for r in range(3) for n in range(4)))
    fill(folder, "events", 0, {"time_s": 2.0, "event": "lost", "node": 1}, {"time_s": 1.0, "event": "join"})
    before, events = read_metrics(folder.path), read_events(folder.path)
    compact(folder)
    assert not folder.segments.exists()
    assert pl.read_parquet(folder.path / "metrics.parquet").equals(before)
    assert read_metrics(folder.path).equals(before)
    assert read_events(folder.path).equals(events)
    assert events["event"].to_list() == ["join", "lost"]


def test_crash_before_segment_removal_duplicates_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folder, "metrics", 0, {"node": 0, "round": 0, "bytes_sent": 5}, {"node": 1, "round": 0})
    fill(folder, "events", 0, {"time_s": 1.0, "event": "lost", "node": 1})
    with monkeypatch.context() as patched:
        patched.setattr(closing, "_remove", lambda paths: None)
        compact(folder)
    assert (folder.path / "metrics.parquet").exists()
    assert len(list(folder.segments.iterdir())) == 2
    assert read_metrics(folder.path).height == 2
    assert read_events(folder.path).height == 1


def test_failed_table_write_keeps_segments(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder, "metrics", 0, {"node": 0, "round": 0})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(OSError, match="No space"):
        compact(folder)
    names = sorted(path.name for path in folder.path.iterdir())
    assert names == [".status.json", "environment.json", "experiment.yaml", "segments"]
    assert read_metrics(folder.path).height == 1


def test_rows_of_one_evaluation_merge_with_later_value(folder: RunFolder) -> None:
    point = {"node": 0, "round": 3, "step": 15, "time_s": 0.5}
    fill(
        folder,
        "metrics",
        0,
        {**point, "test_loss": 1.0, "a": 1},
        {**point, "a": 2, "b": 3},
        {**point, "time_s": 0.6, "a": 4},
    )
    table = read_metrics(folder.path)
    assert table.select("time_s", "test_loss", "a", "b").rows() == [(0.5, 1.0, 2, 3), (0.6, None, 4, None)]


def test_merged_row_lists_all_moments_after_a_crash(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = {"node": 0, "round": 3, "step": 15, "time_s": 0.5}
    fill(
        folder,
        "metrics",
        0,
        {**point, "moment": "round", "train_loss": 1.0},
        {**point, "moment": "tick 2", "train_loss": None},
        {**point, "moment": "end", "train_loss": None},
        {"node": -1, "round": 3, "time_s": 0.5, "moment": "round"},
        {"node": -1, "round": 3, "time_s": 0.5, "moment": "end"},
        {"node": 1, "round": 3},  # from a version without this column
        {"node": 1, "round": 3},
    )
    with monkeypatch.context() as patched:
        patched.setattr(closing, "_remove", lambda paths: None)
        compact(folder)
    rows = read_metrics(folder.path).select("node", "moment", "train_loss").rows()
    # The network's rows are of different models: those of a round, and those of an instant.
    network = [(-1, "round", None), (-1, "end", None)]
    assert rows == [*network, (0, "round, tick 2, end", 1.0), (1, None, None)]


def test_resumed_run_extends_the_table(folder: RunFolder) -> None:
    fill(folder, "metrics", 0, {"node": 0, "round": 0, "x": 1})
    compact(folder)
    fill(folder, "metrics", 0, {"node": 0, "round": 1, "x": 2.5})
    compact(folder)
    assert read_metrics(folder.path)["x"].to_list() == [1.0, 2.5]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, 3], [1, None, 3]),
        ([1, 2.5], [1.0, 2.5]),
        ([True, False], [True, False]),
        (["a", 1], ["a", "1"]),
        ([[1, 2], None], [[1, 2], None]),
        ([[1, "a"], None], ['[1, "a"]', None]),
        ([2**70, 1], [float(2**70), 1.0]),
    ],
)
def test_recorded_values_of_any_kind_are_kept(
    folder: RunFolder, values: list[Any], expected: list[Any]
) -> None:
    fill(folder, "metrics", 0, *({"node": 0, "round": r, "x": value} for r, value in enumerate(values)))
    compact(folder)
    assert read_metrics(folder.path)["x"].to_list() == expected


def test_column_of_mixed_kinds_becomes_text(folder: RunFolder) -> None:
    fill(folder, "metrics", 0, {"node": 0, "round": 0, "x": 1})
    fill(folder, "metrics", 1, {"node": 1, "round": 0, "x": "one"})
    assert read_metrics(folder.path)["x"].to_list() == ["1", "one"]


KINDS = [
    None,
    True,
    2**64 - 1,
    -(2**63),
    1.5,
    math.nan,
    "text",
    [],
    [1],
    [[1], [2.5]],
    [[1], 2],
    ["a"],
    {"a": [1]},
]


@pytest.mark.parametrize("name", ["test_mine", "mine"])
def test_column_of_any_two_kinds_can_be_read(folder: RunFolder, name: str) -> None:
    """Before and after it has become a table, beside rows of the other kind."""
    for first in KINDS:
        for second in KINDS:
            rows = [{"node": 0, "round": r, name: value} for r, value in enumerate((first, second))]
            fill(folder, "metrics", 0, *rows)
            assert read_metrics(folder.path).height == 2
            compact(folder)
            fill(folder, "metrics", 0, {"node": 1, "round": 1, name: second})
            assert read_metrics(folder.path).height == 3
            for path in (folder.path / "metrics.parquet", folder.segments / "metrics-0.jsonl"):
                path.unlink()


def test_row_without_round_names_its_segment(folder: RunFolder) -> None:
    fill(folder, "metrics", 2, {"node": 0, "round": 0}, {"node": 0})
    with pytest.raises(BadInput, match=r"metrics-2\.jsonl: rows without 'round'"):
        read_metrics(folder.path)


def test_a_run_without_rows_has_empty_tables(folder: RunFolder) -> None:
    compact(folder)
    assert read_metrics(folder.path).is_empty()
    assert read_events(folder.path).columns == [
        "time_s",
        "wall_s",
        "node",
        "event",
        "detail",
        "network_bytes",
    ]


@given(
    nodes=st.integers(1, 6),
    offset=st.sampled_from([0.0, 1000.0]),
    values=st.lists(st.floats(-4, 4, width=32), min_size=18, max_size=18),
)
def test_consensus_distance_matches_pairwise_distances(
    nodes: int, offset: float, values: list[float]
) -> None:
    x = np.asarray(values[: 3 * nodes], np.float32).reshape(nodes, 3) + np.float32(offset)
    # 1/n sum_i ||x_i - mean||^2 = 1/(2 n^2) sum_ij ||x_i - x_j||^2
    exact = x.astype(np.float64)
    pairs = np.square(exact[:, None] - exact[None]).sum() / (2 * nodes**2)
    assert consensus_distance(list(torch.from_numpy(x))) == pytest.approx(
        math.sqrt(pairs), rel=1e-6, abs=1e-6
    )
