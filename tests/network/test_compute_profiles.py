"""Compute profiles with nodes of different speed, and measured step times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.network import ComputeProfile, Constant, LogNormal, StepTrace


def settled(nodes: int = 4, seed: int = 1, **spec: Any) -> ComputeProfile:
    profile = build("compute", spec)
    assert isinstance(profile, ComputeProfile)
    assert build("compute", profile.spec()) == profile
    return profile.for_nodes(nodes, seed)


def of_all(profile: ComputeProfile, nodes: int = 4, seed: int = 1) -> list[float]:
    """Seconds of two and a half steps on each node, from step 3 on."""
    return [profile.seconds(seed, rank, 3, 2.5, 100.0) for rank in range(nodes)]


def test_per_node_seconds_and_factors() -> None:
    assert of_all(settled(name="per-node", seconds_per_step=[1, 2, 0, 4])) == [2.5, 5, 0, 10]
    scaled = settled(
        name="per-node", base={"name": "constant", "seconds_per_step": 2.0}, factors=[1, 2, 0.5, 1]
    )
    assert of_all(scaled) == [5, 10, 2.5, 5]
    assert scaled.step_seconds(1, 1, 7) == 4


def test_factors_scale_the_draws_of_the_base() -> None:
    base = LogNormal(median_seconds=0.1, sigma=1)
    scaled = settled(name="per-node", base=base.spec(), factors=[1, 2, 3, 4])
    assert of_all(scaled) == pytest.approx(np.array([1, 2, 3, 4]) * of_all(base))


def test_drawn_factors_are_constant_per_node() -> None:
    profile = settled(nodes=1000, name="per-node", sigma=0.5, base=Constant(seconds_per_step=1.0).spec())
    factors = np.array([profile.step_seconds(1, rank, 0) for rank in range(1000)])
    assert np.log(factors).mean() == pytest.approx(0, abs=5 * 0.5 / np.sqrt(1000))
    assert np.log(factors).std() == pytest.approx(0.5, rel=0.1)
    other = settled(
        seed=2, nodes=1000, name="per-node", sigma=0.5, base=Constant(seconds_per_step=1.0).spec()
    )
    assert profile.step_seconds(1, 3, 99) == factors[3] != other.step_seconds(2, 3, 0)


def test_stragglers_are_slower_by_the_factor() -> None:
    slow = settled(name="stragglers", ranks=[2], base={"name": "constant", "seconds_per_step": 0.4})
    assert of_all(slow) == pytest.approx([1, 1, 5, 1])
    half = settled(name="stragglers", fraction=0.5, factor=3, which="first")
    assert of_all(half) == pytest.approx([0.075, 0.075, 0.025, 0.025])
    drawn = {
        tuple(np.array(of_all(settled(seed=seed, name="stragglers", count=1), seed=seed)) > 0.1)
        for seed in range(30)
    }
    assert len(drawn) == 4


def test_factors_of_nested_profiles_multiply() -> None:
    inner = {
        "name": "per-node",
        "factors": [1, 2, 3, 4],
        "base": {"name": "constant", "seconds_per_step": 1.0},
    }
    assert of_all(settled(name="stragglers", ranks=[0, 3], factor=10, base=inner)) == [25, 5, 7.5, 100]


def trace(tmp_path: Path, text: str, **fields: Any) -> StepTrace:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    return StepTrace(path=path, **fields)


def test_trace_gives_each_node_a_device_and_its_step_times(tmp_path: Path) -> None:
    profile = trace(tmp_path, "node,seconds_per_step\nphone,1\ntablet,10\nphone,2\nphone,4\n").for_nodes(3, 1)
    assert [profile.step_seconds(1, 0, step) for step in range(5)] == [1, 2, 4, 1, 2]
    assert [profile.step_seconds(1, 1, step) for step in range(2)] == [10, 10]
    assert profile.step_seconds(1, 2, 1) == 2
    assert of_all(profile, 2) == [1 + 2 + 4 / 2, 25]


def test_step_times_are_summed_exactly() -> None:
    """sum() of ten times 0.1 is less than 1 in Python 3.11, and 1 since 3.12."""
    assert LogNormal(median_seconds=0.1, sigma=0).seconds(1, 0, 0, 10, 0.0) == 1.0


def test_devices_may_be_drawn(tmp_path: Path) -> None:
    rows = "".join(f"{k},{k}\n" for k in range(10))
    described = trace(tmp_path, "node,seconds_per_step\n" + rows, assign="drawn")
    profile, other = described.for_nodes(1000, 1), described.for_nodes(1000, 2)
    drawn = [profile.step_seconds(1, rank, 0) for rank in range(1000)]
    assert min(drawn.count(k) for k in range(10)) > 60
    assert drawn != [other.step_seconds(2, rank, 0) for rank in range(1000)]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"name": "per-node"}, "compute: .*accepted: exactly one of seconds_per_step, factors and sigma"),
        (
            {"name": "per-node", "sigma": 1, "factors": [1]},
            "exactly one of seconds_per_step, factors and sigma",
        ),
        (
            {"name": "per-node", "seconds_per_step": [1] * 4, "base": "log-normal"},
            "seconds_per_step without a base",
        ),
        ({"name": "per-node", "factors": [1, 2]}, r"compute\.factors: 2 values for 4 nodes; accepted"),
        (
            {"name": "per-node", "seconds_per_step": [1] * 5},
            r"compute\.seconds_per_step: 5 values for 4 nodes",
        ),
        ({"name": "per-node", "factors": [1, 0, 1, 1]}, r"compute\.factors\.1: got 0"),
        (
            {"name": "per-node", "base": "fast", "sigma": 1},
            r"compute\.base: unknown name 'fast'",
        ),
        (
            {
                "name": "stragglers",
                "count": 0,
                "base": {"name": "stragglers", "count": 1, "base": {"name": "per-node", "factors": [1]}},
            },
            r"compute\.base\.base\.factors: 1 values for 4 nodes",
        ),
        ({"name": "stragglers", "factor": 2}, "exactly one of count, fraction and ranks"),
        ({"name": "stragglers", "count": 9}, r"compute\.count: 9 of 4 nodes"),
        (
            {"name": "stragglers", "count": 1, "base": {"name": "constant", "seconds": 1}},
            r"compute\.base\.seconds: unknown field \(did you mean 'seconds_per_step'\?\)",
        ),
    ],
)
def test_invalid_descriptions_are_refused(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        settled(**spec)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("phone,1\n", r"no column node, seconds_per_step; accepted: a header of node, seconds_per_step"),
        ("node,seconds_per_step\n", "no line after the header"),
        ("node,seconds_per_step\na,\n", "'seconds_per_step': None}; accepted: both values in each line"),
        ("node,seconds_per_step\na,-1\n", r"-1\.0}; accepted: numbers from 0 to 1e"),
        ("node,seconds_per_step\na,nan\n", r"nan}; accepted: numbers from 0 to 1e"),
    ],
)
def test_invalid_traces_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(BadInput, match=problem) as error:
        trace(tmp_path, text).for_nodes(2, 1)
    assert str(error.value).startswith("compute.path: ")
