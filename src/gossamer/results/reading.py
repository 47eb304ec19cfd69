"""The tables of a run, and how they are read: from append-only segments during the run, from Parquet files after its end.

``metrics`` has a row per node and evaluation, which shows one model of the node (``evaluation.of``): ``round``,
``step`` and the values on evaluation sets belong to this model, which was complete ``model_age_s`` before
``time_s``, when all nodes together had sent ``network_bytes``. Everything else belongs to the instant ``time_s``.
``moment`` is the occasion of the evaluation: ``round`` (``evaluation.every_rounds``; ``round K`` if the model
belongs to an earlier round), ``tick K`` (instant K of the time grid of ``evaluation.every_s``), or ``end`` (of a
run that ended before its rounds were done, or of a node that changed after its rounds). Several occasions of a
row are separated by ``", "``. Records of older versions have no occasions. ``node`` = -1 is the network.
``bytes_*`` and ``messages_*`` count from the start of the run (:class:`~gossamer.messages.tags.Traffic`), and so does
``network_bytes``; ages and shares cover the time since the node's previous row.

``events`` has ``time_s``, ``wall_s``, ``node``, ``event`` (``lost``, ``join``, ``leave``, ``fault``,
``dropped-frame``, ...), ``detail`` and, if a node begins or ceases to take part, ``network_bytes``;
``malformed`` belongs to the receiver.
``timeline`` has a row per interval in which a node computed (``kind`` is ``train`` or ``evaluate``) or its
uplink carried a message (``send``). Rows of ``graphs`` are ``{"round": r, "edges": [[i, j], ...]}``: the
graph from round r on, if it differs from the previous one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl
from polars.exceptions import PolarsError

from gossamer import files
from gossamer.errors import BadInput, listed
from gossamer.messages.tags import COUNTERS
from gossamer.results.folder import read_status, run_id
from gossamer.results.schema import GraphRow, SetupFile
from gossamer.results.segment import read_segment

NETWORK = -1
"""The node number of rows about the network as a whole."""

METRICS: dict[str, Any] = {
    "node": pl.Int32,
    **dict.fromkeys(("round", "step"), pl.Int64),
    **dict.fromkeys(("time_s", "wall_s", "model_age_s"), pl.Float64),
    "network_bytes": pl.Int64,
    "moment": pl.String,
    **dict.fromkeys(("train_loss", "test_loss"), pl.Float64),
}
"""First columns of the metrics. Every other ``test_*`` follows, then :data:`TRAFFIC`, then the rest. Columns of lists, such
as ``test_confusion``, are lists in Parquet too."""

_SHARES = ("idle_share", "uplink_share", "downlink_share")
TRAFFIC: dict[str, Any] = {
    **dict.fromkeys(COUNTERS, pl.Int64),
    **dict.fromkeys(("staleness_s", "staleness_max_s", *_SHARES, "consensus_distance"), pl.Float64),
}

EVENTS: dict[str, Any] = {
    **dict.fromkeys(("time_s", "wall_s"), pl.Float64),
    "node": pl.Int32,
    **dict.fromkeys(("event", "detail"), pl.String),
    "network_bytes": pl.Int64,
}
"""First columns of the events; the rest follow by name."""

_SPAN = {"node": pl.Int32, "kind": pl.String, "start_s": pl.Float64, "end_s": pl.Float64}
TIMELINE: dict[str, Any] = {**_SPAN, "to": pl.Int32, "bytes": pl.Int64}

MEASURED_BEFORE = "instant"
"""The value of ``evaluation.of`` for records of versions that did not have this field."""

MOMENTS = ", "
"""Separator of the moments of one row."""

_EVALUATION = ["node", "round", "step", "time_s"]
_CHUNK = 50_000
MAX_FIGURES_BYTES = 2**31
"""Maximum size in bytes of a file that grows with the number of nodes or runs."""


def read_metrics(folder: Path) -> pl.DataFrame:
    """All metrics of a run folder, from ``metrics.parquet`` and segments, sorted by (round, node).

    Rows of a node with the same (round, step, time_s) belong to one evaluation and are merged into one row with
    all their moments, in which later values take precedence. The network's rows of several moments are of
    different models, and are kept apart. A crash between writing the table and removing
    the segments, or a resumed run, therefore leaves no duplicates.
    """
    table = _read(folder, "metrics", METRICS | TRAFFIC, required=("node", "round"))
    of_network = pl.when(pl.col("node") == NETWORK).then(pl.col("moment"))
    evaluation = [*_EVALUATION, of_network.alias("of_network")]
    if table.select(pl.struct(evaluation).is_duplicated().any()).item():
        rest = [name for name in table.columns if name not in (*_EVALUATION, "moment")]
        moments = pl.col("moment").drop_nulls().str.split(MOMENTS).explode().unique(maintain_order=True)
        table = (
            table.group_by(evaluation, maintain_order=True)
            .agg(pl.col(rest).drop_nulls().last(), moments)
            .drop("of_network")
            .with_columns(pl.when(pl.col("moment").list.len() > 0).then(pl.col("moment").list.join(MOMENTS)))
        )
    metrics = sorted(name for name in table.columns if name.startswith("test_") and name not in METRICS)
    table = _ordered(table, [*METRICS, *metrics, *TRAFFIC])
    return table.sort("round", "node", "time_s", maintain_order=True)


def read_events(folder: Path) -> pl.DataFrame:
    """All events of a run folder, from ``events.parquet`` and segments, sorted by time."""
    table = _read(folder, "events", EVENTS, required=("event",))
    if (folder / "events.parquet").exists() and segments(folder, "events"):
        # A crash between compacting and removing the segments leaves rows in both.
        table = table.unique(maintain_order=True)
    return _ordered(table, list(EVENTS)).sort("time_s", maintain_order=True, nulls_last=True)


def read_timeline(folder: Path) -> pl.DataFrame:
    """The timeline of a run folder, sorted by (node, start); empty without one."""
    table = _read(folder, "timeline", TIMELINE, required=tuple(_SPAN)).select(list(TIMELINE))
    return table.unique().sort("node", "start_s", "end_s", "kind", "to")


def read_setup(folder: Path) -> dict[str, Any]:
    """The contents of ``setup.json`` (empty if it is missing), with all graphs recorded since then."""
    path, setup = folder / "setup.json", dict[str, Any]()
    if path.exists():
        setup = files.read_json(path, SetupFile, folder, MAX_FIGURES_BYTES)
    graphs = dict(setup.get("graphs", {}))
    for segment in segments(folder, "graphs"):
        for row in read_segment(segment, run_id(folder), folder):
            graph = files.conforming(row, GraphRow, str(segment))
            graphs[str(graph["round"])] = graph["edges"]
    return {**setup, "graphs": graphs}


def segments(folder: Path, kind: str) -> list[Path]:
    """The segments of a kind, in rank order."""
    paths = (folder / "segments").glob(f"{kind}-*.jsonl")
    return sorted(paths, key=lambda path: (len(path.stem), path.stem))


def _read(folder: Path, kind: str, schema: Mapping[str, Any], required: Sequence[str]) -> pl.DataFrame:
    """The rows of a kind. A value in a segment that does not fit its column's type becomes null."""
    check_files(folder, f"{kind}.parquet", f"segments/{kind}-*.jsonl")
    parts, run = [pl.DataFrame(schema=schema)], run_id(folder)
    if (table := folder / f"{kind}.parquet").exists():
        parts.append(_fitting(files.read_table(table, folder), schema, required, table))
    for path in segments(folder, kind):
        rows = read_segment(path, run, folder)
        while chunk := list(islice(rows, _CHUNK)):
            names = dict.fromkeys(name for row in chunk for name in row)
            columns = [_column(name, [row.get(name) for row in chunk], schema.get(name)) for name in names]
            parts.append(_fitting(pl.DataFrame(columns), schema, required, path))
    return _joined(parts)


