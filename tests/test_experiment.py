from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import BadInput, Experiment
from gossamer.algorithms.d_psgd import DPSGD
from gossamer.experiment import Processes, Simulate
from gossamer.learning.optimizer import SGD
from gossamer.network import LogNormal, Uniform

BASE = {"nodes": 4, "task": "digits", "algorithm": "d-psgd", "stop": {"rounds": 5}}
DESIGN = """
name: quickstart
seed: 1
nodes: 16
task: {name: digits}
partition: {name: dirichlet, alpha: 0.3}
topology: {name: random-regular, degree: 4}
algorithm: {name: d-psgd, local_steps: 5}
optimizer: {name: sgd, lr: 0.1}
batch_size: 16            # or "full"
initial: common           # or independent
compute: {name: constant, seconds_per_step: 0.01}
network: {name: uniform, latency_s: 0.001, bandwidth_mbps: 60}
evaluation: {every_rounds: 10, nodes: all, samples: 1000}
stop: {rounds: 100}       # and/or time_s, and/or target: {metric: test_accuracy, value: 0.9}
data_root: null
engine: {name: simulate, trainer: auto}
"""


def text(**changes: Any) -> str:
    """A small valid experiment file; a field that is ... is left out."""
    fields = {name: value for name, value in {**BASE, **changes}.items() if value is not ...}
    return yaml.safe_dump(fields)


def refused(source: str, *overrides: str, engine: str | None = None) -> tuple[str, ...]:
    with pytest.raises(BadInput) as failure:
        Experiment.parse(source, overrides, engine)
    return failure.value.problems


# --- what is accepted ---


def test_the_designs_experiment() -> None:
    experiment = Experiment.parse(DESIGN)
    assert (experiment.name, experiment.seed, experiment.nodes, experiment.batch_size) == (
        "quickstart",
        1,
        16,
        16,
    )
    assert experiment.algorithm == DPSGD(local_steps=5)
    assert experiment.network == Uniform(latency_s=0.001, bandwidth_mbps=60)
    assert experiment.stop.rounds == 100
    assert experiment.data_root is None
    assert experiment.engine == Simulate(trainer="auto")


def test_what_is_left_out_has_a_default() -> None:
    experiment = Experiment.parse(text())
    assert experiment.optimizer == SGD(lr=0.1)
    assert experiment.engine == Simulate()
    assert experiment.evaluation.every_rounds == 10
    assert experiment.gather.timeout_s is None
    assert experiment.topology.name_of() == "ring"
    assert experiment.partition.name_of() == "iid"


def test_an_experiment_is_frozen() -> None:
    experiment = Experiment.parse(text())
    with pytest.raises(ValueError, match="frozen"):
        experiment.nodes = 5  # type: ignore[misc]


@pytest.mark.parametrize("nodes", ["all", "average", 3, [0, 2]])
def test_whose_models_are_judged(nodes: Any) -> None:
    experiment = Experiment.parse(text(evaluation={"nodes": nodes}))
    assert experiment.evaluation.nodes == nodes


def test_a_file_is_loaded_and_saved(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(DESIGN)
    experiment = Experiment.load(file)
    assert experiment == Experiment.parse(DESIGN)
    experiment.save(tmp_path / "saved.yaml")
    assert Experiment.load(tmp_path / "saved.yaml") == experiment


Settings = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63),
        "nodes": st.integers(3, 10_000),
        "optimizer": st.builds(lambda lr: {"name": "sgd", "lr": lr}, st.floats(1e-12, 1e6)),
        "batch_size": st.integers(1, 10**6) | st.just("full"),
        "network": st.builds(
            lambda latency, rate: {"name": "uniform", "latency_s": latency, "bandwidth_mbps": rate},
            st.floats(0, 1e3),
            st.none() | st.floats(1e-9, 1e9),
        ),
        "stop": st.builds(lambda s: {"time_s": s}, st.floats(1e-9, 1e9)),
        "evaluation": st.fixed_dictionaries(
            {"nodes": st.sampled_from(["all", "average", 2, [1], []])},
            optional={
                "every_rounds": st.none() | st.integers(1, 100),
                "samples": st.none() | st.integers(1, 10),
            },
        ),
        "topology": st.sampled_from(
            [
                "star",
                {"name": "erdos-renyi", "p": 0.5, "every_rounds": 2, "weights": "uniform"},
                {"name": "layers", "layers": {"a": "ring", "b": {"name": "random-regular", "degree": 2}}},
            ]
        ),
        "engine": st.sampled_from(["simulate", "processes", {"name": "processes", "train_at_once": 2}]),
        "compute": st.sampled_from(["constant", {"name": "log-normal", "sigma": 0.1}]),
    },
)


