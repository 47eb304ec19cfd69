from __future__ import annotations

import gzip
import math
import os
from pathlib import Path

import numpy as np
import pytest

from gossamer import network
from gossamer.config.registry import build, placed
from gossamer.errors import BadInput
from gossamer.network import Matrix

ROOT = os.environ.get("GOSSAMER_DATA_ROOT")
MBPS = 125_000


@pytest.fixture
def latency(tmp_path: Path) -> Path:
    path = tmp_path / "latency.csv"
    path.write_text("0.5,10,20\n30,nan,40\n50,60,\n")
    return path


@pytest.fixture
def bandwidth(tmp_path: Path) -> Path:
    path = tmp_path / "bandwidth.csv"
    path.write_text("# Mbps\n,a,b,c\na,0,1,2\nb,3,,4\nc,5,6,70\n")
    return path


def test_paths_have_the_values_of_their_sites(latency: Path, bandwidth: Path) -> None:
    conditions = Matrix(
        latency_ms=latency, bandwidth_mbps=bandwidth, within_latency_s=0.001, within_bandwidth_mbps=100
    ).conditions(4, 1)
    assert conditions.rates.tolist() == [math.inf] * 8
    paths = {
        pair: conditions.path(*pair) for pair in ((0, 1), (1, 0), (2, 1), (0, 3), (3, 0), (2, 2), (1, 1))
    }
    assert {pair: path and (path.latency_s, path.rate / MBPS) for pair, path in paths.items()} == {
        (0, 1): (0.010, 1),
        (1, 0): (0.030, 3),
        (2, 1): (0.060, 6),
        (0, 3): (0.0005, 100),  # node 3 is also at site 0
        (3, 0): (0.0005, 100),
        (2, 2): (0.001, 70),
        (1, 1): (0.001, 100),
    }
    assert paths[2, 1] == network.Path((2, 5), 0.06, 0, 0, 6 * MBPS)


def test_blocks_place_consecutive_ranks_at_one_site(latency: Path) -> None:
    blocks = Matrix(latency_ms=latency, placement="blocks", jitter_s=0.002, loss=0.1).conditions(7, 1)
    delays = [path and path.latency_s for path in (blocks.path(0, to) for to in range(7))]
    assert delays == [0.0005] * 3 + [0.01] * 2 + [0.02] * 2
    path = blocks.path(0, 6)
    assert path == network.Path((0, 13), 0.02, 0.002, 0.1)


def test_shared_bandwidth_is_one_link_per_ordered_pair_of_sites(bandwidth: Path) -> None:
    conditions = Matrix(bandwidth_mbps=bandwidth, shared=True, uplink_mbps=(7, 8, 9, 10)).conditions(4, 1)
    assert (conditions.rates[:8] / MBPS).tolist() == [7, 8, 9, 10] + [math.inf] * 4
    across, again, back, inside = (conditions.path(*pair) for pair in ((0, 1), (3, 1), (1, 0), (0, 3)))
    assert across
    assert again
    assert back
    assert inside
    assert (across.links[0], across.links[-1]) == (0, 5)
    assert across.links[1:-1] == again.links[1:-1] != back.links[1:-1]
    assert conditions.rates[across.links[1]] == 1 * MBPS
    assert conditions.rates[back.links[1]] == 3 * MBPS
    assert across.rate == math.inf
    assert inside.links == (0, 7)  # unlimited: no link between


@pytest.mark.parametrize(
    "text",
    [
        "0,1\n2,0\n",
        "a,b\n0,1\n2,0\n",
        "a,0,1\nb,2,0\n",
        ",a,b\na,,1\nb,2,\n",
        "to,a,b\na,0,1\nb,2,0\n",
        "\ufeff0,1\n2,0",
    ],
)
def test_names_of_sites_are_optional(tmp_path: Path, text: str) -> None:
    path = tmp_path / "latency.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    conditions = Matrix(latency_ms=path).conditions(2, 1)
    there, back = conditions.path(0, 1), conditions.path(1, 0)
    assert there
    assert back
    assert (there.latency_s, back.latency_s) == (0.001, 0.002)


def test_matrix_of_ten_aws_regions_is_included() -> None:
    spec = {"name": "matrix", "bandwidth_mbps": "aws-ten-regions", "latency_s": 0.001, "placement": "blocks"}
    aws = build("network", spec)
    assert isinstance(aws, Matrix)
    conditions = aws.conditions(60, 1)
    rate = np.array([[conditions.path(6 * a, 6 * b).rate for b in range(10)] for a in range(10)]) / MBPS  # type: ignore[union-attr]
    np.testing.assert_array_equal(rate, rate.T)
    assert np.isinf(np.diag(rate)).all()
    # Cape Town, Oregon, and the sum over all 45 pairs.
    assert rate[0, 1:].tolist() == [26, 36, 21, 60, 67, 34, 27, 44, 36]
    assert rate[9, :-1].tolist() == [36, 109, 49, 81, 68, 70, 39, 61, 105]
    assert rate[np.triu_indices(10, 1)].sum() == 351 + 592 + 729 + 303 + 698 + 330 + 118 + 153 + 105
    path = conditions.path(0, 59)
    assert path
    assert path.latency_s == 0.001
    assert aws.spec()["bandwidth_mbps"] == "aws-ten-regions"
    assert build("network", aws.spec()) == aws


def test_unmeasured_sites_can_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    path.write_text("0,1,-0.5,3\n4,0,nan,5\n6,7,0,8\n9,10,11,0\n")
    with pytest.raises(BadInput, match=r"row 1, column 3 of the numbers: blank or below 0"):
        Matrix(latency_ms=path).conditions(2, 1)
    conditions = Matrix(latency_ms=path, unmeasured="drop-sites").conditions(3, 1)
    delays = [[conditions.path(a, b).latency_s for b in range(3)] for a in range(3)]  # type: ignore[union-attr]
    assert delays == [[0, 0.001, 0.003], [0.004, 0, 0.005], [0.009, 0.010, 0]]  # without the third site


