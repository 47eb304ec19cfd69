"""Valid experiments, from text and files, for every engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from experiment_texts import DESIGN, text
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import BadInput, Experiment, NodeWrapper
from gossamer.algorithms.d_psgd import DPSGD
from gossamer.config import Processes, Simulate, engine_name
from gossamer.config.registry import FilePath
from gossamer.learning.optimizer import SGD
from gossamer.network import UniformNetwork


def test_full_experiment_is_parsed() -> None:
    experiment = Experiment.parse(DESIGN)
    assert (experiment.name, experiment.seed, experiment.nodes, experiment.batch_size) == (
        "quickstart",
        1,
        16,
        16,
    )
    assert experiment.algorithm == DPSGD(local_steps=5)
    assert experiment.network == UniformNetwork(latency_s=0.001, bandwidth_mbps=60)
    assert experiment.stop.rounds == 100
    assert experiment.data_root is None
    assert experiment.engine == Simulate(trainer="auto")


def test_omitted_fields_have_defaults() -> None:
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
def test_every_form_of_evaluation_nodes_is_accepted(nodes: Any) -> None:
    experiment = Experiment.parse(text(evaluation={"nodes": nodes}))
    assert experiment.evaluation.nodes == nodes


def test_experiment_survives_save_and_load(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(DESIGN)
    experiment = Experiment.load(file)
    assert experiment == Experiment.parse(DESIGN)
    experiment.save(tmp_path / "saved.yaml")
    assert Experiment.load(tmp_path / "saved.yaml") == experiment


Settings = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "nodes": st.integers(3, 10_000),
        "optimizer": st.builds(lambda lr: {"name": "sgd", "lr": lr}, st.floats(1e-12, 1e6)),
        "batch_size": st.integers(1, 10**6) | st.just("full"),
        "network": st.builds(
            lambda latency, rate: {"name": "uniform", "latency_s": latency, "bandwidth_mbps": rate},
            st.just(0.0) | st.floats(1e-9, 1e3),
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
def test_resolved_experiment_round_trips_with_all_fields(changes: dict[str, Any]) -> None:
    experiment = Experiment.parse(text(**changes))
    resolved = experiment.to_yaml()
    parsed = Experiment.parse(resolved)
    assert parsed == experiment
    assert parsed.to_yaml() == resolved
    later = {"gradient", "measures", "middleware"}  # they stay out at their defaults
    assert set(yaml.safe_load(resolved)) == set(Experiment.model_fields) - later


def test_paths_are_relative_to_file_or_working_directory(
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
    # Resolved paths are absolute, so the saved experiment is the same in any folder.
    monkeypatch.chdir(tmp_path)
    assert Experiment.parse(experiment.to_yaml()) == experiment


class Masked(NodeWrapper):
    """A wrapper with a file."""

    path: FilePath


def test_wrapper_resolves_paths_and_is_named_by_index(tmp_path: Path) -> None:
    wrapper = {"name": f"{__name__}:Masked", "path": "masks.txt"}
    experiment = Experiment.parse(text(wrappers=[wrapper]), folder=tmp_path)
    assert experiment.wrappers == (Masked(path=tmp_path / "masks.txt"),)
    with pytest.raises(BadInput, match=r"^wrappers\.1\.path: missing"):
        Experiment.parse(text(wrappers=[wrapper, {"name": f"{__name__}:Masked"}]))


@pytest.mark.parametrize("trainer", ["auto", "sequential", "batched"])
@pytest.mark.parametrize("threads", [1, 4])
def test_switching_engine_keeps_experiment_valid(trainer: str, threads: int) -> None:
    source = text(engine={"name": "simulate", "trainer": trainer, "threads": threads, "device": "cpu"})
    kept = "auto" if trainer == "batched" else trainer  # real processes have no batches of nodes
    assert Experiment.parse(source, engine="processes").engine == Processes(trainer=kept)  # type: ignore[arg-type]


def test_evaluation_by_time_disables_default_rounds() -> None:
    assert Experiment.parse(text(evaluation={"every_s": 2})).evaluation.every_rounds is None
    assert Experiment.parse(text(evaluation={"every_s": 2, "every_rounds": 3})).evaluation.every_rounds == 3


def test_switching_engine_drops_engine_options() -> None:
    source = text(engine={"name": "processes", "start_timeout_s": 5.0})
    assert Experiment.parse(source, engine="simulate").engine == Simulate()
    assert Experiment.parse(text(), engine="processes").engine == Processes()
    assert Experiment.parse(text(engine="simulate"), engine="processes").engine == Processes()


def test_the_same_engine_keeps_its_options() -> None:
    source = text(engine={"name": "simulate", "trainer": "batched"})
    assert Experiment.parse(source, engine="simulate").engine == Simulate(trainer="batched")
    source = text(engine={"name": "processes", "train_at_once": 3})
    assert Experiment.parse(source, engine="processes").engine == Processes(train_at_once=3)


@pytest.mark.parametrize(
    ("text", "overrides", "engine", "expected"),
    [
        ("", (), None, "simulate"),
        ("engine: processes", (), None, "processes"),
        ("engine: {name: processes, pace: true}", (), None, "processes"),
        ("engine: {pace: true}", ("engine.name=processes",), None, "processes"),
        ("engine: processes", ("engine={name: simulate}",), None, "simulate"),
        ("engine: processes", (), "simulate", "simulate"),
        ("nodes: wrong, and not looked at", ("engine=processes",), None, "processes"),
    ],
)
def test_engine_name_is_read_without_validating_the_rest(
    tmp_path: Path, text: str, overrides: tuple[str, ...], engine: str | None, expected: str
) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(text or "{}")
    assert engine_name(Experiment.read(file, overrides, engine).get("engine", {})) == expected