@settings(max_examples=40)
@given(Settings)
def test_the_resolved_experiment_is_the_whole_truth(changes: dict[str, Any]) -> None:
    experiment = Experiment.parse(text(**changes))
    resolved = experiment.to_yaml()
    again = Experiment.parse(resolved)
    assert again == experiment
    assert again.to_yaml() == resolved
    assert set(yaml.safe_load(resolved)) == set(Experiment.model_fields)


# --- overrides ---


def test_overrides_are_typed_and_reach_inside() -> None:
    experiment = Experiment.parse(
        DESIGN,
        [
            "optimizer.lr=0.05",
            "nodes=8",
            "batch_size=full",
            "evaluation.samples=null",
            "evaluation.nodes=[0, 3]",
            "algorithm.overlap=true",
            "stop={time_s: 2.5}",
        ],
    )
    assert experiment.optimizer == SGD(lr=0.05)
    assert (experiment.nodes, experiment.batch_size) == (8, "full")
    assert experiment.evaluation.samples is None
    assert experiment.evaluation.nodes == [0, 3]
    assert experiment.algorithm == DPSGD(local_steps=5, overlap=True)
    assert (experiment.stop.rounds, experiment.stop.time_s) == (None, 2.5)


def test_the_experiments_own_name_can_be_overridden() -> None:
    experiment = Experiment.parse(DESIGN, ["name=other"])
    assert experiment == Experiment.parse(DESIGN).override(name="other")


def test_the_last_of_several_overrides_counts() -> None:
    assert Experiment.parse(DESIGN, ["nodes=8", "nodes=20"]).nodes == 20


def test_another_component_does_not_inherit_the_old_ones_parameters() -> None:
    changed = Experiment.parse(DESIGN, ["compute.name=log-normal", "compute.sigma=0.1"])
    assert changed.compute == LogNormal(sigma=0.1)
    same = Experiment.parse(DESIGN, ["compute.name=constant"])
    assert same.compute == Experiment.parse(DESIGN).compute


def test_a_component_is_named_before_its_parameters_are_given_whatever_the_order() -> None:
    source = text(topology={"name": "erdos-renyi", "p": 0.5})
    for overrides in (
        ["topology.degree=3", "topology.name=random-regular"],
        ["topology.name=random-regular", "topology.degree=3"],
    ):
        topology = Experiment.parse(source, overrides).topology
        assert (topology.name_of(), topology.spec()["degree"]) == ("random-regular", 3)
        assert Experiment.parse(DESIGN, overrides).topology.spec()["degree"] == 3
    # Among overrides of one field, the last one still counts.
    twice = ["topology.degree=2", "topology.name=random-regular", "topology.degree=3", "nodes=8", "nodes=6"]
    experiment = Experiment.parse(source, twice)
    assert (experiment.topology.spec()["degree"], experiment.nodes) == (3, 6)


def test_infinity_in_a_file_is_refused_in_one_line() -> None:
    for field in ("stop.time_s", "gather.timeout_s", "optimizer.lr", "evaluation.every_s"):
        (problem,) = refused(text(), f"{field}=.inf")
        assert problem.startswith(f"{field}: got inf; accepted: a finite number")


def test_a_parameter_of_a_component_that_is_only_named() -> None:
    assert Experiment.parse(text(), ["algorithm.local_steps=3"]).algorithm == DPSGD(local_steps=3)


