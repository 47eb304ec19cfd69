"""Files without end, and files whose contents do not fit the memory: one line before anything is read. (Issue "Every input ends
in work or in one line", section 10.)"""

from __future__ import annotations

import gzip
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import zstandard

from gossamer import BadInput, Experiment, files
from gossamer.digests import digest
from gossamer.faults.kinds import Churn
from gossamer.network.compute import StepTrace
from gossamer.network.kollaps import read_kollaps
from gossamer.network.matrix import Matrix
from gossamer.network.varying import Trace
from gossamer.tasks.leaf import read_users
from gossamer.tasks.movielens import RELEASES, read_ratings
from gossamer.tasks.pixels import decoded
from gossamer.tasks.tables import read_images, read_table
from gossamer.topology import TopologySchedule, families
from gossamer.topology.families import (
    Adjacency,
    Complete,
    EdgeList,
    Generator,
    GraphML,
    StochasticBlock,
    Torus,
)
from gossamer.topology.topology import RandomLinks, Topology
from gossamer.topology.weights import Given

MIB = 2**20


def check(topology: Topology, nodes: int = 4) -> None:
    TopologySchedule(topology, nodes, 1).check()


def read_leaf(path: Path) -> None:
    read_users(path.parent)


READERS: dict[str, Callable[[Path], Any]] = {
    "edges.txt": lambda path: check(EdgeList(path=path)),
    "matrix.txt": lambda path: check(Adjacency(path=path)),
    "graph.graphml": lambda path: check(GraphML(path=path)),
    "weights.txt": lambda path: check(Complete(weights=Given(path=path))),
    "links.txt": lambda path: check(RandomLinks(probability=path)),
    "network.csv": lambda path: Trace(path=path).conditions(4, 1),
    "sites.csv": lambda path: Matrix(latency_ms=path).conditions(4, 1),
    "kollaps.xml": lambda path: read_kollaps(path, f"network.path: {path}"),
    "compute.csv": lambda path: StepTrace(path=path).for_nodes(4, 1).step_seconds(1, 0, 0),
    "churn.csv": lambda path: Churn(path=path).plan(4, 1, "faults.0"),
    "table.csv": read_table,
    "table.jsonl": read_table,
    "table.parquet": read_table,
    "table.arrow": read_table,
    "words.txt": read_table,
    "users.json": read_leaf,
    "ratings.csv": lambda path: read_ratings(path, RELEASES["latest-small"]),
    "image.png": lambda path: read_images([path], [str(path)]),
}
"""The name of a file -> its reader."""


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises(BadInput) as raised:
        read()
    [line] = raised.value.problems
    assert "\n" not in line
    return line


@pytest.mark.timeout(20)  # the reader of a pipe that nobody writes to would wait
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(name: str, tmp_path: Path) -> None:
    for kind in ("a device", "a pipe", "a folder"):
        path = tmp_path / kind.split()[1] / name
        path.parent.mkdir()
        if kind == "a device":
            path.symlink_to("/dev/zero")
        elif kind == "a pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
        line = refusal(lambda path=path: READERS[name](path))
        assert f": {kind}; accepted: a regular file" in line
        assert str(path) in line or str(path.resolve()) in line or name == "image.png"


