"""What the task hub refuses in the rows of tables, and what it says about them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import gossamer
from gossamer import BadInput, Experiment
from gossamer.results.report import render
from gossamer.tasks import Hub, Task
from gossamer.tasks.rows import read_rows
from gossamer.tasks.splits import find
from gossamer.tasks.summary import summary
from gossamer.tasks.tables import read_table


def hub(path: Path, **settings: Any) -> Task:
    return Hub(path=path, **{"inputs": ["a", "b"], "targets": "label", **settings}).load(None, 1)


def drawn(rows: int, seed: int, labels: list[Any] | None = None) -> pl.DataFrame:
    a, b = np.random.default_rng(seed).standard_normal((2, rows))
    return pl.DataFrame({"a": a, "b": b, "label": labels or (a + b > 0).astype(np.int64).tolist()})


def glue(folder: Path, hidden: Any) -> Path:
    """A data set whose test split has no labels, as that of a public contest."""
    folder.mkdir(exist_ok=True)
    drawn(200, 0).write_parquet(folder / "train-00000.parquet")
    drawn(50, 1).write_parquet(folder / "validation-00000.parquet")
    drawn(50, 2, [hidden] * 50).write_parquet(folder / "test-00000.parquet")
    return folder


def test_classes_that_only_the_test_set_has_are_refused(tmp_path: Path) -> None:
    message = (
        r"task.targets: column 'label': 50 of 50 test samples are of classes that no training sample has, '-1' \(50\);"
        " accepted: classes of the training split, or another split as task.test"
    )
    with pytest.raises(BadInput, match=message):
        hub(glue(tmp_path, -1))
    task = hub(tmp_path, test="validation")
    assert task.classes == ["0", "1"]
    known, unseen = drawn(200, 0), drawn(50, 1)
    assert task.train[1].tolist() == known["label"].to_list()
    assert task.test[1].tolist() == unseen["label"].to_list()
    assert task.provenance is not None
    assert list(task.provenance.remarks) == ["not read: test-00000.parquet"]


@pytest.mark.parametrize("hidden", ["?", ""])
def test_hidden_words_are_refused(tmp_path: Path, hidden: str) -> None:
    drawn(20, 0, ["yes", "no"] * 10).write_parquet(tmp_path / "train.parquet")
    drawn(4, 1, ["yes", "no", hidden, hidden]).write_parquet(tmp_path / "test.parquet")
    with pytest.raises(
        BadInput,
        match=rf"2 of 4 test samples .* no training sample has, '{hidden or ''}' \(2\)".replace("?", r"\?"),
    ):
        hub(tmp_path)


@pytest.mark.parametrize("placeholder", [-1, "?", ""])
def test_placeholders_among_the_training_labels_are_said(tmp_path: Path, placeholder: Any) -> None:
    """They may be classes, as -1 is in {-1, 1}; they are the first ones in the line."""
    kinds = [placeholder, *range(10)] if placeholder == -1 else [placeholder, *"abcdefghij"]
    drawn(110, 0, kinds * 10).write_parquet(tmp_path / "train.parquet")
    line = summary(hub(tmp_path))["line"]
    first = repr(placeholder) if placeholder == "" else str(placeholder)
    assert f"11 classes ({first}, {kinds[1]}, {kinds[2]} and 8 more)" in line


def test_words_in_one_split_and_numbers_in_another_are_refused(tmp_path: Path) -> None:
    drawn(20, 0).write_csv(tmp_path / "train.csv")
    (tmp_path / "test.csv").write_text('a,b,label\n0.5,0.5,""\n1.5,0.5,x\n')
    with pytest.raises(
        BadInput,
        match=r"task.targets: 'label' is String in test.csv and Int64 in train.csv|'label' is Int64 in t",
    ):
        hub(tmp_path)


def test_words_of_several_types_become_text(tmp_path: Path) -> None:
    """An Enum's order holds if all files have it; the names of two Enums are in alphabetical order."""
    big, small = pl.Enum(["bee", "ant"]), pl.Enum(["ant"])
    drawn(4, 0, ["ant", "bee"] * 2).cast({"label": big}).write_parquet(tmp_path / "train.parquet")
    for other, classes in ((big, ["bee", "ant"]), (small, ["ant", "bee"]), (pl.Categorical, ["ant", "bee"])):
        drawn(2, 1, ["ant"] * 2).cast({"label": other}).write_parquet(tmp_path / "test.parquet")
        task = hub(tmp_path)
        assert task.classes == classes
        assert [classes[number] for number in task.train[1]] == ["ant", "bee"] * 2
        assert [classes[number] for number in task.test[1]] == ["ant"] * 2