def test_a_parameter_of_a_component_that_is_left_to_its_default() -> None:
    experiment = Experiment.parse(text(), ["optimizer.lr=0.05", "network.latency_s=0.5"])
    assert experiment.optimizer == SGD(lr=0.05)
    assert experiment.network == Uniform(latency_s=0.5)


def test_override_gives_a_changed_copy() -> None:
    experiment = Experiment.parse(DESIGN)
    changed = experiment.override(nodes=8, optimizer={"name": "sgd", "lr": 0.5})
    assert (changed.nodes, changed.optimizer) == (8, SGD(lr=0.5))
    assert experiment.nodes == 16
    assert changed.override(nodes=16, optimizer={"name": "sgd", "lr": 0.1}) == experiment
    with pytest.raises(BadInput, match="nodes: got 0; accepted: greater than or equal to 1"):
        experiment.override(nodes=0)


# --- paths ---


def test_paths_are_relative_to_the_file_and_on_the_command_line_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "there" / "experiment.yaml"
    file.write_text(text(data_root="data", topology={"name": "edge-list", "path": "../edges.txt"}))
    experiment = Experiment.load(os.path.relpath(file))
    assert experiment.data_root == tmp_path / "there" / "data"
    assert experiment.topology.spec()["path"] == str(tmp_path / "edges.txt")
    overridden = Experiment.load(file, ["data_root=mine", "topology.path=my-edges.txt"])
    assert overridden.data_root == tmp_path / "here" / "mine"
    assert overridden.topology.spec()["path"] == str(tmp_path / "here" / "my-edges.txt")
    # Resolved paths are absolute: the saved experiment means the same anywhere.
    monkeypatch.chdir(tmp_path)
    assert Experiment.parse(experiment.to_yaml()) == experiment


# --- engines ---


@pytest.mark.parametrize("trainer", ["auto", "sequential", "batched"])
@pytest.mark.parametrize("threads", [1, 4])
def test_another_engine_keeps_the_experiment_valid(trainer: str, threads: int) -> None:
    source = text(engine={"name": "simulate", "trainer": trainer, "threads": threads, "device": "cpu"})
    assert Experiment.parse(source, engine="processes").engine == Processes()


def test_back_to_the_simulator() -> None:
    source = text(engine={"name": "processes", "start_timeout_s": 5.0})
    assert Experiment.parse(source, engine="simulate").engine == Simulate()
    assert Experiment.parse(text(), engine="processes").engine == Processes()
    assert Experiment.parse(text(engine="simulate"), engine="processes").engine == Processes()


def test_the_same_engine_keeps_its_options() -> None:
    source = text(engine={"name": "simulate", "trainer": "batched"})
    assert Experiment.parse(source, engine="simulate").engine == Simulate(trainer="batched")
    source = text(engine={"name": "processes", "train_at_once": 3})
    assert Experiment.parse(source, engine="processes").engine == Processes(train_at_once=3)