def check_files(folder: Path, *patterns: str) -> list[str]:
    """Refuse files that differ from their entry in ``status.json``. Returns the names of the listed files
    among those that match a pattern."""
    known = read_status(folder).get("files", {})
    names = [name for name in known if any(fnmatch(name, pattern) for pattern in patterns)]
    damaged = [
        f"{folder / name}: its checksum does not match: it is damaged; accepted: the file as the run left it"
        for name in names
        if files.crc32(folder / name, folder, "what status.json lists") != known[name]
    ]
    if damaged:
        raise BadInput(*damaged)
    return names


def _fitting(
    table: pl.DataFrame, schema: Mapping[str, Any], required: Sequence[str], path: Path
) -> pl.DataFrame:
    """A table whose columns have the types of a schema."""
    numbers = {
        name: pl.Float64
        for name, dtype in table.schema.items()
        if name.startswith("test_") and (dtype.is_numeric() or dtype in (pl.Boolean, pl.Null))
    }
    kinds = {name: numbers.get(name, schema.get(name)) for name in table.columns}
    try:
        table = table.cast({name: kind for name, kind in kinds.items() if kind is not None})
    except PolarsError as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"{path}: {reason:.200}; accepted: {listed(required)} as recorded") from None
    for name in required:
        if name not in table.columns or table[name].null_count():
            raise BadInput(f"{path}: rows without {name!r}; accepted: rows with {', '.join(required)}")
    return table