@pytest.mark.data
@pytest.mark.skipif(ROOT is None, reason="GOSSAMER_DATA_ROOT is not set: no measured latencies")
def test_published_latencies_are_read() -> None:
    path = Path(str(ROOT)) / "network" / "plexus_latencies_227_oneway_ms.csv.gz"
    expected = np.loadtxt(path, delimiter=",") / 1000
    with pytest.raises(BadInput, match="of the numbers: blank or below 0"):
        Matrix(latency_ms=path).conditions(300, 1)
    conditions = Matrix(latency_ms=path, unmeasured="drop-sites").conditions(300, 1)
    delays = [[conditions.path(a, b).latency_s for b in range(300)] for a in range(0, 300, 23)]  # type: ignore[union-attr]
    sites = next(sites for sites in range(227, 200, -1) if delays[0][sites:] == delays[0][: 300 - sites])
    assert sites > 227 - 51 / 2
    measured = set(expected[expected >= 0].tolist())
    assert all(delay in measured for row in delays for delay in row)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1,2,3\n4,5,6\n", "2 x 3 numbers; accepted: a square matrix"),
        (",a,b\na,0,x\nb,1,0\n", "a word among the numbers; accepted: numbers"),
        ("0,1\ninf,0\n", "accepted: a square matrix of numbers up to"),
        ("0,\n1,0\n", "row 1, column 2 of the numbers: blank or below 0"),
        (",a,b\na,0,-1\nb,1,0\n", "row 1, column 2 of the numbers"),
        ("a,b\n", "0 x 2 numbers; accepted: a square matrix"),
        ("a\n", "0 x 0 numbers; accepted: a square matrix"),
        ("", "empty; accepted: a CSV file"),
        ("\xff", "latency.csv: not UTF-8; accepted: a CSV file"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "latency.csv"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(BadInput, match=problem) as error:
        Matrix(latency_ms=path).conditions(2, 1)
    assert str(error.value).startswith(f"network.latency_ms: {path}")


@pytest.mark.parametrize(
    ("name", "content"),
    [("gone.csv", None), ("cut.csv.gz", gzip.compress(b"0,1", mtime=0)[:-9])],
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=r"accepted: a CSV file \(\.csv or \.csv\.gz\)"):
        Matrix(bandwidth_mbps=tmp_path / name).conditions(2, 1)


def test_invalid_parameters_are_refused(latency: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="latency_ms, bandwidth_mbps, or both"):
        build("network", "matrix")
    with pytest.raises(BadInput, match="latency_ms or latency_s, not both"):
        build("network", {"name": "matrix", "latency_ms": str(latency), "latency_s": 1})
    with pytest.raises(BadInput, match=r"network\.uplink_mbps: 2 values for 3 nodes"):
        Matrix(latency_ms=latency, uplink_mbps=(1, 2)).conditions(3, 1)
    zero = tmp_path / "zero.csv"
    zero.write_text("0,0\n1,0\n")
    with pytest.raises(BadInput, match=r"network\.bandwidth_mbps: .*row 1, column 2"):
        Matrix(bandwidth_mbps=zero).conditions(2, 1)
    zero.write_text("0,3\n1,0\n")
    with pytest.raises(
        BadInput, match=r"bandwidth_mbps: 2 sites; accepted: the 3 sites of network\.latency_ms"
    ):
        Matrix(latency_ms=latency, bandwidth_mbps=zero).conditions(2, 1)
    assert build("network", Matrix(latency_ms=latency).spec()) == Matrix(latency_ms=latency)


def test_file_paths_are_relative_to_the_experiment(latency: Path, bandwidth: Path) -> None:
    spec = {"name": "matrix", "latency_ms": latency.name, "bandwidth_mbps": bandwidth.name}
    assert build("network", spec, {"folder": latency.parent}) == Matrix(
        latency_ms=latency, bandwidth_mbps=bandwidth
    )
    by_name = {"name": "matrix", "bandwidth_mbps": placed("aws-ten-regions", Path())}
    assert build("network", by_name, {"folder": latency.parent}) == Matrix(bandwidth_mbps="aws-ten-regions")


def test_numbers_naming_sites_are_not_read_as_latencies(tmp_path: Path) -> None:
    """pandas writes such names."""
    path = tmp_path / "latency.csv"
    path.write_text(",0,1,2\n0,,10,20\n1,30,,40\n2,50,60,\n")
    conditions = Matrix(latency_ms=path).conditions(3, 1)
    path_01 = conditions.path(0, 1)
    assert path_01 is not None
    assert path_01.latency_s == 0.010


def test_numbers_that_may_be_names_of_sites_are_refused(tmp_path: Path) -> None:
    """Sites 7, 8 and 9: as a matrix of four sites, 7 ms would be a latency."""
    path = tmp_path / "latency.csv"
    path.write_text(",7,8,9\n7,0.5,10,20\n8,30,0.5,40\n9,50,60,0.5\n")
    with pytest.raises(
        BadInput, match=r"latency.csv: only the first cell of the diagonal is blank, so the first line may h"
    ):
        Matrix(latency_ms=path).conditions(4, 1)
    path.write_text(",0,1\n0,0.5,10\n1,30,0.5\n")  # as pandas writes a matrix
    found = Matrix(latency_ms=path).conditions(2, 1).path(0, 1)
    assert found is not None
    assert found.latency_s == 0.01