# --- what is refused ---

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seeds": 3}, "seeds: unknown field (did you mean 'seed'?); accepted: algorithm, batch_size, "),
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
        "engine.trainr: unknown field (did you mean 'trainer'?); accepted: device, ",
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
        "engine.trainer: got 'batch'; accepted: 'auto', 'sequential' or 'batched'",
    ),
    ({"engine": {"name": "processes", "trainer": "batched"}}, "engine.trainer: got 'batched'; accepted: "),
    ({"engine": {"device": "tpu"}}, "engine.device: got 'tpu'; accepted: "),
    ({"nodes": 0}, "nodes: got 0; accepted: greater than or equal to 1"),
    ({"nodes": "four"}, "nodes: got 'four'; accepted: a valid integer"),
    ({"nodes": True}, "nodes: got True; accepted: "),
    ({"seed": -1}, "seed: got -1; accepted: greater than or equal to 0"),
    ({"nodes": ...}, "nodes: missing"),
    ({"task": ...}, "task: missing"),
    ({"stop": ...}, "stop: missing"),
    ({"stop": {}}, "stop: got {}; accepted: stop.rounds or stop.time_s"),
    ({"stop": {"target": {"metric": "x", "value": 1}}}, "stop: got "),
    (
        {"failures": {"heartbeat_s": 6}},
        "failures: got {'heartbeat_s': 6}; accepted: heartbeat_s of at most half of detection_s",
    ),
    ({"failures": {"detection_s": 0}}, "failures.detection_s: got 0"),
    ({"stop": {"round": 5}}, "stop.round: unknown field (did you mean 'rounds'?)"),
    ({"stop": {"rounds": 1, "target": {"metric": "x"}}}, "stop.target.value: missing"),
    ({"stop": 3}, "stop: got 3; accepted: "),
    ({"batch_size": 0}, "batch_size: got 0; accepted: greater than or equal to 1 or 'full'"),
    ({"batch_size": "all"}, "batch_size: got 'all'; accepted: a valid integer or 'full'"),
    ({"name": "a b"}, "name: got 'a b'; accepted: "),
    ({"initial": "comon"}, "initial: got 'comon'; accepted: 'common' or 'independent'"),
    ({"evaluation": {"nodes": "al"}}, "evaluation.nodes: got 'al'; accepted: 'all' or 'average' or "),
    ({"evaluation": {"nodes": 9}}, "evaluation.nodes: 9 of 4 nodes; accepted: at most 4"),
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
        "optimizer.nesterov: got True with momentum 0; accepted: True with a momentum above 0",
    ),
    ({"task": {"nam": "digits"}}, "task: got {'nam': 'digits'}; accepted: a name, or a mapping with 'name'"),
    ({"wrappers": 3}, "wrappers: got 3; accepted: a list"),
    ({"evaluation": {"nodes": [0, "x"]}}, "evaluation.nodes.1: got 'x'; accepted: a valid integer"),
    ({"nodes": 2.5}, "nodes: got 2.5; accepted: a valid integer"),
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


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_bad_input_is_one_clear_line(changes: dict[str, Any], said: str) -> None:
    problems = refused(text(**changes))
    assert len(problems) == 1
    assert problems[0].startswith(said)
    assert "\n" not in problems[0]
    assert [word for word in JARGON if word in problems[0]] == []
    assert "accepted:  or" not in problems[0]


def test_several_problems_are_a_line_each() -> None:
    problems = refused(text(nodes=0, seed=-1, initial="x"))
    assert sorted(problem.partition(":")[0] for problem in problems) == ["initial", "nodes", "seed"]


@pytest.mark.parametrize("source", ["nodes: [", "a: b: c", "\t- x"])
def test_broken_yaml_says_where(source: str) -> None:
    (problem,) = refused(source)
    assert problem.startswith("experiment: not YAML: ")
    assert "line 1" in problem
    assert "\n" not in problem


@pytest.mark.parametrize("source", ["", "- nodes", "text"])
def test_a_file_that_holds_no_mapping(source: str) -> None:
    (problem,) = refused(source)
    assert "accepted: a mapping of fields such as 'task' and 'nodes'" in problem


def test_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"none\.yaml: No such file or directory; accepted: a YAML experiment file"
    ):
        Experiment.load(tmp_path / "none.yaml")
    with pytest.raises(BadInput, match="Is a directory"):
        Experiment.load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match=r"binary\.yaml: .*; accepted: a YAML experiment file"):
        Experiment.load(tmp_path / "binary.yaml")


@pytest.mark.parametrize("override", ["nodes", "=3", "a b=3", ".nodes=3", "nodes.=3"])
def test_an_override_that_is_no_assignment(override: str) -> None:
    assert refused(text(), override) == (f"--set {override}: accepted: a.b=value, e.g. optimizer.lr=0.05",)


def test_an_override_that_leads_nowhere() -> None:
    assert refused(text(), "nodes=[") == ("--set nodes=[: '[' is not a YAML value",)
    assert refused(text(), "nodes.x=3") == ("--set nodes.x=3: nodes is 4, which has no fields",)
    (problem,) = refused(text(), "stop.round=3")
    assert problem.startswith("stop.round: unknown field (did you mean 'rounds'?)")


def test_an_unknown_engine_on_the_command_line() -> None:
    (problem,) = refused(text(), engine="proceses")
    assert problem.startswith("engine.name: got 'proceses'")
    assert "(did you mean 'processes'?)" in problem
