"""Overrides from the command line."""

from __future__ import annotations

import pytest
from experiment_texts import DESIGN, refused, text

from gossamer import BadInput, Experiment
from gossamer.algorithms.d_psgd import DPSGD
from gossamer.config import Processes, Simulate
from gossamer.learning.optimizer import SGD
from gossamer.network import LogNormal, Slowdowns, UniformNetwork


def test_overrides_are_typed_and_reach_nested_fields() -> None:
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


def test_experiment_name_can_be_overridden() -> None:
    experiment = Experiment.parse(DESIGN, ["name=other"])
    assert experiment == Experiment.parse(DESIGN).override(name="other")


def test_field_is_set_once_and_whole_before_its_parts() -> None:
    assert refused(DESIGN, "nodes=8", "nodes=20") == (
        "--set nodes=20: nodes is already set; accepted: each field once",
    )
    assert refused(DESIGN, "topology.name=ring", "nodes=8", "topology.name=star") == (
        "--set topology.name=star: topology.name is already set; accepted: each field once",
    )
    for overrides in (["stop={time_s: 2}", "stop.rounds=3"], ["stop.rounds=3", "stop={time_s: 2}"]):
        stop = Experiment.parse(DESIGN, overrides).stop
        assert (stop.time_s, stop.rounds) == (2, 3)


def test_replaced_component_drops_old_parameters() -> None:
    changed = Experiment.parse(DESIGN, ["compute.name=log-normal", "compute.sigma=0.1"])
    assert changed.compute == LogNormal(sigma=0.1)
    same = Experiment.parse(DESIGN, ["compute.name=constant"])
    assert same.compute == Experiment.parse(DESIGN).compute


def test_component_name_applies_first_in_any_order() -> None:
    source = text(topology={"name": "erdos-renyi", "p": 0.5})
    for overrides in (
        ["topology.degree=3", "topology.name=random-regular"],
        ["topology.name=random-regular", "topology.degree=3"],
    ):
        topology = Experiment.parse(source, overrides).topology
        assert (topology.name_of(), topology.spec()["degree"]) == ("random-regular", 3)
        assert Experiment.parse(DESIGN, overrides).topology.spec()["degree"] == 3


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "compute={name: slowdowns, base: {name: constant}}",
            "compute.base.sigma=0.2",
            "compute.base.name=log-normal",
        ],
        ["compute.base.sigma=0.2", "compute.base.name=log-normal", "compute.name=slowdowns"],
    ],
    ids=["all of it", "its name"],
)
def test_outer_component_applies_before_nested_name(overrides: list[str]) -> None:
    overrides = [*overrides, "compute.random={per_hour: 1, mean_s: 1, factor: 2}"]
    compute = Experiment.parse(DESIGN, overrides).compute
    assert isinstance(compute, Slowdowns)
    assert compute.base == LogNormal(sigma=0.2)


def test_parameter_of_component_given_by_name_is_set() -> None:
    assert Experiment.parse(text(), ["algorithm.local_steps=3"]).algorithm == DPSGD(local_steps=3)


def test_parameter_of_default_component_is_set() -> None:
    experiment = Experiment.parse(text(), ["optimizer.lr=0.05", "network.latency_s=0.5"])
    assert experiment.optimizer == SGD(lr=0.05)
    assert experiment.network == UniformNetwork(latency_s=0.5)


def test_override_returns_a_changed_copy() -> None:
    experiment = Experiment.parse(DESIGN)
    changed = experiment.override(nodes=8, optimizer={"name": "sgd", "lr": 0.5})
    assert (changed.nodes, changed.optimizer) == (8, SGD(lr=0.5))
    assert experiment.nodes == 16
    assert changed.override(nodes=16, optimizer={"name": "sgd", "lr": 0.1}) == experiment
    with pytest.raises(BadInput, match="nodes: got 0; accepted: greater than or equal to 1"):
        experiment.override(nodes=0)


@pytest.mark.parametrize("override", ["nodes", "=3", "a b=3", ".nodes=3", "nodes.=3"])
def test_malformed_override_is_refused(override: str) -> None:
    assert refused(text(), override) == (f"--set {override}: accepted: a.b=value, e.g. optimizer.lr=0.05",)


def test_override_of_unknown_field_is_refused() -> None:
    assert refused(text(), "nodes=[") == (
        "--set nodes=[: '[' is not YAML; accepted: a YAML value, e.g. 0.05 or '{name: ring}'",
    )
    [problem] = refused(text(), "seed=2026-13-01")
    assert problem.startswith("--set seed=2026-13-01: '2026-13-01' is not YAML; accepted: ")
    assert refused(text(gather=None), "gather.timeout_s=3") == (
        "--set gather.timeout_s=3: gather is null (empty), which has no fields",
    )
    assert refused(text(), "nodes.x=3") == ("--set nodes.x=3: nodes is 4, which has no fields",)
    (problem,) = refused(text(), "stop.round=3")
    assert problem.startswith("stop.round: unknown field (did you mean 'rounds'?)")


def test_unknown_engine_on_command_line_is_refused() -> None:
    (problem,) = refused(text(), engine="proceses")
    assert problem.startswith("engine.name: got 'proceses'")
    assert "(did you mean 'processes'?)" in problem


@pytest.mark.parametrize(
    "override", ["engine.name=processes", "engine=processes", "engine={name: processes}"]
)
def test_same_engine_name_may_be_given_twice(override: str) -> None:
    source = text(engine={"name": "simulate", "trainer": "batched"})
    assert Experiment.parse(source, [override], "processes").engine == Processes()


def test_engine_overrides_apply_to_engine_option() -> None:
    source = text(engine={"name": "simulate", "trainer": "batched"})
    for override in ("engine.pace=true", "engine={pace: true}"):
        assert Experiment.parse(source, [override], "processes").engine == Processes(pace=True)
    (problem,) = refused(source, "engine.workers=2", engine="processes")
    assert problem.startswith("engine.workers: unknown field")


def test_unnamed_engine_options_give_way_to_another_engine() -> None:
    """Unnamed options belong to simulate, the default engine."""
    text = "task: least-squares\nalgorithm: d-psgd\nnodes: 2\nstop: {rounds: 1}\nengine: {workers: 2}"
    assert Experiment.parse(text, ["engine.name=processes"]).engine == Processes()
    assert Experiment.parse(text, ["engine.threads=2"]).engine == Simulate(workers=2, threads=2)


def test_field_of_initial_model_can_be_set() -> None:
    initial = Experiment.parse(text(), ["initial.from=none"]).model_dump(mode="json")["initial"]
    assert initial["from"].endswith("none")
