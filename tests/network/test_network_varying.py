from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.network import Conditions, Matrix, Network, StarNetwork, Trace, UniformNetwork, Varying

MBPS = 125_000


def course(network: Network, nodes: int, changes: int) -> list[tuple[float, list[float]]]:
    """Times and rates at the start and after the first changes."""
    states = [(0.0, network.conditions(nodes, 1)), *islice(network.changes(nodes, 1), changes)]
    return [(at_s, (conditions.rates / MBPS).tolist()) for at_s, conditions in states]


def changes(*given: tuple[float, float, tuple[int, ...] | None]) -> list[dict[str, Any]]:
    return [{"at_s": at_s, "factor": factor, "ranks": ranks} for at_s, factor, ranks in given]


def test_factors_apply_to_the_base_from_their_time() -> None:
    network = Varying(
        base=UniformNetwork(uplink_mbps=10, downlink_mbps=20),
        rate_changes=changes((5, 0.5, (1,)), (2, 0.1, None), (5, 2, (0,)), (9, 1, None), (0, 3, (0,))),  # type: ignore[arg-type]
    )
    assert course(network, 2, 9) == [
        (0, [30, 10, 60, 20]),
        (2, [1, 1, 2, 2]),
        (5, [20, 5, 40, 10]),
        (9, [10, 10, 20, 20]),
    ]