def test_classes_that_the_test_set_lacks_keep_their_numbers(tmp_path: Path) -> None:
    drawn(6, 0, ["ant", "bee", "cat"] * 2).write_csv(tmp_path / "train.csv")
    drawn(3, 1, ["cat", "ant", "cat"]).write_csv(tmp_path / "test.csv")
    task = hub(tmp_path)
    assert (task.classes, task.train[1].tolist(), task.test[1].tolist()) == (
        ["ant", "bee", "cat"],
        [0, 1, 2, 0, 1, 2],
        [2, 0, 2],
    )


def test_a_column_that_only_one_file_has_is_refused_by_its_name(tmp_path: Path) -> None:
    drawn(20, 0).write_csv(tmp_path / "train.csv")
    drawn(20, 1).drop("label").write_csv(tmp_path / "test.csv")
    with pytest.raises(BadInput, match=r"task.targets: test.csv has no column 'label'"):
        hub(tmp_path)


def test_files_may_have_other_orders_types_of_numbers_and_more_columns(tmp_path: Path) -> None:
    (tmp_path / "train-1.csv").write_text("a,b,label\n0.5,1.5,x\n2.5,3.5,y\n")
    (tmp_path / "train-2.csv").write_text("label,a,extra,b\nx,4,9,5\ny,6,9,7\n")
    (tmp_path / "test.csv").write_text("b,a,label\n8,9.5,x\n")
    (tmp_path / "train-3.csv").write_text("a,b,label\n")
    task = hub(tmp_path)
    assert task.train[0].tolist() == [[0.5, 1.5], [2.5, 3.5], [4, 5], [6, 7]]
    assert task.test[0].tolist() == [[9.5, 8]]
    assert task.provenance is not None
    assert list(task.provenance.remarks) == ["no rows in train-3.csv"]


