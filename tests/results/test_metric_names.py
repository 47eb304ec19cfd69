"""Records of older versions, whose metrics may have any name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import Cli
from gossamer import Run
from gossamer.results.report import page_data
from synthetic_run import synthetic

NAMES = (
    *(
        "f1=macro",
        "[bold]x",
        "a<b>",
        "with space",
        "q\"u'o",
        "s/l",
        "x,y",
        "p at time_s=3",
        "a$b$",
        "</script>",
    ),
    *("time_s to loss=2", "100%", "back\\slash", "{{ braces }}"),
)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    named = [f"test_{name}" for name in NAMES]
    return [synthetic(tmp_path / "runs", nodes=4, rounds=(0, 10), seed=seed, named=named) for seed in (1, 2)]


@pytest.mark.slow
def test_reports_show_metrics_of_any_name(cli: Cli, runs: list[Run], tmp_path: Path) -> None:
    level = runs[0].metrics.filter(node=0, round=10)["test_accuracy"][0] / 2
    for name in NAMES:
        code, text, err = cli(
            "report", "runs", "--time-to", f"test_{name}={level}", "--area", f"test_{name}", "--json"
        )
        assert (code, err) == (0, "")
        written = json.loads(text)
        means = {row["measure"]: row["mean"] for row in written["table"]}
        assert means[f"test_{name}"] == means["test_accuracy"]
    page = (tmp_path / "report.html").read_text()
    assert "test_a<b>" not in page
    assert "test a&lt;b&gt;" in page
    assert page.count("</script>") == 3  # its own
    titles = [metric["title"] for metric in page_data(runs)["metrics"]]
    assert {f"test {name.replace('_', ' ')}" for name in NAMES} <= set(titles)


def test_tables_and_figures_of_metrics_of_any_name(cli: Cli, runs: list[Run], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, text, err = cli(
        "report", "runs", "--metrics", "test_[bold]x", "--animate", "odd.png", "--figures", "all"
    )
    assert (code, err) == (0, "")
    assert "test [bold]x" in text
    code, _, err = cli("report", "runs", "--figures", "figures", "--format", "png")
    assert (code, err) == (0, "")
    assert len(list((tmp_path / "figures").glob("*.png"))) == len(NAMES) + 2  # with accuracy and loss
