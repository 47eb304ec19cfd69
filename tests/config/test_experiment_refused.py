"""Invalid experiments: one clear line per problem, without pydantic jargon."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from experiment_texts import refused, text

from gossamer import BadInput, Experiment

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"seeds": 3},
        "seeds: unknown field (did you mean 'seed'?); accepted: aggregator, algorithm, batch_size, ",
    ),
    (
        {"evaluation": {"every-rounds": 1}},
        "evaluation.every-rounds: unknown field (did you mean 'every_rounds'?); accepted: every_rounds, every_s",
    ),
    ({"Seed": 3}, "Seed: unknown field (did you mean 'seed'?); accepted: aggregator, algorithm, "),
    (
        {"optimizer": {"name": "sgd", "lr": 0.1, "Momentum": 0.9}},
        "optimizer.Momentum: unknown field (did you mean 'momentum'?); accepted: clip_norm, clip_value, ",
    ),
    (
        {"evaluation": {"every_round": 1}},
        "evaluation.every_round: unknown field (did you mean 'every_rounds'?); accepted: every_rounds, every_s",
    ),
    (
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentun": 0.9}},
        "optimizer.momentun: unknown field (did you mean 'momentum'?); accepted: clip_norm, clip_value, ",
    ),
    (
        {"engine": {"trainr": "auto"}},
        "engine.trainr: unknown field (did you mean 'trainer'?); accepted: cuda_graphs, ",
    ),
    ({"algorithm": "d-pgsd"}, "algorithm: unknown name 'd-pgsd' (did you mean 'd-psgd'?); accepted: "),
    (
        {"topology": {"name": "rng"}},
        "topology: unknown name 'rng' (did you mean 'ring'?); accepted: adjacency, ",
    ),
    ({"engine": "simulat"}, "engine.name: got 'simulat' (did you mean 'simulate'?); accepted: "),
    ({"engine": {"name": [1]}}, "engine.name: got [1]"),
    ({"engine": 3}, "engine: got 3; accepted: "),
    (
        {"engine": {"trainer": "batch"}},
        "engine.trainer: got 'batch'; accepted: 'auto', 'sequential', 'batched' or 'fused'",
    ),
    ({"engine": {"name": "processes", "trainer": "batched"}}, "engine.trainer: got 'batched'; accepted: "),
    ({"engine": {"device": "tpu"}}, "engine.device: got 'tpu'; accepted: "),
    ({"nodes": 0}, "nodes: got 0; accepted: greater than or equal to 1"),
    ({"nodes": "four"}, "nodes: got 'four'; accepted: an integer"),
    ({"nodes": True}, "nodes: got True; accepted: "),
    ({"optimizer": {"name": "sgd", "lr": True}}, "optimizer.lr: got True; accepted: a number"),
    (
        {"topology": {"name": "random-regular", "degree": True}},
        "topology.degree: got True; accepted: an integer",
    ),
    ({"partition": {"name": "dirichlet", "alpha": True}}, "partition.alpha: got True; accepted: a number"),
    ({"network": {"name": "uniform", "latency_s": True}}, "network.latency_s: got True; accepted: a number"),
    ({"evaluation": {"samples": True}}, "evaluation.samples: got True; accepted: an integer"),
    ({"evaluation": {"nodes": [0, True]}}, "evaluation.nodes.1: got True; accepted: an integer"),
    ({"stop": {"time_s": False}}, "stop.time_s: got False; accepted: a number"),
    ({"nodes": None}, "nodes: got null (empty); accepted: an integer"),
    ({"task": None}, "task: got null (empty); accepted: a name, or a mapping with 'name'"),
    ({"stop": None}, "stop: got null (empty); accepted: a mapping of fields"),
    ({"engine": {"name": None}}, "engine.name: got null (empty); accepted: simulate, processes"),
    ({"seed": -1}, "seed: got -1; accepted: greater than or equal to 0"),
    ({"seed": 10**60}, "seed: got 1000000000000000000000000000000000000"),
    ({"nodes": 10**12}, "nodes: got 1000000000000; accepted: less than or equal to 1000000"),
    ({"batch_size": 10**8}, "batch_size: got 100000000; accepted: "),
    (
        {"engine": {"threads": 10**11}},
        "engine.threads: got 100000000000; accepted: less than or equal to 1024",
    ),
    ({"engine": {"workers": 10**11}}, "engine.workers: got 100000000000; accepted: "),
    (
        {"partition": {"name": "dirichlet", "alpha": 1e-300}},
        "partition.alpha: got 1e-300; accepted: greater than or equal to 0.000000001",
    ),
    ({"nodes": ...}, "nodes: missing"),
    ({"task": ...}, "task: missing"),
    ({"stop": ...}, "stop: missing"),
    ({"stop": {}}, "stop: got {}; accepted: stop.rounds, stop.time_s, stop.bytes or stop.bytes_per_node"),
    ({"stop": {"target": {"metric": "x", "value": 1}}}, "stop: got "),
    (
        {"failures": {"heartbeat_s": 6}},
        "failures: got {'heartbeat_s': 6}; accepted: heartbeat_s of at most half of detection_s",
    ),
    ({"failures": {"detection_s": 0}}, "failures.detection_s: got 0"),
    ({"stop": {"round": 5}}, "stop.round: unknown field (did you mean 'rounds'?)"),
    ({"stop": {"rounds": 1, "target": {"metric": "x"}}}, "stop.target.value: missing"),
    ({"stop": 3}, "stop: got 3; accepted: "),
    (
        {"algorithm": {"name": "d-psgd", "local_steps": 10**12}},
        "algorithm.local_steps: got 1000000000000; accepted: ",
    ),
    (
        {"evaluation": {"every_s": 1e-12}},
        "evaluation.every_s: got 1e-12; accepted: greater than or equal to 0.000001",
    ),
    ({"batch_size": 0}, "batch_size: got 0; accepted: greater than or equal to 1 or 'full'"),
    ({"batch_size": "all"}, "batch_size: got 'all'; accepted: an integer or 'full'"),
    ({"name": "a b"}, "name: got 'a b'; accepted: "),
    ({"initial": "comon"}, "initial: got 'comon'; accepted: 'common' or 'independent'"),
    ({"evaluation": {"nodes": "al"}}, "evaluation.nodes: got 'al'; accepted: 'all' or 'average' or "),
    ({"evaluation": {"nodes": 9}}, "evaluation.nodes: got 9; accepted: at most 4"),
    ({"evaluation": {"nodes": [0, 7]}}, "evaluation.nodes: got [0, 7]; accepted: ranks 0 to 3"),
    ({"evaluation": 3}, "evaluation: got 3; accepted: "),
    ({"gather": {"timeout_s": -1}}, "gather.timeout_s: got -1; accepted: greater than 0"),
    (
        {"network": {"name": "uniform", "latency_s": float("inf")}},
        "network.latency_s: got inf; accepted: a finite",
    ),
    ({"stop": {"time_s": float("inf")}}, "stop.time_s: got inf; accepted: a finite number"),
    ({"gather": {"timeout_s": float("inf")}}, "gather.timeout_s: got inf; accepted: a finite number"),
    ({"optimizer": {"name": "sgd", "lr": float("inf")}}, "optimizer.lr: got inf; accepted: a finite number"),
    ({"evaluation": {"every_s": float("inf")}}, "evaluation.every_s: got inf; accepted: a finite number"),
    ({"stop": {"time_s": float("nan")}}, "stop.time_s: got nan; accepted: "),
    (
        {"stop": {"rounds": 1, "target": {"metric": "test_loss", "value": float("inf")}}},
        "stop.target.value: got inf; accepted: a finite number",
    ),
    (
        {"engine": {"name": "processes", "start_timeout_s": float("inf")}},
        "engine.start_timeout_s: got inf; accepted: a finite number",
    ),
    ({"evaluation": {"nodes": True}}, "evaluation.nodes: got True; accepted: 'all' or 'average' or "),
    (
        {"optimizer": {"name": "sgd", "lr": 0.1, "nesterov": True}},
        "optimizer.nesterov: got True with momentum 0 and dampening 0;"
        " accepted: True with a momentum above 0 and dampening 0",
    ),
    ({"task": {"nam": "digits"}}, "task: got {'nam': 'digits'}; accepted: a name, or a mapping with 'name'"),
    ({"wrappers": 3}, "wrappers: got 3; accepted: a list"),
    ({"evaluation": {"nodes": [0, "x"]}}, "evaluation.nodes.1: got 'x'; accepted: an integer"),
    ({"nodes": 2.5}, "nodes: got 2.5; accepted: an integer"),
    ({"wrappers": ["nope"]}, "wrappers"),
    ({"data_root": 3}, "data_root: got 3; accepted: "),
    ({"topology": {"name": "layers", "layers": {"a": "rng"}}}, "topology.layers.a: unknown name 'rng'"),
    (
        {"topology": {"name": "layers", "layers": {"a": {"name": "ring", "b": 1}}}},
        "topology.layers.a.b: unknown field; accepted: allow_disconnected, every_rounds, weights",
    ),
]
JARGON = (
    "Input ",
    "String should",
    "should be",
    "validation error",
    "http",
    "pydantic",
    "type=",
    "<class",
    "instance of",
    "tuple",
    "fractional part",
)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_bad_input_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    problems = refused(text(**changes))
    assert len(problems) == 1
    assert problems[0].startswith(message)
    assert "\n" not in problems[0]
    assert [word for word in JARGON if word in problems[0]] == []
    assert "accepted:  or" not in problems[0]


def test_misspelt_field_is_listed_before_missing_one() -> None:
    first, second = refused(text(codec={"name": "top-k", "fracton": 0.1}))
    assert first.startswith("codec.fracton: unknown field (did you mean 'fraction'?); accepted: ")
    assert second == "codec.fraction: missing; a value is required"


def test_every_problem_has_its_own_line() -> None:
    problems = refused(text(nodes=0, seed=-1, initial="x"))
    assert sorted(problem.partition(":")[0] for problem in problems) == ["initial", "nodes", "seed"]


@pytest.mark.parametrize("source", ["nodes: [", "a: b: c", "\t- x"])
def test_yaml_error_names_line_and_column(source: str) -> None:
    (problem,) = refused(source)
    assert re.match(r"experiment, line [12], column \d+: not YAML: ", problem)
    assert "\n" not in problem


@pytest.mark.parametrize("source", ["", "- nodes", "text"])
def test_file_without_mapping_is_refused(source: str) -> None:
    (problem,) = refused(source)
    assert "accepted: a mapping of fields such as 'task' and 'nodes'" in problem


def test_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"none\.yaml: No such file or directory; accepted: a YAML experiment file"
    ):
        Experiment.load(tmp_path / "none.yaml")
    with pytest.raises(BadInput, match="not a regular file; accepted: a YAML experiment file"):
        Experiment.load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match=r"binary\.yaml: .*; accepted: a YAML experiment file"):
        Experiment.load(tmp_path / "binary.yaml")


def test_infinite_override_is_refused_in_one_line() -> None:
    for field in ("stop.time_s", "gather.timeout_s", "optimizer.lr", "evaluation.every_s"):
        (problem,) = refused(text(), f"{field}=.inf")
        assert problem.startswith(f"{field}: got inf; accepted: a finite number")
