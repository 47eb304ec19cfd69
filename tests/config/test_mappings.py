"""Mappings in YAML files: accepted ones, and one line for each refused one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.config.experiment import parse_mapping, read_mapping
from gossamer.errors import BadInput


def test_a_mapping_is_read(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("a: {b: [1, 2.5, ü]}\n", encoding="utf-8")
    assert read_mapping(file, "a file") == {"a": {"b": [1, 2.5, "ü"]}}


def test_merged_keys_may_be_overridden() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: [*a, *b], 1: u, '1': v}"
    assert parse_mapping(text, "there")["b"] == {"x": 3, "y": 2}
    assert parse_mapping(text, "there")["c"] == {"x": 1, "y": 2, 1: "u", "1": "v"}
    text = "a: &a {x: 1}\nbase:\n  b: &b {<<: *a, x: 2}\nc: {<<: *b}"  # c is read before b
    assert parse_mapping(text, "there") == {"a": {"x": 1}, "base": {"b": {"x": 2}}, "c": {"x": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: [",
            "there, line 2, column 1: not YAML: did not find expected node content",
        ),
        (
            "a: [1,\n 2\nb: 3",
            "there, line 3, column 2: not YAML: did not find expected ',' or ']'",
        ),
        ("a: 1\n b: 2", "there, line 2, column 3: not YAML: mapping values are not allowed in this context"),
        (
            '{"a": 1,\n "b" 2}',
            "there, line 2, column 6: not YAML: did not find expected ',' or '}'",
        ),
        ("a: 1\nb: \a", "there: not YAML: control characters are not allowed"),
        (
            "a: !!python/object/apply:os.getcwd []",
            "there, line 1, column 4: not YAML: could not determine a constructor",
        ),
        ("a: {b: 1, c: 2,\n b: 3}", "there, line 2, column 2: not YAML: 'b' appears twice"),
        ("a: 1\na: 1", "there, line 2, column 1: not YAML: 'a' appears twice"),
        ("a: !!map [1, 2]", "there, line 1, column 4: not YAML: expected a mapping node"),
        ("a: 2026-13-01", "there: not YAML: month must be in 1..12"),
        ("- a", "there: got ['a']; accepted: a mapping with 'a'"),
        ("", "there: got null (empty); accepted: a mapping with 'a'"),
        ("# nothing\n", "there: got null (empty); accepted: a mapping with 'a'"),
    ],
)
def test_invalid_mapping_is_one_line(text: str, message: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_mapping(text, "there", "a mapping with 'a'")
    [problem] = refused.value.problems
    assert problem.startswith(message)
    assert "\n" not in problem
    assert "unicode string" not in problem
    assert "^" not in problem


def test_unreadable_file_error_names_expected_content(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.yaml: No such file or directory; accepted: a list of birds$"):
        read_mapping(tmp_path / "none.yaml", "a list of birds")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match=r"binary\.yaml: .*; accepted: a list of birds$"):
        read_mapping(tmp_path / "binary.yaml", "a list of birds")