IRIS = "5.1,3.5,1.4,0.2,Iris-setosa\n4.9,3.0,1.4,0.2,Iris-setosa\n7.0,3.2,4.7,1.4,Iris-versicolor\n" * 3


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (IRIS, ["5.1", "3.5", "1.4", "0.2", "Iris-setosa"]),
        ("1,1,0\n0,1,1\n1,0,1\n", ["1", "1_duplicated_0", "0"]),
        ("5.1,,1.4\n4.9,3.0,1.4\n", ["5.1", "1.4"]),  # its second cell is missing
        ("red,big,yes\nblue,big,no\nred,small,yes\n" * 2, ["red", "big", "yes"]),
        ("true,1.5,3\nfalse,2.5,7\n", ["true", "1.5", "3"]),
        ("1,2,p\n4,9,q\n3,1,p\n8,8,q\n2,7,q\n5,5,p\n", ["1", "2", "p"]),  # in steps of 1 by chance
        ("1,2,p\n4,9,q\n3,1,r\n", ["1", "2", "p"]),
        ("5,6,7\n1,0,3\n2,2,1\n", ["5", "6", "7"]),
        ("0,1,yes\n1,0,no\n1,1,yes\n0,0,no\n0,1,no\n", ["0", "1", "yes"]),
        ("0,so dull\n1,a fine film\n0,no\n1,well done\n", ["0", "so dull"]),
        ("1912,1954,Turing\n1903,1957,von Neumann\n1906,1992,Hopper\n", ["1912", "1954"]),
    ],
)
def test_data_in_place_of_names_are_refused(tmp_path: Path, text: str, columns: list[str]) -> None:
    (tmp_path / "data.csv").write_text(text)
    with pytest.raises(
        BadInput, match=r"data.csv: the first line looks like data \(.*\); accepted: task.csv.columns with"
    ):
        hub(tmp_path / "data.csv", inputs=columns[:-1], targets=columns[-1])


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("0,1,label\n0.5,1.5,0\n2.5,3.5,1\n" * 2, "0 to 1"),  # "label" is no number
        ("2019,2020,2021\n5,6,0\n7,8,1\n", "2019 to 2021"),
        ("2000,2005,2007,y\n5,6,0,a\n7,8,1,b\n", "2000 to 2007"),
        ("country,2000,2005\nChad,10,3000\nPeru,1999,2001\n", "2000 to 2005"),
        ("0,1,2\n0.5,1.5,0\n2.5,3.5,1\n", "0 to 2"),  # pandas, without names
        ("0,label\n0.5,a\n2.5,b\n", "0"),
        ("0,10,100,1000,label\n" + "1,2,3,4,low\n5,6,7,8,high\n" * 2, "0 to 1000"),  # doses
        ("400,402.5,405,kind\n" + "0.5,0.6,0.7,x\n0.1,0.2,0.3,y\n" * 2, "400 to 405"),  # wavelengths
        ("id,2019,2021\n1,6,0\n2,8,1\n", "2019 to 2021"),
        (",0,1\n0,0.5,1.5\n1,2.5,3.5\n", "0 to 1"),  # pandas, with its index
        ("word,kind\nword,noun\nrun,verb\n", None),
        ("word,kind\n" + "word,noun\nrun,verb\n" * 2, None),  # one of two columns has its name
        ("text\nsome\ntext\n", None),
    ],
)
def test_names_that_could_be_data_are_read_and_numbers_are_said(
    tmp_path: Path, text: str, taken: str | None
) -> None:
    (tmp_path / "data.csv").write_text(text)
    names, *lines = text.splitlines()
    table = read_table(tmp_path / "data.csv")
    assert (table.columns, len(table)) == (names.split(","), len(lines))
    files = find(tmp_path / "data.csv")
    remarks = read_rows(files, {"inputs": table.columns}).remarks
    assert remarks == ([] if taken is None else [f"numbers taken as names of columns: {taken}"])


def test_names_that_are_numbers_are_said_once_in_the_line(tmp_path: Path) -> None:
    for name, rows in (("train-1", 30), ("train-2", 20), ("test", 10)):
        numbers = np.random.default_rng(rows).standard_normal((rows, 64))
        table = pl.DataFrame(numbers, schema=[str(column) for column in range(64)])
        table.with_columns(label=pl.lit(1)).write_csv(tmp_path / f"{name}.csv")
    line = summary(hub(tmp_path, inputs=["0", "63"]))["line"]
    assert line.count("numbers taken as names of columns") == 1
    assert "numbers taken as names of columns: 0 to 63" in line


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("column", ["b", "label"])
def test_values_that_are_not_finite_are_refused_by_file_and_row(
    tmp_path: Path, value: float, column: str
) -> None:
    """The numbers of rows are counted by hand. (1e39 is infinite in float32.)"""
    tables = {"train-1": drawn(5, 0), "train-2": drawn(5, 1), "test": drawn(5, 2)}
    tables = {name: table.cast({"label": pl.Float64}) for name, table in tables.items()}
    for name, rows in {"train-2": [3, 4], "test": [0]}.items():
        values = tables[name][column].to_list()
        for row in rows:
            values[row] = value
        tables[name] = tables[name].with_columns(pl.Series(column, values))
    for name, table in tables.items():
        table.write_parquet(tmp_path / f"{name}.parquet")
    field = "targets" if column == "label" else "inputs"
    message = (
        rf"task.{field}: 3 values of '{column}' are not finite \(the first in row 4 of train-2.parquet\)"
    )
    with pytest.raises(BadInput, match=message):
        hub(tmp_path, loss="regression")