def _column(name: str, values: list[Any], dtype: Any) -> pl.Series:
    """A column of recorded values: of lists if all are lists of numbers with the same nesting. Other lists and mixed types
    become text."""
    if dtype is None and any(isinstance(value, list | dict) for value in values):
        nesting = {_nesting(value) for value in values if value is not None}
        if len(nesting) == 1 and (depth := nesting.pop()) > 0:
            return pl.Series(name, values, dtype=_list_type(depth, values), strict=False)
        values = [json.dumps(value) if isinstance(value, list | dict) else value for value in values]
    column = pl.Series(name, values, dtype=dtype, strict=False)
    return column.cast(pl.Float64) if column.dtype == pl.Int128 else column


def _nesting(value: Any) -> int:
    """How deep the numbers of a list lie: 0 for a number, -1 for what is no list of numbers of one depth."""
    if not isinstance(value, list):
        return 0 if isinstance(value, int | float | None) and not isinstance(value, bool) else -1
    inner = {_nesting(entry) for entry in value}
    return 1 + inner.pop() if len(inner) == 1 and -1 not in inner else -1 if inner else 1


def _list_type(depth: int, values: list[Any]) -> Any:
    """The type of lists of numbers."""
    leaves = values
    for _ in range(depth):
        leaves = [entry for value in leaves if value is not None for entry in value]
    whole = all(entry is None or (isinstance(entry, int) and abs(entry) < 2**63) for entry in leaves)
    dtype: Any = pl.Int64 if whole else pl.Float64
    for _ in range(depth):
        dtype = pl.List(dtype)
    return dtype


def lists_as_text(table: pl.DataFrame, names: Iterable[str] | None = None) -> pl.DataFrame:
    """A table with columns of lists (None: all of them) as text in JSON, as CSV needs it."""
    lists = [name for name, dtype in table.schema.items() if dtype.is_nested()]
    chosen = lists if names is None else [name for name in names if name in lists]
    texts = {name: [None if v is None else json.dumps(v) for v in table[name].to_list()] for name in chosen}
    return table.with_columns(pl.Series(name, values, dtype=pl.String) for name, values in texts.items())


def _joined(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Tables below each other. A column that holds lists in some of them, and other things in others, becomes text."""
    kinds: dict[str, set[Any]] = {}
    for table in parts:
        for name, dtype in table.schema.items():
            if dtype != pl.Null:
                depth = str(dtype).count("List(") if dtype.is_nested() else 0
                kinds.setdefault(name, set()).add(depth)
    mixed = [name for name, depths in kinds.items() if len(depths) > 1]
    return pl.concat([lists_as_text(table, mixed) for table in parts], how="diagonal_relaxed")


def _ordered(table: pl.DataFrame, first: Sequence[str]) -> pl.DataFrame:
    return table.select(*first, *sorted(name for name in table.columns if name not in first))