@pytest.mark.parametrize("name", READERS)
def test_a_file_larger_than_the_free_memory_is_not_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(2**40)  # a file of holes, 1 TiB
    line = refusal(lambda: READERS[name](path))
    assert "GiB of memory, and" in line
    assert "GiB are free; accepted: less data" in line


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda contents: gzip.compress(contents, 1),
    "several gzip members": lambda contents: (
        gzip.compress(contents[:MIB], 1) + gzip.compress(contents[MIB:], 1)
    ),
    "zlib": lambda contents: zlib.compress(contents, 1),
    "zstd": zstandard.compress,
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", ["network.csv", "compute.csv", "churn.csv", "table.csv"])
def test_contents_are_counted_as_they_are_unpacked(
    name: str, packed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(PACKED[packed](b"\n" * (24 * MIB)))
    assert path.stat().st_size < MIB
    monkeypatch.setattr(files, "available_bytes", lambda: 20 * MIB)
    line = refusal(lambda: READERS[name](path))
    assert str(path) in line
    assert "0.0195 GiB are free" in line


def test_counting_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bomb is not unpacked to its end, where it is damaged."""
    path = tmp_path / "words.txt.gz"
    whole = gzip.compress(b"a" * (24 * MIB), 1)
    path.write_bytes(whole[:-8] + bytes(8))
    monkeypatch.setattr(files, "available_bytes", lambda: 20 * MIB)
    assert "at least 0.02" in refusal(lambda: read_table(path))
    monkeypatch.setattr(files, "available_bytes", lambda: 25 * MIB)
    assert "can't be read (CRC check failed" in refusal(lambda: read_table(path))
    path.write_bytes(whole)
    assert len(read_table(path)["text"][0]) == 24 * MIB


@pytest.mark.parametrize(
    ("column", "each"),
    [
        (pl.repeat(7, 2_000_000, dtype=pl.Int64, eager=True), 8),
        (pl.repeat("word", 2_000_000, eager=True), 16),
        (pl.repeat(0.0, 2_000_000, dtype=pl.Float32, eager=True).reshape((2_000, 1_000)).arr.to_list(), 4),
        (pl.repeat(0.0, 2_000_000, dtype=pl.Float32, eager=True).reshape((2_000, 1_000)), 4),
    ],
    ids=["numbers", "words", "lists", "arrays"],
)
def test_equal_rows_count_in_full(
    column: pl.Series, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.parquet"
    pl.DataFrame({"x": column}).write_parquet(path)
    assert path.stat().st_size < MIB / 4
    for read in (read_table, files.read_table):
        monkeypatch.setattr(files, "available_bytes", lambda: 2_000_000 * each - 1)
        assert "table.parquet: unpacked and read, the contents take at least" in refusal(
            lambda read=read: read(path)
        )
        monkeypatch.setattr(files, "available_bytes", lambda: 2_000_000 * each + MIB)
        assert len(read(path)) == len(column)


def test_images_that_are_bombs_are_named_in_words_of_pillow(tmp_path: Path) -> None:
    size = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", size), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )
    (path := tmp_path / "bomb.png").write_bytes(png)
    table, names = read_images([path], [path.name]), ["row 1 (bomb.png)"]
    line = refusal(
        lambda: decoded(table["image"], "task.path", names.__getitem__, size=(8, 8), mode="RGB", resize=True)
    )
    assert "row 1 (bomb.png): Image size (400000000 pixels) exceeds limit of" in line
    assert "decompression bomb" in line


def test_decoded_images_have_to_fit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    column = pl.Series([{"bytes": b"", "path": "a.png"}] * 1000)
    monkeypatch.setattr(files, "available_bytes", lambda: 1000 * 300 * 200 * 3 - 1)
    line = refusal(lambda: decoded(column, "task.path", str, size=(300, 200), mode="RGB", resize=True))
    assert line.startswith("task.path: the pixels take at least 0.168 GiB of memory")


@pytest.mark.timeout(20)
def test_an_experiment_from_a_pipe_has_a_writer(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "silent.yaml")
    assert "accepted: a mapping" in refusal(lambda: Experiment.load(path))
    reads, writes = os.pipe()
    os.write(writes, b"{nodes: 3, task: digits, algorithm: d-psgd, stop: {rounds: 1}}")
    os.close(writes)
    assert Experiment.load(f"/dev/fd/{reads}").nodes == 3
    os.close(reads)


@pytest.mark.timeout(20)
def test_a_fingerprint_waits_for_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "table.csv")
    for endless in (path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            digest(endless)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("topology", "line"),
    [
        (
            StochasticBlock(sizes=(10**12, 4), p_in=1, p_out=0),
            "topology.sizes: 1000000000004 nodes in all; accepted: 4",
        ),
        (Torus(rows=10**12), "topology.rows: 1000000000000 for 4 nodes; accepted: a divisor of 4"),
        *(
            (
                Generator(generator=name, parameters=parameters),
                f"topology.parameters: {parameters}: graphs of more than 2,000 nodes and links; accepted: a graph"
                " of 4 nodes",
            )
            for name, parameters in {
                "empty_graph": {"n": 10**12},
                "complete_graph": {"n": 10**5},
                "hypercube_graph": {"n": 40},
                "balanced_tree": {"r": 9, "h": 5},
                "random_geometric_graph": {"n": 10**9, "radius": 0.1},
                "grid_2d_graph": {"m": 3000, "n": 3000},
                "stochastic_block_model": {"sizes": [10**9, 4], "p": [[1, 1], [1, 1]]},
            }.items()
        ),
    ],
    ids=lambda value: getattr(value, "generator", type(value).__name__),
)
def test_a_graph_of_more_nodes_than_the_run_has_is_not_made(
    topology: Topology, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "_ALWAYS", 2_000)
    assert refusal(lambda: check(topology)).startswith(line)


def test_graphs_of_the_run_s_size_are_made_as_before() -> None:
    graph = TopologySchedule(Generator(generator="complete_graph", parameters={"n": 100}), 100, 1).graph(0)
    assert graph.arcs == 100 * 99
    draw = Generator(generator="uniform_random_intersection_graph", parameters={"m": 500, "p": 0.1})
    assert TopologySchedule(draw, 30, 1).graph(0).nodes == 30  # by way of a graph of 530 nodes


def test_links_of_a_complete_graph_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "available_bytes", lambda: 2**33)
    line = refusal(lambda: check(Complete(), 100_000))
    assert line.startswith(
        "topology: the 9,999,900,000 links of a complete graph of 100,000 nodes take at least 298 GiB"
    )


def test_memory_limits_the_graphs_of_networkx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "available_bytes", lambda: 100 * 1000)
    line = refusal(lambda: check(Generator(generator="complete_graph", parameters={"n": 40}), 40))
    assert "more than 1,000 nodes and links" in line


def test_tables_that_are_mapped_or_read_in_parts_are_not_bound_by_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.numpy import save_file

    save_file({"parameters": np.zeros((1, 300_000), np.float32)}, path := tmp_path / "models.safetensors")
    monkeypatch.setattr(files, "available_bytes", lambda: 1000)
    assert files.read_tensors(path)["parameters"].shape == (1, 300_000)


def test_small_files_are_read_as_before(tmp_path: Path) -> None:
    (path := tmp_path / "users.json").write_text(json.dumps({"user_data": {"ann": {"x": [[1]], "y": [0]}}}))
    assert list(read_users(tmp_path)) == ["ann"]
    (path := tmp_path / "churn.csv.gz").write_bytes(gzip.compress(b"time_s,node,event\n1,0,crash\n"))
    [interval] = Churn(path=path).plan(4, 1, "faults.0").intervals
    assert (interval.from_s, interval.node) == (1, 0)