def test_missing_and_nested_values_are_refused_by_file_and_row(tmp_path: Path) -> None:
    drawn(5, 0).write_csv(tmp_path / "train.csv")
    (tmp_path / "test.csv").write_text("a,b,label\n1.5,2.5,0\n1.5,,1\n,,1\n")
    with pytest.raises(
        BadInput,
        match=r"task.inputs: 1 values of 'a' are missing \(the first in row 3 below the names of test.csv\)",
    ):
        hub(tmp_path)
    lists = pl.DataFrame({"x": [[1.0, 2.0], [3.0, math.nan], [4.0, 5.0]], "label": [0, 1, 0]})
    lists.write_parquet(tmp_path / "lists.parquet")
    with pytest.raises(
        BadInput, match=r"column 'x': 1 values of 'x' are not finite \(the first in row 2 of lists.p"
    ):
        hub(tmp_path / "lists.parquet", inputs="x")


def test_a_test_text_that_is_too_short_is_not_replaced_by_training_text(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abcdefgh" * 10)
    (tmp_path / "test.txt").write_text("abcdef")
    settings = {"inputs": "text", "targets": None, "loss": "next-token"}
    with pytest.raises(
        BadInput, match=r"task.context: 8, for 9 training and 0 test samples; accepted: a smaller one"
    ):
        hub(tmp_path, **settings, context=8)
    task = hub(tmp_path, **settings, context=5)
    assert (len(task.train[1]), task.test[0].tolist()) == (15, [[0, 1, 2, 3, 4]])


@pytest.mark.parametrize("large", [2**24 + 1, 2**60 + 1, 2**63 - 1])
def test_rounded_whole_numbers_are_said(tmp_path: Path, large: int) -> None:
    """Those beyond 2^53 are no float64 either."""
    table = pl.DataFrame({"a": [2**24, large, 3], "b": [1, 2, 3], "label": [0, 1, 0]})
    table.write_parquet(tmp_path / "a.parquet")
    task = hub(tmp_path / "a.parquet")
    assert task.provenance is not None
    assert list(task.provenance.remarks) == ["1 whole numbers of 'a' are rounded to 24 bits (float32)"]


def test_the_run_says_and_records_what_was_read(tmp_path: Path) -> None:
    class Told(gossamer.Observer):
        texts: list[str] = []  # noqa: RUF012 - of this test only

        def say(self, text: str) -> None:
            self.texts.append(text)

    train, test = drawn(20, 0), drawn(6, 1)
    pl.concat([test, train[[0, 3]], train[[3]]]).write_parquet(tmp_path / "test.parquet")
    train.write_parquet(tmp_path / "train.parquet")
    drawn(4, 2).write_csv(tmp_path / "notes.csv")
    task = {
        "name": "hub",
        "path": str(tmp_path),
        "inputs": ["a", "b"],
        "targets": "label",
        "model": "logistic",
    }
    fields = {"nodes": 2, "task": task, "topology": "ring", "algorithm": "d-psgd", "stop": {"rounds": 1}}
    experiment = Experiment.of(fields)
    run = gossamer.run(experiment, tmp_path / "runs", observer=Told())
    line = (
        f"data: {tmp_path.resolve()}: 20 training samples (train.parquet), 9 test samples (test.parquet); test set: the files"
        " of 'test'; inputs float32 [2], 2 classes (0, 1); 3 test samples are in the training set; not read: notes.csv"
    )
    assert Told.texts[0] == run.setup["data"]["line"] == line
    recorded = run.setup["data"]
    assert recorded["samples"] == {"train": 20, "test": 9}
    assert recorded["shared"] == {"test": {"samples": 3, "compared": 9, "training": 20}}
    assert recorded["files"]["test"] == {"count": 1, "first": [str(tmp_path.resolve() / "test.parquet")]}
    assert line.replace("'", "&#39;") in render([run])
