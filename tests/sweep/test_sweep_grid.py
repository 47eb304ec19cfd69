"""From a sweep file to its experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sweeps import TINY, make_sweep

from gossamer import BadInput, Experiment, Sweep


def names(sweep: Sweep) -> list[str]:
    return [*dict.fromkeys(planned.cell.name for planned in sweep.planned)]


def test_plan_is_product_with_last_key_fastest(tmp_path: Path) -> None:
    sweep = make_sweep(
        tmp_path,
        seeds=[3, 1],
        cells={"a": {"optimizer.lr": 0.2}, "b": None},
        grid={"topology": ["ring", "complete"], "batch_size": [4, 8]},
    )
    assert names(sweep)[:5] == [
        "a, topology=ring, batch_size=4",
        "a, topology=ring, batch_size=8",
        "a, topology=complete, batch_size=4",
        "a, topology=complete, batch_size=8",
        "b, topology=ring, batch_size=4",
    ]
    assert [planned.experiment.seed for planned in sweep.planned] == [3, 1] * 8
    assert len({planned.run for planned in sweep.planned}) == 16
    third = sweep.planned[4]
    assert dict(third.cell.labels) == {"cell": "a", "topology": "complete", "batch_size": 4}
    assert (third.experiment.batch_size, third.experiment.topology.name_of()) == (4, "complete")
    assert third.experiment.optimizer.lr == 0.2
    assert sweep.planned[-1].experiment.optimizer.lr == 0.1
    assert sweep.folder == tmp_path / "small"


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_number_of_runs_is_the_product(cells: int, values: int, seeds: int) -> None:
    sweep = make_sweep(
        Path("runs"),
        seeds=seeds,
        cells={f"c{i}": {"optimizer.lr": 0.1 + i} for i in range(cells)},
        grid={"batch_size": list(range(1, values + 1))},
    )
    assert len(sweep.planned) == len({planned.run for planned in sweep.planned}) == cells * values * seeds
    assert sweep.seeds == tuple(range(1, seeds + 1))


def test_cell_replaces_whole_field_or_single_parameter(tmp_path: Path) -> None:
    base = {
        "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.5},
        "evaluation": {"every_rounds": 2, "samples": 10},
    }
    sweep = make_sweep(
        tmp_path,
        base=base,
        cells={
            "whole": {"optimizer": {"name": "sgd", "lr": 0.1}, "evaluation": {"every_rounds": 1}},
            "one": {"optimizer.lr": 0.1, "evaluation.every_rounds": 1},
            "another": {"optimizer.lr": 0.01, "optimizer.name": "adam"},
        },
    )
    whole, parameter, replaced = (planned.experiment for planned in sweep.planned)
    assert (whole.optimizer.lr, whole.optimizer.momentum) == (0.1, 0.0)
    assert (whole.evaluation.every_rounds, whole.evaluation.samples) == (1, 1000)
    assert (parameter.optimizer.lr, parameter.optimizer.momentum) == (0.1, 0.5)
    assert (parameter.evaluation.every_rounds, parameter.evaluation.samples) == (1, 10)
    assert replaced.optimizer.spec()["name"] == "adam"  # and sgd's momentum is gone


def test_cell_does_not_affect_the_next_cell(tmp_path: Path) -> None:
    sweep = make_sweep(
        tmp_path, base={"topology": {"name": "ring"}}, cells={"a": {"topology.weights": "uniform"}, "b": {}}
    )
    assert [planned.experiment.topology.weights is None for planned in sweep.planned] == [False, True]


def test_the_grid_overrides_the_cell(tmp_path: Path) -> None:
    cells = {"a": {"optimizer.lr": 0.2, "batch_size": 2, "optimizer": {"name": "sgd", "momentum": 0.5}}}
    [a] = make_sweep(tmp_path, cells=cells, grid={"batch_size": [4], "optimizer.lr": [0.3]}).planned
    assert a.cell.name == "a, batch_size=4, optimizer.lr=0.3"
    assert (a.experiment.batch_size, a.experiment.optimizer.lr, a.experiment.optimizer.momentum) == (
        4,
        0.3,
        0.5,
    )


def test_cell_parameters_reach_grid_components(tmp_path: Path) -> None:
    cells = {"a": {"topology.weights": "uniform"}, "b": {"topology.name": "complete"}}
    graphs = [{"name": "random-regular", "degree": 3}, "ring"]
    sweep = make_sweep(tmp_path, cells=cells, grid={"topology": graphs})
    topologies = [planned.experiment.topology for planned in sweep.planned]
    assert [graph.name_of() for graph in topologies] == ["random-regular", "ring", "complete", "complete"]
    assert [graph.weights is None for graph in topologies] == [False, False, True, True]


def test_axis_may_name_groups_of_overrides(tmp_path: Path) -> None:
    graphs = {"small": {"nodes": 4, "topology": "ring"}, "large": {"nodes": 6, "topology.name": "complete"}}
    sweep = make_sweep(
        tmp_path, cells={"a": {"batch_size": 2}}, grid={"graph": graphs, "optimizer.lr": [0.1, 0.2]}
    )
    assert names(sweep) == [f"a, graph={g}, optimizer.lr={lr}" for g in graphs for lr in (0.1, 0.2)]
    experiments = [planned.experiment for planned in sweep.planned[::2]]
    assert [(e.nodes, e.topology.name_of()) for e in experiments] == [(4, "ring"), (6, "complete")]
    assert sweep.planned[0].experiment.batch_size == 2
    for values in (["ring"], {"x": 3}):
        with pytest.raises(BadInput, match="graph"):
            make_sweep(tmp_path, grid={"graph": values})
    with pytest.raises(BadInput, match=r"grid\.graph: got 'seed'"):
        make_sweep(tmp_path, grid={"graph": {"x": {"seed": 3}}})


def test_list_entry_is_set_by_index(tmp_path: Path) -> None:
    flip = {"name": "label-flip", "at": {"rank": 0}}
    base = {"poison": [flip, flip]}
    plan = make_sweep(tmp_path, base=base, grid={"poison.1.at.rank": [1, 2]}).planned
    assert [[poison.at.rank for poison in planned.experiment.poison] for planned in plan] == [[0, 1], [0, 2]]
    path = "poison.1.at.rank"
    with pytest.raises(BadInput, match=f"--set {path}: set by the sweep itself"):
        assigned(f"{path}=3", base={**TINY, **base}, grid={path: [1, 2]})
    sweep = assigned(f"{path}=3", base={**TINY, **base}, grid={path: [1]})
    assert [planned.experiment.poison[1].at.rank for planned in sweep.planned] == [3]
    with pytest.raises(BadInput, match=r"poison\.2; accepted: an entry from 0 to 1"):
        make_sweep(tmp_path, base=base, grid={"poison.2.at.rank": [1]})
    with pytest.raises(BadInput, match=r"poison is .*, which has no fields"):
        make_sweep(tmp_path, base=base, grid={"poison.share": [1]})


def assigned(*assignments: str, **fields: Any) -> Sweep:
    """A sweep with assignments of the command line."""
    return Sweep.of({"name": "s", "base": {**TINY, "name": "base"}, **fields}, overrides=assignments)


def test_command_line_sets_fields_that_no_cell_overrides() -> None:
    cells = {"a": {"optimizer.lr": 0.2}, "b": {"topology": {"name": "random-regular", "degree": 3}}}
    sweep = assigned("stop.rounds=7", "optimizer.momentum=0.5", "compute={name: constant}", cells=cells)
    assert [planned.experiment.stop.rounds for planned in sweep.planned] == [7, 7]
    assert [planned.experiment.optimizer.momentum for planned in sweep.planned] == [0.5, 0.5]
    assert [planned.experiment.optimizer.lr for planned in sweep.planned] == [0.2, 0.1]
    # Cells may add parameters to an assigned component, and may repeat an assigned value.
    sweep = assigned(
        "network=uniform", "batch_size=8", cells={"a": {"network.loss": 0.2}, "b": {"batch_size": 8}}
    )
    assert [planned.experiment.network.loss for planned in sweep.planned] == [0.2, 0.0]


OWN_STEPS = {
    "plain": {},
    "swift": {"algorithm": {"name": "swift", "local_steps": 5}},
    "small": {"algorithm": "swift", "batch_size": 2},
}


@pytest.mark.parametrize(
    ("assignment", "fields", "problem"),
    [
        # A parameter of a field that a cell replaces.
        (
            "algorithm.local_steps=8",
            {"cells": OWN_STEPS},
            "cell swift: --set algorithm.local_steps",
        ),
        # A parameter of a component that a cell replaces.
        (
            "optimizer.lr=0.5",
            {"cells": {"a": {"optimizer.name": "adam"}}},
            "cell a: --set optimizer.lr",
        ),
        (
            "batch_size=8",
            {"cells": OWN_STEPS},
            "cell small: --set batch_size",
        ),
        # A field of which a cell sets a parameter.
        (
            "optimizer={name: sgd, lr: 0.5}",
            {"cells": {"a": {"optimizer.lr": 0.2}}},
            "cell a: --set optimizer",
        ),
        (
            "batch_size=8",
            {"grid": {"batch_size": [4, 16]}},
            "cell batch_size=4: --set batch_size",
        ),
        (
            "topology.degree=3",
            {"grid": {"topology": {"one": {"name": "random-regular", "degree": 2}}}},
            "cell topology=one: --set topology.degree",
        ),
        # A value that would not match its name.
        (
            "batch_size=8",
            {"grid": {"batch_size": {"small": 4}}},
            "cell batch_size=small: --set batch_size",
        ),
    ],
)
def test_assignment_overridden_by_cells_is_refused(
    assignment: str, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BadInput) as caught:
        assigned(assignment, **fields)
    accepted = "accepted: fields that no cell overrides, and those to which the grid gives one value"
    assert caught.value.problems == (f"{problem}: set by the sweep itself; {accepted}",)


def test_command_line_replaces_single_grid_value(tmp_path: Path) -> None:
    cells = {"plain": {}, "swift": {"algorithm": "swift", "topology": "complete"}}
    grid = {"algorithm.local_steps": [128], "batch_size": [4, 8]}
    full = assigned(cells=cells, grid=grid)
    assert [planned.experiment.algorithm.local_steps for planned in full.planned] == [128] * 4
    reduced = assigned("algorithm.local_steps=8", cells=cells, grid=grid)
    assert [planned.experiment.algorithm.local_steps for planned in reduced.planned] == [8] * 4
    assert names(reduced)[2] == "swift, algorithm.local_steps=8, batch_size=4"
    assert reduced.planned[2].cell.labels["algorithm.local_steps"] == 8
    assert reduced.planned[2].experiment.algorithm.name_of() == "swift"


def test_command_line_grid_path_is_relative_to_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    base = {**TINY, "topology": {"name": "edge-list", "path": "one.txt"}}
    raw = {"name": "s", "base": base, "grid": {"topology.path": ["two.txt"]}}
    paths = [
        Sweep.of(raw, tmp_path, overrides).planned[0].experiment.topology.path
        for overrides in ([], ["topology.path=mine.txt"])
    ]
    assert paths == [tmp_path / "two.txt", tmp_path / "here" / "mine.txt"]


def test_overrides_yield_to_command_line_and_cells() -> None:
    fields = {"overrides": {"batch_size": 4, "optimizer.lr": 0.5, "topology": {"name": "star"}}}
    cells = {"a": None, "b": {"topology": "complete"}}
    sweep = Sweep.of({"name": "s", "base": TINY, "cells": cells, **fields}, overrides=["batch_size=2"])
    assert [planned.experiment.batch_size for planned in sweep.planned] == [2, 2]
    assert [planned.experiment.optimizer.lr for planned in sweep.planned] == [0.5, 0.5]
    assert [planned.experiment.topology.name_of() for planned in sweep.planned] == ["star", "complete"]


def test_cells_do_not_share_mutable_values() -> None:
    shared = {"name": "d-psgd"}
    cells = {"x": {"algorithm": shared, "algorithm.local_steps": 7}, "y": {"algorithm": shared}}
    x, y = Sweep.of({"name": "s", "base": TINY, "cells": cells}).planned
    assert (x.experiment.algorithm.local_steps, y.experiment.algorithm.local_steps) == (7, 1)
    assert shared == {"name": "d-psgd"}


@pytest.mark.parametrize("override", ["seed=9", "name=other"])
def test_command_line_cannot_set_seed_or_name(override: str) -> None:
    with pytest.raises(BadInput, match=r"--set: got '(seed|name)'; accepted: other fields"):
        Sweep.of({"name": "s", "base": TINY}, overrides=[override])


def test_component_labels_are_minimal(tmp_path: Path) -> None:
    uniform = [{"name": "uniform", "latency_s": 0.1}, {"name": "uniform", "latency_s": 0.2}]
    assert names(make_sweep(tmp_path, grid={"network": uniform})) == [
        "network=uniform latency_s=0.1",
        "network=uniform latency_s=0.2",
    ]
    graphs = [{"name": "random-regular", "degree": 3}, "ring"]
    assert names(make_sweep(tmp_path, grid={"topology": graphs})) == [
        "topology=random-regular",
        "topology=ring",
    ]
    named = make_sweep(tmp_path, grid={"network": {"near": uniform[0], "far": uniform[1]}})
    assert names(named) == ["network=near", "network=far"]
    assert [planned.experiment.network.latency_s for planned in named.planned] == [0.1, 0.2]


def test_sweep_without_cells_has_one_named_after_the_base(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, base={"name": "plain", "seed": 5})
    assert names(sweep) == ["plain"]
    assert sweep.seeds == (5,)


def test_equal_experiments_of_two_cells_share_a_run(tmp_path: Path) -> None:
    sweep = make_sweep(
        tmp_path,
        seeds=2,
        cells={
            "a": {},
            "same": {"algorithm": "d-psgd"},
            "threads": {"engine.workers": 2},  # results don't depend on it
            "other": {"optimizer.lr": 0.2},
        },
    )
    runs = {cell: [entry.run for entry in sweep.planned if entry.cell.name == cell] for cell in names(sweep)}
    assert runs["a"] == runs["same"] == runs["threads"]
    assert len({*runs["a"], *runs["other"]}) == 4


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    for folder in (tmp_path, tmp_path / "bases"):
        (folder / "graph.txt").write_text("0 1\n1 2\n2 3\n")
    base = {**TINY, "topology": {"name": "edge-list", "path": "graph.txt"}}
    (tmp_path / "bases" / "base.yaml").write_text(yaml.safe_dump(base))
    file = tmp_path / "graphs.yaml"
    cells = {
        "a": None,
        "b": {"topology.path": "graph.txt"},
        "c": {"topology": {"name": "edge-list", "path": "graph.txt"}},
    }
    file.write_text(yaml.safe_dump({"base": "bases/base.yaml", "cells": cells}))
    sweep = Sweep.load(file)
    assert sweep.name == "graphs"
    paths = [planned.experiment.topology.path for planned in sweep.planned]
    assert paths == [tmp_path / "bases" / "graph.txt", tmp_path / "graph.txt", tmp_path / "graph.txt"]


def test_saved_sweep_has_the_same_experiments(tmp_path: Path) -> None:
    sweep = make_sweep(
        tmp_path,
        seeds=2,
        cells={"a": None, "b": {"optimizer.lr": 0.2}},
        grid={"topology": ["ring", "complete"]},
    )
    loaded = Sweep.of(yaml.safe_load(sweep.to_yaml()), out=tmp_path)
    assert [entry.run for entry in loaded.planned] == [entry.run for entry in sweep.planned]
    assert [entry.experiment for entry in loaded.planned] == [entry.experiment for entry in sweep.planned]
    assert names(loaded) == names(sweep)


def test_titles_omit_common_values(tmp_path: Path) -> None:
    single = {"batch_size": [4], "nodes": [3]}
    cells = {"a": None, "b": {"optimizer.lr": 0.2}}

    def titles(**fields: Any) -> list[str]:
        return [planned.title for planned in make_sweep(tmp_path, seeds=1, **fields).planned]

    assert titles(cells=cells, grid=single) == ["a, seed 1", "b, seed 1"]
    assert titles(cells=cells, grid=single | {"stop.rounds": [1, 2]})[:2] == [
        "a, stop.rounds=1, seed 1",
        "a, stop.rounds=2, seed 1",
    ]
    assert titles(grid=single) == ["batch_size=4, nodes=3, seed 1"]  # the only cell


def test_cells_are_selected_by_name_or_entry(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, cells={"a": None, "b": {"optimizer.lr": 0.2}}, grid={"batch_size": [4, 8]})
    assert len(sweep.chosen()) == 4
    assert [entry.cell.name for entry in sweep.chosen(["b"])] == ["b, batch_size=4", "b, batch_size=8"]
    assert [entry.cell.name for entry in sweep.chosen(["a, batch_size=8"])] == ["a, batch_size=8"]
    with pytest.raises(BadInput, match="--only c: no such cell.*accepted: a; a, batch_size=4; "):
        sweep.chosen(["c"])


def test_cells_are_selected_by_grid_value(tmp_path: Path) -> None:
    grid = {"batch_size": [4, 8, 16], "nodes": [3, 4]}
    sweep = make_sweep(tmp_path, cells={"a": None, "b": {"optimizer.lr": 0.2}}, grid=grid, seeds=1)
    assert len(sweep.chosen(["batch_size=8"])) == 4
    chosen = sweep.chosen(["batch_size=8", "batch_size=16", "nodes=4", "a"])
    assert [entry.cell.name for entry in chosen] == ["a, batch_size=8, nodes=4", "a, batch_size=16, nodes=4"]
    with pytest.raises(BadInput, match=r"--only nodes=5: no such cell \(did you mean 'nodes=[34]'"):
        sweep.chosen(["nodes=5"])


def test_base_that_is_a_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("name: other\nbase: {nodes: 3}\n")
    with pytest.raises(BadInput, match=r"^base: .*other.yaml, a sweep; accepted: an experiment file$"):
        Sweep.of({"name": "small", "base": str(tmp_path / "other.yaml")}, out=tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"cells": {"a": {"optimizer.lr": -1}}},
            r"^cell a: optimizer.lr: got -1; accepted: .*greater than 0",
        ),
        (
            {"cells": {"a": {"algoritm": "d-psgd"}}},
            r"^cell a: algoritm: unknown field .did you mean 'algorithm'",
        ),
        (
            {"cells": {"a": {"batch_size.x": 1}}},
            r"^cell a: batch_size: got ",
        ),
        (
            {"cells": {"a": {"nodes.x": 1}}},
            r"^cell a: override: nodes is 4, which has no fields",
        ),
        (
            {"cells": {"a": {"optimizer lr": 1}}},
            r"^cell a: override: got 'optimizer lr'; accepted: names joined by dots",
        ),
        (
            {"grid": {"topology": ["ring", "rng"]}},
            r"^cell topology=rng: topology: unknown name 'rng' .did you mean 'ring'",
        ),
        (
            {"cells": {"a": {"seed": 3}}},
            r"^cells.a: got 'seed'; accepted: other fields \(seeds are listed under seeds\)",
        ),
        ({"overrides": {"seed": 3}}, r"^overrides: got 'seed'; accepted: other fields"),
        ({"grid": {"name": ["x"]}}, r"^grid: got 'name'; accepted: other fields"),
        ({"grid": {"batch_size": []}}, r"^grid.batch_size: no value; accepted: at least one"),
        ({"grid": {"batch_size": [4, 4]}}, r"^grid.batch_size: 4 is listed twice"),
        (
            {"grid": {"batch_size": 4}},
            r"^grid.batch_size: got 4; accepted: a list or a mapping of fields",
        ),
        ({"cells": {}}, r"^cells: got \{\}; accepted: at least one"),
        ({"cells": {"-": {}}}, r"^cells: got '-'; accepted: text that matches"),
        ({"cells": {"a": 3}}, r"^cells.a: got 3; accepted: a mapping of fields"),
        ({"seeds": [1, 1]}, r"^seeds: got \[1, 1\]; accepted: each seed once"),
        ({"seeds": 0}, r"^seeds: got 0; accepted: a number from 1 to 100000, or a list"),
        ({"seeds": 10**12}, r"^seeds: got 1000000000000; accepted: a number from 1 to 100000, or a list"),
        ({"seeds": [-1]}, r"^seeds.0: got -1; accepted: greater than or equal to 0"),
        ({"seed": 3}, r"^seed: unknown field \(did you mean 'seeds'\?\)"),
        ({"base": {"stop": {}}}, r"^cell experiment: stop: "),
    ],
)
def test_bad_sweep_field_is_named_with_its_cell(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    if "base" not in fields:
        fields = {"base": {"name": "experiment"}, **fields}
    else:
        fields["base"]["name"] = "experiment"
    with pytest.raises(BadInput, match=message):
        make_sweep(tmp_path, **fields)


def test_the_base_may_be_an_example(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("base: quickstart")
    [planned] = Sweep.load(tmp_path / "sweep.yaml").planned
    assert planned.experiment == Experiment.load("quickstart")


def test_missing_file_or_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no.yaml: No such file.*accepted: a YAML sweep file"):
        Sweep.load(tmp_path / "no.yaml")
    (tmp_path / "sweep.yaml").write_text("base: no.yaml")
    with pytest.raises(BadInput, match=r"no.yaml: No such file.*accepted: base: an experiment file"):
        Sweep.load(tmp_path / "sweep.yaml")
    (tmp_path / "sweep.yaml").write_text("cells: {}")
    with pytest.raises(BadInput, match="base: missing; a value is required"):
        Sweep.load(tmp_path / "sweep.yaml")


def test_documented_example_is_read() -> None:
    text = (FOLDER.parent / "docs" / "sweeps.md").read_text()
    example = text.partition("```yaml\n")[2].partition("```")[0]
    sweep = Sweep.of(yaml.safe_load(example), FOLDER / "sweeps")
    for assignment in ("topology.degree=4", "algorithm.local_steps=5"):
        with pytest.raises(
            BadInput, match=rf"^cell .*: --set {assignment.partition('=')[0]}: set by the sweep"
        ):
            Sweep.of(yaml.safe_load(example), FOLDER / "sweeps", [assignment])
    assert len(sweep.planned) == 3 * 3 * 2 * 2 * 2
    assert "epidemic, topology.degree=3, network=far, size=few" in names(sweep)


FOLDER = Path(__file__).parents[2] / "experiments"
SWEEPS = [file for file in sorted(FOLDER.rglob("*.yaml")) if "base" in yaml.safe_load(file.read_text())]


@pytest.mark.parametrize("file", SWEEPS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_shipped_sweep_is_read(file: Path) -> None:
    assert all(isinstance(planned.experiment, Experiment) for planned in Sweep.load(file).planned)


@pytest.mark.parametrize(
    "file",
    [path for path in SWEEPS if path.parent.name == "divshare" and path.stem != "local-steps"],
    ids=lambda path: path.stem,
)
def test_one_assignment_changes_local_steps_of_all_algorithms(file: Path) -> None:
    """Otherwise a shorter comparison would mix different numbers of steps."""
    steps = [planned.experiment.algorithm.local_steps for planned in Sweep.load(file).planned]
    assert len(set(steps)) == 1
    varied = yaml.safe_load(file.read_text()).get("grid", {})
    seconds = [] if "compute.seconds_per_step" in varied else ["compute.seconds_per_step=0.5"]
    fewer = Sweep.load(file, ["algorithm.local_steps=3", *seconds]).planned
    assert [planned.experiment.algorithm.local_steps for planned in fewer] == [3] * len(steps)
    if seconds:
        assert [planned.experiment.compute.seconds_per_step for planned in fewer] == [0.5] * len(steps)


@pytest.mark.parametrize("axis", ["rounds", "run", "status", "cause"])
def test_axis_named_like_a_result_column_is_refused(tmp_path: Path, axis: str) -> None:
    with pytest.raises(BadInput, match=f"grid.{axis}: a column of the results has this name"):
        make_sweep(tmp_path, grid={axis: {"few": {"stop.rounds": 2}, "many": {"stop.rounds": 3}}})


def test_sweep_file_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "_étude.yaml").write_text(yaml.safe_dump({"base": TINY}), encoding="utf-8")
    assert Sweep.load(tmp_path / "_étude.yaml", out=tmp_path).name == "tude"
