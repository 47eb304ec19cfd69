"""From a sweep file to its experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given as drawn
from hypothesis import strategies as st
from sweeps import TINY, sweep

from gossamer import BadInput, Experiment, Sweep


def names(found: Sweep) -> list[str]:
    return [*dict.fromkeys(each.cell.name for each in found.planned)]


def test_cells_times_grid_times_seeds_the_last_key_fastest(tmp_path: Path) -> None:
    found = sweep(
        tmp_path,
        seeds=[3, 1],
        cells={"a": {"optimizer.lr": 0.2}, "b": None},
        grid={"topology": ["ring", "complete"], "batch_size": [4, 8]},
    )
    assert names(found)[:5] == [
        "a, topology=ring, batch_size=4",
        "a, topology=ring, batch_size=8",
        "a, topology=complete, batch_size=4",
        "a, topology=complete, batch_size=8",
        "b, topology=ring, batch_size=4",
    ]
    assert [each.experiment.seed for each in found.planned] == [3, 1] * 8
    assert len({each.run for each in found.planned}) == 16
    third = found.planned[4]
    assert dict(third.cell.labels) == {"cell": "a", "topology": "complete", "batch_size": 4}
    assert (third.experiment.batch_size, third.experiment.topology.name_of()) == (4, "complete")
    assert third.experiment.optimizer.lr == 0.2
    assert found.planned[-1].experiment.optimizer.lr == 0.1
    assert found.folder == tmp_path / "small"


@drawn(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_as_many_as_the_product(cells: int, values: int, seeds: int) -> None:
    found = sweep(
        Path("runs"),
        seeds=seeds,
        cells={f"c{i}": {"optimizer.lr": 0.1 + i} for i in range(cells)},
        grid={"batch_size": list(range(1, values + 1))},
    )
    assert len(found.planned) == len({each.run for each in found.planned}) == cells * values * seeds
    assert found.seeds == tuple(range(1, seeds + 1))


def test_a_field_is_replaced_wholly_and_a_parameter_alone(tmp_path: Path) -> None:
    base = {
        "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.5},
        "evaluation": {"every_rounds": 2, "samples": 10},
    }
    found = sweep(
        tmp_path,
        base=base,
        cells={
            "whole": {"optimizer": {"name": "sgd", "lr": 0.1}, "evaluation": {"every_rounds": 1}},
            "one": {"optimizer.lr": 0.1, "evaluation.every_rounds": 1},
            "another": {"optimizer.lr": 0.01, "optimizer.name": "adam"},
        },
    )
    whole, one, another = (each.experiment for each in found.planned)
    assert (whole.optimizer.lr, whole.optimizer.momentum) == (0.1, 0.0)
    assert (whole.evaluation.every_rounds, whole.evaluation.samples) == (1, 1000)
    assert (one.optimizer.lr, one.optimizer.momentum) == (0.1, 0.5)
    assert (one.evaluation.every_rounds, one.evaluation.samples) == (1, 10)
    assert another.optimizer.spec()["name"] == "adam"  # and sgd's momentum is gone


def test_a_cell_does_not_change_the_next_one(tmp_path: Path) -> None:
    found = sweep(
        tmp_path, base={"topology": {"name": "ring"}}, cells={"a": {"topology.weights": "uniform"}, "b": {}}
    )
    assert [each.experiment.topology.weights is None for each in found.planned] == [False, True]


def test_the_grid_overrides_the_cell(tmp_path: Path) -> None:
    cells = {"a": {"optimizer.lr": 0.2, "batch_size": 2, "optimizer": {"name": "sgd", "momentum": 0.5}}}
    [a] = sweep(tmp_path, cells=cells, grid={"batch_size": [4], "optimizer.lr": [0.3]}).planned
    assert a.cell.name == "a, batch_size=4, optimizer.lr=0.3"
    assert (a.experiment.batch_size, a.experiment.optimizer.lr, a.experiment.optimizer.momentum) == (
        4,
        0.3,
        0.5,
    )


def test_parameters_of_a_cell_reach_components_of_the_grid(tmp_path: Path) -> None:
    cells = {"a": {"topology.weights": "uniform"}, "b": {"topology.name": "complete"}}
    graphs = [{"name": "random-regular", "degree": 3}, "ring"]
    found = [
        each.experiment.topology for each in sweep(tmp_path, cells=cells, grid={"topology": graphs}).planned
    ]
    assert [each.name_of() for each in found] == ["random-regular", "ring", "complete", "complete"]
    assert [each.weights is None for each in found] == [False, False, True, True]


def test_an_axis_that_is_no_field_names_groups_of_overrides(tmp_path: Path) -> None:
    graphs = {"small": {"nodes": 4, "topology": "ring"}, "large": {"nodes": 6, "topology.name": "complete"}}
    found = sweep(
        tmp_path, cells={"a": {"batch_size": 2}}, grid={"graph": graphs, "optimizer.lr": [0.1, 0.2]}
    )
    assert names(found) == [f"a, graph={g}, optimizer.lr={lr}" for g in graphs for lr in (0.1, 0.2)]
    said = [(each.experiment.nodes, each.experiment.topology.name_of()) for each in found.planned[::2]]
    assert said == [(4, "ring"), (6, "complete")]
    assert found.planned[0].experiment.batch_size == 2
    for values in (["ring"], {"x": 3}):
        with pytest.raises(BadInput, match="graph"):
            sweep(tmp_path, grid={"graph": values})
    with pytest.raises(BadInput, match=r"grid\.graph: got 'seed'"):
        sweep(tmp_path, grid={"graph": {"x": {"seed": 3}}})


def test_an_entry_of_a_list_is_set_by_its_number(tmp_path: Path) -> None:
    flip = {"name": "label-flip", "at": {"rank": 0}}
    base = {"poison": [flip, flip]}
    found = sweep(tmp_path, base=base, grid={"poison.1.at.rank": [1, 2]}).planned
    assert [[each.at.rank for each in one.experiment.poison] for one in found] == [[0, 1], [0, 2]]
    path = "poison.1.at.rank"
    with pytest.raises(BadInput, match=f"--set {path}: overridden by the sweep"):
        given(f"{path}=3", base={**TINY, **base}, grid={path: [1, 2]})
    one = given(f"{path}=3", base={**TINY, **base}, grid={path: [1]})
    assert [each.experiment.poison[1].at.rank for each in one.planned] == [3]
    with pytest.raises(BadInput, match=r"poison\.2; accepted: an entry from 0 to 1"):
        sweep(tmp_path, base=base, grid={"poison.2.at.rank": [1]})
    with pytest.raises(BadInput, match=r"poison is .*, which has no fields"):
        sweep(tmp_path, base=base, grid={"poison.share": [1]})


def given(*assignments: str, **fields: Any) -> Sweep:
    """A sweep that is given assignments on the command line."""
    return Sweep.of({"name": "s", "base": {**TINY, "name": "base"}, **fields}, overrides=assignments)


def test_the_command_line_reaches_what_cells_leave_alone() -> None:
    cells = {"a": {"optimizer.lr": 0.2}, "b": {"topology": {"name": "random-regular", "degree": 3}}}
    found = given("stop.rounds=7", "optimizer.momentum=0.5", "compute={name: constant}", cells=cells)
    assert [each.experiment.stop.rounds for each in found.planned] == [7, 7]
    assert [each.experiment.optimizer.momentum for each in found.planned] == [0.5, 0.5]
    assert [each.experiment.optimizer.lr for each in found.planned] == [0.2, 0.1]
    # What is given as a whole may get further parameters, and what is said twice is said by both.
    found = given(
        "network=uniform", "batch_size=8", cells={"a": {"network.loss": 0.2}, "b": {"batch_size": 8}}
    )
    assert [each.experiment.network.loss for each in found.planned] == [0.2, 0.0]


OWN_STEPS = {
    "plain": {},
    "swift": {"algorithm": {"name": "swift", "local_steps": 5}},
    "small": {"algorithm": "swift", "batch_size": 2},
}


@pytest.mark.parametrize(
    ("assignment", "fields", "said"),
    [
        # Beneath what a cell replaces, whether or not the cell gives a value of its own.
        (
            "algorithm.local_steps=8",
            {"cells": OWN_STEPS},
            "cell swift: --set algorithm.local_steps",
        ),
        # Another component starts afresh.
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
        # Above what a cell sets.
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
        # A value under a name of its own would be another's.
        (
            "batch_size=8",
            {"grid": {"batch_size": {"small": 4}}},
            "cell batch_size=small: --set batch_size",
        ),
    ],
)
def test_an_assignment_that_cells_would_undo_is_refused(
    assignment: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput) as caught:
        given(assignment, **fields)
    accepted = "accepted: fields that no cell overrides, and those to which the grid gives one value"
    assert caught.value.problems == (f"{said}: overridden by the sweep; {accepted}",)


def test_the_command_line_sets_what_the_grid_gives_to_all_cells(tmp_path: Path) -> None:
    cells = {"plain": {}, "swift": {"algorithm": "swift", "topology": "complete"}}
    grid = {"algorithm.local_steps": [128], "batch_size": [4, 8]}
    full = given(cells=cells, grid=grid)
    assert [each.experiment.algorithm.local_steps for each in full.planned] == [128] * 4
    reduced = given("algorithm.local_steps=8", cells=cells, grid=grid)
    assert [each.experiment.algorithm.local_steps for each in reduced.planned] == [8] * 4
    assert names(reduced)[2] == "swift, algorithm.local_steps=8, batch_size=4"
    assert reduced.planned[2].cell.labels["algorithm.local_steps"] == 8
    assert reduced.planned[2].experiment.algorithm.name_of() == "swift"


def test_a_path_of_the_command_line_is_relative_to_the_working_directory_in_the_grid_too(
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


def test_what_is_different_in_all_cells_comes_before_the_command_line_and_the_cells() -> None:
    fields = {"overrides": {"batch_size": 4, "optimizer.lr": 0.5, "topology": {"name": "star"}}}
    cells = {"a": None, "b": {"topology": "complete"}}
    found = Sweep.of({"name": "s", "base": TINY, "cells": cells, **fields}, overrides=["batch_size=2"])
    assert [each.experiment.batch_size for each in found.planned] == [2, 2]
    assert [each.experiment.optimizer.lr for each in found.planned] == [0.5, 0.5]
    assert [each.experiment.topology.name_of() for each in found.planned] == ["star", "complete"]


def test_cells_do_not_share_what_they_say() -> None:
    said = {"name": "d-psgd"}
    cells = {"x": {"algorithm": said, "algorithm.local_steps": 7}, "y": {"algorithm": said}}
    x, y = Sweep.of({"name": "s", "base": TINY, "cells": cells}).planned
    assert (x.experiment.algorithm.local_steps, y.experiment.algorithm.local_steps) == (7, 1)
    assert said == {"name": "d-psgd"}


@pytest.mark.parametrize("override", ["seed=9", "name=other"])
def test_the_command_line_leaves_to_the_sweep_what_is_the_sweep_s(override: str) -> None:
    with pytest.raises(BadInput, match=r"--set: got '(seed|name)'; accepted: other fields"):
        Sweep.of({"name": "s", "base": TINY}, overrides=[override])


def test_labels_of_components_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    uniform = [{"name": "uniform", "latency_s": 0.1}, {"name": "uniform", "latency_s": 0.2}]
    assert names(sweep(tmp_path, grid={"network": uniform})) == [
        "network=uniform latency_s=0.1",
        "network=uniform latency_s=0.2",
    ]
    assert names(sweep(tmp_path, grid={"topology": [{"name": "random-regular", "degree": 3}, "ring"]})) == [
        "topology=random-regular",
        "topology=ring",
    ]
    named = sweep(tmp_path, grid={"network": {"near": uniform[0], "far": uniform[1]}})
    assert names(named) == ["network=near", "network=far"]
    assert [each.experiment.network.latency_s for each in named.planned] == [0.1, 0.2]


def test_without_cells_or_grid_there_is_one_cell_named_after_the_base(tmp_path: Path) -> None:
    found = sweep(tmp_path, base={"name": "plain", "seed": 5})
    assert names(found) == ["plain"]
    assert found.seeds == (5,)


def test_equal_experiments_of_two_cells_share_a_run(tmp_path: Path) -> None:
    found = sweep(
        tmp_path,
        seeds=2,
        cells={
            "a": {},
            "same": {"algorithm": "d-psgd"},
            "threads": {"engine.workers": 2},  # results don't depend on it
            "other": {"optimizer.lr": 0.2},
        },
    )
    runs = {cell: [each.run for each in found.planned if each.cell.name == cell] for cell in names(found)}
    assert runs["a"] == runs["same"] == runs["threads"]
    assert len({*runs["a"], *runs["other"]}) == 4


def test_relative_paths_are_relative_to_the_file_they_stand_in(tmp_path: Path) -> None:
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
    found = Sweep.load(file)
    assert found.name == "graphs"
    paths = [each.experiment.topology.path for each in found.planned]
    assert paths == [tmp_path / "bases" / "graph.txt", tmp_path / "graph.txt", tmp_path / "graph.txt"]


def test_what_is_written_down_is_a_sweep_file_of_the_same_experiments(tmp_path: Path) -> None:
    found = sweep(
        tmp_path,
        seeds=2,
        cells={"a": None, "b": {"optimizer.lr": 0.2}},
        grid={"topology": ["ring", "complete"]},
    )
    again = Sweep.of(yaml.safe_load(found.to_yaml()), out=tmp_path)
    assert [each.run for each in again.planned] == [each.run for each in found.planned]
    assert [each.experiment for each in again.planned] == [each.experiment for each in found.planned]
    assert names(again) == names(found)


def test_titles_leave_out_what_all_cells_have_in_common(tmp_path: Path) -> None:
    one = {"batch_size": [4], "nodes": [3]}
    cells = {"a": None, "b": {"optimizer.lr": 0.2}}

    def titles(**fields: Any) -> list[str]:
        return [each.title for each in sweep(tmp_path, seeds=1, **fields).planned]

    assert titles(cells=cells, grid=one) == ["a, seed 1", "b, seed 1"]
    assert titles(cells=cells, grid=one | {"stop.rounds": [1, 2]})[:2] == [
        "a, stop.rounds=1, seed 1",
        "a, stop.rounds=2, seed 1",
    ]
    assert titles(grid=one) == ["batch_size=4, nodes=3, seed 1"]  # where there is nothing else


def test_cells_are_chosen_by_their_whole_name_or_by_their_entry(tmp_path: Path) -> None:
    found = sweep(tmp_path, cells={"a": None, "b": {"optimizer.lr": 0.2}}, grid={"batch_size": [4, 8]})
    assert len(found.chosen()) == 4
    assert [each.cell.name for each in found.chosen(["b"])] == ["b, batch_size=4", "b, batch_size=8"]
    assert [each.cell.name for each in found.chosen(["a, batch_size=8"])] == ["a, batch_size=8"]
    with pytest.raises(BadInput, match="--only c: no such cell.*accepted: a; a, batch_size=4; "):
        found.chosen(["c"])


def test_cells_are_chosen_by_a_value_of_the_grid(tmp_path: Path) -> None:
    grid = {"batch_size": [4, 8, 16], "nodes": [3, 4]}
    found = sweep(tmp_path, cells={"a": None, "b": {"optimizer.lr": 0.2}}, grid=grid, seeds=1)
    assert len(found.chosen(["batch_size=8"])) == 4
    chosen = found.chosen(["batch_size=8", "batch_size=16", "nodes=4", "a"])
    assert [each.cell.name for each in chosen] == ["a, batch_size=8, nodes=4", "a, batch_size=16, nodes=4"]
    with pytest.raises(BadInput, match=r"--only nodes=5: no such cell \(did you mean 'nodes=[34]'"):
        found.chosen(["nodes=5"])


def test_a_base_that_is_a_sweep_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("name: other\nbase: {nodes: 3}\n")
    with pytest.raises(BadInput, match=r"^base: .*other.yaml, a sweep; accepted: an experiment file$"):
        Sweep.of({"name": "small", "base": str(tmp_path / "other.yaml")}, out=tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
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
def test_what_can_not_be_used_is_named_with_its_cell(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    if "base" not in fields:
        fields = {"base": {"name": "experiment"}, **fields}
    else:
        fields["base"]["name"] = "experiment"
    with pytest.raises(BadInput, match=said):
        sweep(tmp_path, **fields)


def test_the_base_may_be_an_example(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("base: quickstart")
    [planned] = Sweep.load(tmp_path / "sweep.yaml").planned
    assert planned.experiment == Experiment.load("quickstart")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no.yaml: No such file.*accepted: a YAML sweep file"):
        Sweep.load(tmp_path / "no.yaml")
    (tmp_path / "sweep.yaml").write_text("base: no.yaml")
    with pytest.raises(BadInput, match=r"no.yaml: No such file.*accepted: base: an experiment file"):
        Sweep.load(tmp_path / "sweep.yaml")
    (tmp_path / "sweep.yaml").write_text("cells: {}")
    with pytest.raises(BadInput, match="base: missing; a value is required"):
        Sweep.load(tmp_path / "sweep.yaml")


def test_the_example_of_the_documentation_can_be_read() -> None:
    text = (FOLDER.parent / "docs" / "sweeps.md").read_text()
    example = text.partition("```yaml\n")[2].partition("```")[0]
    found = Sweep.of(yaml.safe_load(example), FOLDER / "sweeps")
    for assignment in ("topology.degree=4", "algorithm.local_steps=5"):
        with pytest.raises(
            BadInput, match=rf"^cell .*: --set {assignment.partition('=')[0]}: overridden by "
        ):
            Sweep.of(yaml.safe_load(example), FOLDER / "sweeps", [assignment])
    assert len(found.planned) == 3 * 3 * 2 * 2 * 2
    assert "epidemic, topology.degree=3, network=far, size=few" in names(found)


FOLDER = Path(__file__).parents[2] / "experiments"
SWEEPS = [file for file in sorted(FOLDER.rglob("*.yaml")) if "base" in yaml.safe_load(file.read_text())]


@pytest.mark.parametrize("file", SWEEPS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_sweep_that_comes_along_can_be_read(file: Path) -> None:
    assert all(isinstance(each.experiment, Experiment) for each in Sweep.load(file).planned)


@pytest.mark.parametrize(
    "file",
    [each for each in SWEEPS if each.parent.name == "divshare" and each.stem != "local-steps"],
    ids=lambda path: path.stem,
)
def test_one_assignment_gives_divshare_and_its_rivals_another_number_of_steps(file: Path) -> None:
    """Else a shorter comparison would be one of some steps with others."""
    steps = [each.experiment.algorithm.local_steps for each in Sweep.load(file).planned]
    assert len(set(steps)) == 1
    varied = yaml.safe_load(file.read_text()).get("grid", {})
    seconds = [] if "compute.seconds_per_step" in varied else ["compute.seconds_per_step=0.5"]
    fewer = Sweep.load(file, ["algorithm.local_steps=3", *seconds]).planned
    assert [each.experiment.algorithm.local_steps for each in fewer] == [3] * len(steps)
    if seconds:
        assert [each.experiment.compute.seconds_per_step for each in fewer] == [0.5] * len(steps)


@pytest.mark.parametrize("axis", ["rounds", "run", "status", "cause"])
def test_an_axis_with_the_name_of_a_result_is_refused(tmp_path: Path, axis: str) -> None:
    with pytest.raises(BadInput, match=f"grid.{axis}: a column of the results has this name"):
        sweep(tmp_path, grid={axis: {"few": {"stop.rounds": 2}, "many": {"stop.rounds": 3}}})


def test_a_file_with_any_name_is_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "_étude.yaml").write_text(yaml.safe_dump({"base": TINY}), encoding="utf-8")
    assert Sweep.load(tmp_path / "_étude.yaml", out=tmp_path).name == "tude"
