"""Tables as users have them: without names, with other separators, encodings and missing values, in many files."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

import gossamer
from gossamer import BadInput, Experiment
from gossamer.config.registry import build
from gossamer.tasks import Task
from gossamer.tasks.summary import summary

KINDS = ["Iris-setosa", "Iris-versicolor", "Iris-virginica"]
COLUMNS = ["a", "b", "c", "d", "species"]
IRIS = [
    (5 + number / 1000, 3 + number % 5 / 10, 1.4, 0.2 + number % 3, KINDS[number % 3]) for number in range(30)
]
"""Rows whose first numbers differ and ascend."""


def lines(separator: str = ",", names: bool = False) -> str:
    rows = [COLUMNS, *IRIS] if names else IRIS
    return "".join(separator.join(map(str, row)) + "\n" for row in rows)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def hub(path: Path, **settings: Any) -> Task:
    task = build(
        "task", {"name": "hub", "path": str(path), "inputs": COLUMNS[:4], "targets": "species", **settings}
    )
    return task.load(None, 1)  # type: ignore[attr-defined]


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(BadInput) as raised:
        hub(path, **settings)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def samples(task: Task) -> list[tuple[Any, ...]]:
    """Inputs and class of all samples, in ascending order."""
    assert task.classes is not None
    pairs = [
        pair for inputs, targets in (task.train, task.test) for pair in zip(inputs, targets, strict=True)
    ]
    return sorted((*inputs.tolist(), task.classes[target]) for inputs, target in pairs)


def same(found: list[tuple[Any, ...]], rows: list[tuple[Any, ...]]) -> bool:
    """Whether samples are the rows, with float32 numbers."""
    numbers = [np.array([row[:-1] for row in table], np.float32).tolist() for table in (found, rows)]
    return numbers[0] == numbers[1] and [row[-1] for row in found] == [row[-1] for row in rows]


PLAIN: dict[str, Any] = {"csv": {"columns": COLUMNS}}


@pytest.mark.parametrize(
    ("name", "content", "settings"),
    [
        ("iris.data", lines(), PLAIN),
        ("iris.data", lines() + "\n\n", PLAIN),  # as in the repository of UCI
        ("iris.csv.gz", lines(), PLAIN),
        ("iris.txt", lines(), PLAIN),
        ("iris.tsv", lines("\t"), PLAIN),
        ("IRIS.TSV", lines("\t", names=True), {}),
        ("iris.csv", lines(), {"csv": {"header": False}, "inputs": [0, 1, 2, 3], "targets": 4}),
        ("semi.csv", lines(";", names=True), {"csv": {"separator": ";"}}),
        (
            "excel.csv",
            lines(";", names=True).replace(".", ","),
            {"csv": {"separator": ";", "decimal": ","}},
        ),
        ("space.csv", lines("   ", names=True).replace("\n", "  \n"), {"csv": {"separator": " "}}),
        ("tab.csv", lines("\t", names=True), {"csv": {"separator": r"\t"}}),
        ("blanks.csv", lines(" , ", names=True), {}),
        ("quoted.csv", "".join(f'"{line}"\n' for line in lines('","', names=True).splitlines()), {}),
        ("notes.csv", "# measured, in May\n" + lines(names=True) + "# end\n", {"csv": {"comment": "#"}}),
        ("latin.csv", lines(names=True).encode("latin-1"), {"encoding": "latin-1"}),
        ("macintosh.csv", lines(names=True).replace("\n", "\r"), {}),
        ("utf16.csv", lines(names=True).encode("utf-16"), {}),
        ("bom.csv", b"\xef\xbb\xbf" + lines(names=True).replace("\n", "\r\n").encode(), {}),
        (
            "renamed.csv",
            lines(names=True).replace("species", "kind"),
            {"csv": {"columns": COLUMNS, "header": True}},
        ),
    ],
)
def test_tables_are_read_as_they_are_found(
    tmp_path: Path, name: str, content: str | bytes, settings: dict[str, Any]
) -> None:
    assert same(samples(hub(write(tmp_path / name, content), **settings)), IRIS)


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        (
            "iris.csv",
            lines(),
            {},
            "the first line looks like data (5.0, 3.0, 1.4, 0.2, Iris-setosa); accepted: task.csv.columns with the names",
        ),
        ("iris.txt", lines(), {}, "task.inputs: got 'a'; accepted: text (of iris.txt), or task.csv: {} if"),
        ("semi.csv", lines(";", names=True), {}, "(of semi.csv), or task.csv.separator: ';'"),
        ("tab.csv", lines("\t", names=True), {}, '(of tab.csv), or task.csv.separator: "\\t"'),
        ("space.csv", lines(" ", names=True), {}, "(of space.csv), or task.csv.separator: ' '"),
        (
            "excel.csv",
            lines(";", names=True).replace(".", ","),
            {},
            "excel.csv can't be read as CSV (5 cells, and line 1 has 1); accepted: lines of as many cells,"
            " or task.csv.separator: ';'",
        ),
        (
            "excel.csv",
            lines(";", names=True).replace(".", ","),
            {"csv": {"separator": ";"}},
            "task.inputs: 'a' is no column of numbers ('5,0' in row 1 below the names of excel.csv, one of 30);"
            " accepted: a column of numbers, or task.csv.decimal: ',' if 5,0 is 5",
        ),
        (
            "iris.csv",
            lines(names=True),
            {"csv": {"decimal": ",", "thousands": ","}},
            "thousands other than decimal, ','",
        ),
        ("iris.csv", lines(names=True), {"csv": {"separator": "::"}}, "task.csv.separator: got '::'"),
        (
            "notes.csv",
            "# measured, in May\n" + lines(names=True),
            {},
            "notes.csv can't be read as CSV (5 cells, and line 1 has 2); accepted: lines of as many cells, or task.csv.comment: '#'",
        ),
        (
            "latin.csv",
            lines(names=True).replace("setosa", "s\xe9tosa").encode("latin-1"),
            {},
            "latin.csv is not utf-8 (byte 0xe9: invalid continuation byte); accepted: that of the file, such as",
        ),
        (
            "iris.csv",
            lines(names=True),
            {"encoding": "klingon"},
            "task.encoding: got 'klingon'; accepted: an",
        ),
        ("iris.csv", lines(), {"csv": {"columns": COLUMNS[:4]}}, "task.csv.columns: 4 names, for "),
        (
            "iris.csv",
            lines(names=True),
            {"csv": {"columns": COLUMNS}},
            "iris.csv has these names; accepted: with task.csv.header: true",
        ),
        (
            "ragged.csv",
            lines(names=True).replace("\n5.001,", "\n5.001,7,"),
            {},
            "ragged.csv can't be read as CSV (6 cells, and line 1 has 5); accepted: lines of as many cells",
        ),
        (
            "inches.csv",
            lines(names=True).replace("setosa\n5.001", 'setosa 5"\n5.001'),
            {},
            "inches.csv can't be read as CSV (a quote without its pair); accepted: lines of as many cells, or task.csv.quote: null",
        ),
        (
            "notes.csv",
            "# a,b,c,d,e\n" + lines(),
            PLAIN,
            "task.inputs: 'a' is no column of numbers ('# a' in row 1 of notes.csv); accepted: a column of numbers, or task.csv.comment",
        ),
        ("empty.csv", "", {}, "empty.csv is empty"),
        ("iris.jsonl", '{"a": 1}\n{"a": 2\n', {}, "line 2 of"),
    ],
)
def test_tables_that_cannot_be_read_are_refused_with_the_cure(
    tmp_path: Path, name: str, content: str | bytes, settings: dict[str, Any], message: str
) -> None:
    assert message in refused(write(tmp_path / name, content), **settings)


def grouped(number: float, group: str, point: str) -> str:
    return f"{number:,}".translate({ord(","): group, ord("."): point})


LARGE = [(1000 * a + 7000, b, c, d, species) for a, b, c, d, species in IRIS]
"""Rows whose first numbers are above 9,999."""


def large(separator: str, group: str, point: str, quote: str = "") -> str:
    rows = [[grouped(a, group, point), *(str(n).replace(".", point) for n in more)] for a, *more in LARGE]
    rows = [[f"{quote}{cell}{quote}" for cell in row] for row in rows]
    return "".join(separator.join(row) + "\n" for row in [COLUMNS, *rows])


@pytest.mark.parametrize(
    ("name", "content", "settings", "rows"),
    [
        ("english.csv", large(",", ",", ".", '"'), {}, LARGE),
        ("german.csv", large(";", ".", ","), {"csv": {"separator": ";"}}, LARGE),
        ("quoted.csv", large(",", "", ",", '"'), {}, LARGE),
        ("swiss.csv", large(",", "\u2019", "."), {}, LARGE),
        ("french.csv", large(";", "\u202f", ","), {"csv": {"separator": ";"}}, LARGE),
        ("semi.data", lines(";"), PLAIN, IRIS),
        ("comma.data", lines(), {"csv": {"columns": COLUMNS, "separator": ";"}}, IRIS),
        ("colon.csv", lines(":", names=True), {}, IRIS),
        ("numbered.csv", lines("\t"), {"csv": {"header": False}, "inputs": [0, 1, 2, 3], "targets": 4}, IRIS),
        ("excel.data", lines(";").replace(".", ","), PLAIN, IRIS),
        ("wide.csv", lines(names=True).encode("utf-16-le"), {}, IRIS),
        (
            "wide.jsonl",
            pl.DataFrame(IRIS, COLUMNS, orient="row").write_ndjson().encode("utf-16-be"),
            {},
            IRIS,
        ),
    ],
)
def test_offered_cures_work_when_they_are_followed(
    tmp_path: Path, name: str, content: str | bytes, settings: dict[str, Any], rows: list[tuple[Any, ...]]
) -> None:
    path = write(tmp_path / name, content)
    for _ in range(3):
        message = refused(path, **settings)
        assert name in message
        offer = message.split("; accepted: ")[1].split(" if ")[0].removeprefix("utf")
        found = re.findall(r"task\.csv\.(\w+): (\"[^\"]*\"|'[^']*')", offer)
        if found:
            csv = {field: yaml.safe_load(value) for field, value in found}
            settings = {**settings, "csv": {**settings.get("csv", {}), **csv}}
        else:
            settings = {**settings, "encoding": f"utf{offer}"}
        try:
            task = hub(path, **settings)
        except BadInput:
            continue
        break
    assert same(samples(task), rows)


@pytest.mark.parametrize("missing", ["refuse", "drop"])
@pytest.mark.parametrize("name", ["iris.csv", "iris.csv.gz"])
def test_zeros_in_a_file_are_damage_and_no_missing_values(tmp_path: Path, name: str, missing: str) -> None:
    """As where a copy was broken off, or a disk lost a block."""
    text = lines(names=True).encode()
    for damaged, line in ((text + bytes(90), 32), (text[:100] + bytes(90) + text[190:], 4)):
        path = write(tmp_path / name, damaged)
        assert text[:100].count(b"\n") == 3
        problem = f"line {line} of {path} has bytes that are 0, as damaged files have; accepted: a whole file"
        assert refused(path, missing=missing) == problem


def test_several_words_for_a_missing_value_are_offered_together(tmp_path: Path) -> None:
    text = lines(names=True).replace("\n5.001,", "\nlost,").replace("\n5.002,", "\nnever,")
    path = write(tmp_path / "iris.csv", text)
    assert "task.csv.null_values: ['lost', 'never'] if" in refused(path)
    task = hub(path, csv={"null_values": ["lost", "never"]}, missing="drop")
    assert same(samples(task), [IRIS[0], *IRIS[3:]])


def test_offered_names_of_a_table_without_names_do_not_cost_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "iris.csv", lines())
    names = {"inputs": ["5.0", "3.0"], "targets": "Iris-setosa"}
    assert "the first line looks like data" in refused(path, **names)
    task = hub(path, **names, csv={"header": True})  # the user says that these are names
    assert len(samples(task)) == len(IRIS) - 1


@pytest.mark.parametrize("sign", ["?", "NA", "", "n/a", "null", " - ", "NaN", "none here"])
def test_missing_values_are_refused_by_row_or_left_out(tmp_path: Path, sign: str) -> None:
    """The third row lacks its second number, whatever stands for it."""
    rows = lines(names=True).splitlines()
    cells = rows[3].split(",")
    rows[3] = ",".join([cells[0], sign, *cells[2:]])
    path = write(tmp_path / "iris.csv", "\n".join(rows))
    message = refused(path)
    assert message.startswith("task.inputs: ")
    assert "'b'" in message
    assert "row 3 below the names of iris.csv" in message
    settings: dict[str, Any] = {"missing": "drop"}
    if sign == "none here":
        assert f"task.csv.null_values: ['{sign}']" in refused(path, **settings)
        settings["csv"] = {"null_values": [sign]}
    else:
        assert "task.missing: drop" in message
    task = hub(path, **settings)
    assert same(samples(task), [*IRIS[:2], *IRIS[3:]])
    line = summary(task)["line"]
    assert (
        "left out for a missing value: 1 of 30 rows (the first is row 3 below the names of iris.csv)" in line
    )


def test_a_file_that_was_unpacked_without_a_new_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "iris.csv.gz").write_text(lines(names=True))
    assert same(samples(hub(tmp_path / "iris.csv.gz")), IRIS)


def test_a_table_without_enough_rows_for_a_test_set_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "one.csv", "".join(lines(names=True).splitlines(keepends=True)[:2]))
    message = refused(path)
    assert message.startswith("task.train_fraction: 0.9, which leaves no test sample of 1 sample in ")
    assert "one.csv; accepted: two samples of an owner or more, or files of a test split" in message
    rows = [[k, -k, f"owner{k}", k % 2] for k in range(6)]
    text = "".join(",".join(map(str, row)) + "\n" for row in [["a", "b", "who", "y"], *rows])
    names: dict[str, Any] = {"inputs": ["a", "b"], "targets": "y"}
    message = refused(write(tmp_path / "owned.csv", text), **names, owner="who")
    assert "no test sample of 6 samples of 6 owners in" in message
    assert len(samples(hub(tmp_path / "owned.csv", **names))) == 6


def test_quotes_may_be_text(tmp_path: Path) -> None:
    path = write(tmp_path / "words.tsv", 'x\tkind\n1\t"so\n2\tfine\n3\t"so\n4\tfine\n')
    assert "line 2 of" in refused(path, inputs="x", targets="kind")
    task = hub(path, inputs="x", targets="kind", csv={"quote": None})
    assert samples(task) == [(1.0, '"so'), (2.0, "fine"), (3.0, '"so'), (4.0, "fine")]


def test_missing_values_of_every_test_row_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", lines(names=True))
    write(tmp_path / "test.csv", "a,b,c,d,species\n1,2,3,?,Iris-setosa\n4,5,6,,Iris-setosa\n")
    message = (
        "task.test: each row of test.csv misses a value, the first of 'd'; accepted: rows without missing"
    )
    assert message in refused(tmp_path, missing="drop")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_decimals_that_are_whole_numbers_are_classes(tmp_path: Path, form: str) -> None:
    table = pl.DataFrame({"x": np.arange(20) / 8, "y": np.arange(20) % 2}).cast({"y": pl.Float64})
    path = tmp_path / f"data.{form}"
    table.write_csv(path) if form == "csv" else table.write_parquet(path)
    task = hub(path, inputs="x", targets="y")
    assert task.classes == ["0", "1"]
    assert [row[1] for row in samples(task)] == ["0", "1"] * 10
    table.with_columns(pl.col("y") / 2).write_parquet(tmp_path / "half.parquet")
    message = "task.targets: 'y' has no class numbers (0.5 in row 2 of half.parquet); accepted: class names or whole numbers"
    assert message in refused(tmp_path / "half.parquet", inputs="x", targets="y")


def test_names_nearest_to_the_wanted_one_come_first(tmp_path: Path) -> None:
    names = [f"pixel{number}" for number in range(784)]
    write(tmp_path / "wide.csv", ",".join(names) + "\n" + ",".join("1" * 784) + "\n")
    message = refused(tmp_path / "wide.csv", inputs="Pixel123", targets="pixel1")
    assert message.startswith("task.inputs: got 'Pixel123'; accepted: pixel123, ")
    assert message.endswith(" and 772 more (of wide.csv)")
    assert len(message) < 250


def test_patterns_stand_for_all_other_columns(tmp_path: Path) -> None:
    """Such as the 60 columns of a table without names."""
    write(tmp_path / "sonar.data", lines())
    task = hub(tmp_path / "sonar.data", csv={"header": False}, inputs="*", targets=4)
    assert same(samples(task), IRIS)
    assert "'*' stands for 4 columns (0, 1, 2 and 1 more)" in summary(task)["line"]
    write(tmp_path / "named.csv", lines(names=True))
    task = hub(tmp_path / "named.csv", inputs=["b", "[acd]"])
    assert task.train[0].shape == (27, 4)
    assert set(task.train[0][:, 0].tolist()) == set(np.array([row[1] for row in IRIS], np.float32).tolist())
    message = "task.inputs: got 'x*'; accepted: a, b, c, d, species (of named.csv)"
    assert message in refused(tmp_path / "named.csv", inputs="x*")


# One table for each client: six of 30 rows, with normal x1 and x2, and y = (x1 + x2 > 0).


def drawn(site: int) -> list[list[str]]:
    numbers = np.random.default_rng(site).standard_normal((30, 2)).round(3) + 0.0001
    return [[f"{a:.4f}", f"{b:.4f}", str(int(a + b > 0)), f"site-{site}"] for a, b in numbers]


def clients(folder: Path, odd: int, change: Any) -> Path:
    """The folder of the tables, one of which is changed."""
    for site in range(1, 7):
        rows = [["x1", "x2", "y", "site"], *drawn(site)]
        text = "\n".join(map(",".join, change(rows) if site == odd else rows)) + "\n"
        write(folder / f"site-{site}.csv", text)
    return folder


def whole(rows: list[list[str]]) -> list[list[str]]:
    return [rows[0], *([str(round(float(row[0]))), *row[1:]] for row in rows[1:])]


def reordered(rows: list[list[str]]) -> list[list[str]]:
    return [[row[column] for column in (2, 1, 0, 3)] for row in rows]


def empty(rows: list[list[str]]) -> list[list[str]]:
    return [*rows[:5], ["", *rows[5][1:]], *rows[6:]]


def numbered(rows: list[list[str]]) -> list[list[str]]:
    return [rows[0], *([*row[:3], "2"] for row in rows[1:])]


def unnamed(rows: list[list[str]]) -> list[list[str]]:
    return [["X1", *rows[0][1:]], *rows[1:]]


def wordy(rows: list[list[str]]) -> list[list[str]]:
    return [*rows[:4], ["bad", *rows[4][1:]], *rows[5:]]


SITES = {"inputs": ["x1", "x2"], "targets": "y", "owner": "site"}


@pytest.mark.parametrize("change", [whole, reordered, numbered, list])
def test_one_odd_table_of_many_is_joined(tmp_path: Path, change: Any) -> None:
    task = hub(clients(tmp_path, 2, change), **SITES)
    assert task.groups is not None
    assert task.groups.bincount().tolist() == [27] * 6
    expected = [
        (float(row[0]) if change is not whole or site != 2 else round(float(row[0])), float(row[1]), row[2])
        for site in range(1, 7)
        for row in drawn(site)
    ]
    assert same(samples(task), sorted(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            empty,
            "1 values of 'x1' are missing (the first in row 5 below the names of site-4.csv); accepted: none, or",
        ),
        (
            unnamed,
            "task.inputs: site-4.csv has no column 'x1' (it has X1, x2, y, site); accepted: it in every file",
        ),
        (
            wordy,
            "'x1' is Float64 in site-1.csv and String in site-4.csv ('bad' in row 4 below the names of site-4.csv)",
        ),
    ],
)
def test_one_odd_table_of_many_is_named(tmp_path: Path, change: Any, message: str) -> None:
    assert message in refused(clients(tmp_path, 4, change), **SITES)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_other_types_in_one_file_are_joined(tmp_path: Path, form: str) -> None:
    """Whole numbers in one JSON Lines file, float32 in one Parquet file, no values at all in another column of a file."""
    first = pl.DataFrame({"x": [0.5, 1.5], "y": ["p", "q"]})
    second = pl.DataFrame({"x": [2, 3], "y": ["q", "p"]})
    if form == "jsonl":
        first.write_ndjson(tmp_path / "1.jsonl")
        second.write_ndjson(tmp_path / "2.jsonl")
    else:
        first.write_parquet(tmp_path / "1.parquet")
        second.cast({"x": pl.Float32, "y": pl.Categorical}).write_parquet(tmp_path / "2.parquet")
    task = hub(tmp_path, inputs="x", targets="y")
    assert samples(task) == [(0.5, "p"), (1.5, "q"), (2.0, "q"), (3.0, "p")]


def test_a_folder_without_names_runs(tmp_path: Path) -> None:
    """The settings are in the file of the experiment, and the saved experiment is the same."""
    write(tmp_path / "clients" / "ann" / "iris.data", lines() + "\n")
    write(tmp_path / "clients" / "bob" / "iris.data", lines() + "\n")
    (tmp_path / "experiment.yaml").write_text(
        """
nodes: 2
task:
  name: hub
  path: clients
  csv: {columns: [a, b, c, d, species]}
  inputs: [a, b, c, d]
  targets: species
  owner: {each: folder}
  model: logistic
partition: natural
topology: ring
algorithm: d-psgd
stop: {rounds: 1}
engine: {name: simulate, trainer: sequential}
"""
    )
    experiment = Experiment.load(tmp_path / "experiment.yaml")
    assert Experiment.parse(experiment.to_yaml()) == experiment
    run = gossamer.run(experiment, tmp_path / "runs")
    assert run.status == "done"
    assert run.setup["data"]["samples"] == {"train": 54, "test": 6}
