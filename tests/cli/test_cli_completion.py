"""Shell completion, queried as the script of fish does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from command_line import Cli
from gossamer.cli import completion


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path_factory.getbasetemp() / "completion"))


@pytest.fixture
def offered(cli: Cli, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def ask(line: str) -> list[str]:
        monkeypatch.setenv("_GOSSAMER_COMPLETE", "complete_fish")
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"gossamer {line}")
        code, out, err = cli()
        assert (code, err) == (0, "")
        return [candidate.split("\t")[0] for candidate in out.splitlines() if candidate]

    return ask


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("de", {"demo"}),
        ("run quick", {"quickstart"}),
        ("run sm", {"small.yaml"}),
        ("sweep sweeps/", {"sweeps/quickstart"}),
        ("run quickstart --engine p", {"processes"}),
        ("run quickstart --set stop.r", {"stop.rounds"}),
        ("run quickstart --set topology.deg", {"topology.degree"}),
        ("run small.yaml --set compute.sec", {"compute.seconds_per_step"}),
        ("run quickstart --set task.model.hi", {"task.model.hidden"}),
        ("run quickstart --set topology=ri", {"topology=ring"}),
        ("run quickstart --set topology.name=ri", {"topology.name=ring"}),
        ("run quickstart --set engine.trainer=f", {"engine.trainer=fused"}),
        ("run quickstart --set algorithm.overlap=", {"algorithm.overlap=true", "algorithm.overlap=false"}),
        ("run quickstart --set compute.base.se", {"compute.base.seconds_per_step"}),
        ("run missing.yaml --set evaluation.ev", {"evaluation.every_rounds", "evaluation.every_s"}),
        ("list algo", {"algorithm"}),
        ("list algorithm d-", {"d-psgd"}),
        ("new study --algorithm swift-", {"swift-artifact"}),
    ],
)
def test_completion_offers_expected_words(offered, line: str, expected: set[str]) -> None:  # type: ignore[no-untyped-def]
    assert set(offered(line)) == expected


def test_completion_offers_field_paths(offered) -> None:  # type: ignore[no-untyped-def]
    assert {"nodes", "task", "engine", "codec"} <= set(offered("run quickstart --set "))
    assert {"stop.rounds", "stop.target"} <= set(offered("run quickstart --set stop."))
    assert offered("run quickstart --set stop.target.") == ["stop.target.metric", "stop.target.value"]


def test_completion_script_is_printed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    text = cli("--help")[1]
    assert "--install-completion" in text
    assert "--show-completion" in text
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    code, script, _ = cli("--show-completion")
    assert code == 0
    assert re.search(r"complete -o default -F \w+ gossamer", script)


def test_schema_is_cached_until_source_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))
    made = []
    monkeypatch.setattr("gossamer.config.schema.json_schema", lambda: made.append(1) or {"made": len(made)})
    assert [completion._schema(), completion._schema()] == [{"made": 1}] * 2
    [file] = (tmp_path / "cache").iterdir()
    os.utime(file, (0, 0))  # older than any source
    assert completion._schema() == {"made": 2}
    file.write_text("{")
    assert completion._schema() == {"made": 3}