def test_base_and_factor_may_both_change(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time_s,rank,uplink_mbps,downlink_mbps\n0,*,10,10\n2,0,20,\n3,1,,30\n")
    network = Varying(
        base=Trace(path=path, repeat_s=4), rate_changes=changes((2, 0.5, None), (2.5, 0.1, (0,)))
    )  # type: ignore[arg-type]
    assert course(network, 2, 5) == [
        (0, [10, 10, 10, 10]),
        (2, [10, 5, 5, 5]),
        (2.5, [2, 5, 1, 5]),
        (3, [2, 5, 1, 15]),
        (4, [1, 5, 1, 5]),
        (6, [2, 5, 1, 5]),
    ]


def test_path_rate_is_multiplied_by_the_smaller_factor(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("0,8\n4,0\n")
    base = Matrix(bandwidth_mbps=tmp_path / "rates.csv", latency_s=1.5)
    conditions = Varying(base=base, rate_changes=changes((0, 0.5, (0,)))).conditions(2, 1)  # type: ignore[arg-type]
    there, back = conditions.path(0, 1), conditions.path(1, 0)
    assert there
    assert back
    assert (there.rate / MBPS, back.rate / MBPS, there.latency_s) == (4, 2, 1.5)


def test_varying_network_shares_links_like_its_base() -> None:
    spec = {
        "name": "varying",
        "base": {"name": "star", "sharing": "fair", "uplink_mbps": 1},
        "rate_changes": changes((1, 2, None)),
    }
    network = build("network", spec)
    assert isinstance(network, Varying)
    assert network.sharing == "fair"
    assert isinstance(network.base, StarNetwork)
    assert build("network", network.spec()) == network
    assert network.conditions(2, 1).common_latency() == 0
    with pytest.raises(BadInput, match=r"network\.sharing: 'fifo', but network\.base\.sharing is 'fair'"):
        build("network", {**spec, "sharing": "fifo"})


TRACE = "rank,time_s,uplink_mbps,downlink_mbps,latency_ms\n"


def trace(tmp_path: Path, lines: str, **fields: Any) -> Trace:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE + lines)
    return Trace(path=path, **fields)


def test_trace_starts_from_the_base_and_ignores_blank_cells(tmp_path: Path) -> None:
    network = trace(tmp_path, "1,1.5,4,,\n*,2,,6,\n0,2,1,2,\n", bandwidth_mbps=8)
    assert course(network, 2, 9) == [(0, [8, 8, 8, 8]), (1.5, [8, 4, 8, 8]), (2, [1, 4, 2, 6])]
    assert course(trace(tmp_path, "0,0,1,,\n"), 2, 1) == [(0, [1, math.inf, math.inf, math.inf])]


def test_repeated_trace_restarts_from_the_beginning(tmp_path: Path) -> None:
    network = trace(tmp_path, "0,1,4,4,\n", bandwidth_mbps=8, repeat_s=10)
    states = course(network, 1, 5)
    assert states == [(0, [8, 8]), (1, [4, 4]), (10, [8, 8]), (11, [4, 4]), (20, [8, 8]), (21, [4, 4])]


def test_traced_latency_applies_to_the_link_of_the_node(tmp_path: Path) -> None:
    network = trace(tmp_path, "0,0,,,100\n*,1,,,0\n1,1,,,50\n", latency_s=0.25, jitter_s=0.5, loss=0.1)
    start = network.conditions(3, 1)
    (_, later), *none = network.changes(3, 1)
    assert not none

    def delays(conditions: Conditions) -> list[float]:
        paths = [conditions.path(*pair) for pair in ((0, 1), (1, 0), (1, 2))]
        assert all(path and (path.jitter_s, path.loss) == (0.5, 0.1) for path in paths)
        return [path.latency_s for path in paths if path]

    assert delays(start) == pytest.approx([0.35, 0.35, 0.25])
    assert delays(later) == pytest.approx([0.30, 0.30, 0.30])
    still = trace(tmp_path, "0,0,,,100\n*,1,,,0\n", latency_s=0.25)
    assert still.conditions(3, 1).common_latency() is None
    assert [conditions.common_latency() for _, conditions in still.changes(3, 1)] == [0.25]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("", r"no line after the header; accepted: one or more"),
        ("3,0,1,1,\n", r"rank: node 3 of 3 nodes; accepted: ranks 0 to 2"),
        ("x,0,1,1,\n", r"'rank': 'x', .*; accepted: a rank, or \* for all"),
        ("0,5,1,1,\n0,4,1,1,\n", r"'time_s': 4.0, .*; accepted: ascending times"),
        ("0,,1,1,\n", "accepted: a time in each line"),
        ("0,0,0,1,\n", r"'uplink_mbps': 0.0, .*; accepted: rates above 0"),
        ("0,0,1,fast,\n", r"row 1 of the values, column 'downlink_mbps': 'fast'; accepted: numbers"),
        ("0,0,1,1,-1\n", r"'latency_ms': -1.0}; accepted: numbers from 0 to 1e"),
        ("0,7,1,1,\n", r"network\.repeat_s: 7; accepted: more than the trace's last time, 7"),
    ],
)
def test_invalid_traces_are_refused(tmp_path: Path, lines: str, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        trace(tmp_path, lines, repeat_s=7).conditions(3, 1)


def test_wrong_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time_s,rank,up\n")
    with pytest.raises(BadInput, match=r"no column downlink_mbps, uplink_mbps; accepted: a header of"):
        Trace(path=path).conditions(3, 1)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"base": "ring"}, r"network\.base: unknown name 'ring'"),
        ({"base": {"name": "uniform", "loss": 2}}, r"network\.base\.loss: got 2"),
        (
            {"base": {"name": "star", "uplink_mbps": [1, 2]}},
            r"network\.base\.uplink_mbps: 2 values for 3 nodes",
        ),
        ({"rate_changes": []}, r"network\.rate_changes: got \[\]"),
        ({"rate_changes": changes((1, 1, (3,)))}, r"network\.rate_changes\.0\.ranks: node 3 of 3 nodes"),
        ({"rate_changes": changes((1, 0, None))}, r"network\.rate_changes\.0\.factor: got 0"),
        (
            {"rate_changes": changes((-1, 1, None))},
            r"^[^\n]*network\.rate_changes\.0\.at_s: got -1[^\n]*$",  # and no other problem
        ),
    ],
)
def test_invalid_changes_are_refused(fields: dict[str, Any], problem: str) -> None:
    spec = {
        "name": "varying",
        "base": {"name": "uniform", "bandwidth_mbps": 1},
        "rate_changes": changes((1, 2, None)),
        **fields,
    }
    with pytest.raises(BadInput, match=problem):
        build("network", spec).conditions(3, 1)  # type: ignore[attr-defined]


def test_an_optional_column_with_another_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("rank,time_s,uplink_mbps,downlink_mbps,latency_s\n0,0,1,1,0.1\n")
    with pytest.raises(
        BadInput, match=r"column 'latency_s' \(did you mean 'latency_ms'\?\); accepted: downlink_mbps, la"
    ):
        build("network", {"name": "trace", "path": str(path)}).conditions(1, 1)
    path.write_text("rank,time_s,uplink_mbps,downlink_mbps,comment\n0,0,1,1,tunnel\n")
    build("network", {"name": "trace", "path": str(path)}).conditions(1, 1)
