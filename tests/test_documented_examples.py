"""Every code block in README.md and docs/ is run, checked, or listed as one that can't be run."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from command_line import SMALL, Cli
from gossamer import Experiment, Sweep, load_run, run
from gossamer.reproduce import Reproduction
from test_resume import Stopper

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "extending.md").read_text()


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


BLOCKS = [
    Block(page.relative_to(ROOT).as_posix(), language, textwrap.dedent(text))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for language, text in re.findall(r"^ *```(.*)\n((?s:.*?))^ *```$", page.read_text(), re.MULTILINE)
    if not language.startswith("{")  # a directive of the site, which builds it
]

# All other blocks are python, yaml or bash, and run below.
NOT_RUN = {
    ("README.md", "console"): 1,  # pip install
    ("docs/checkpoints.md", "text"): 1,  # files
    ("docs/commands.md", "text"): 1,  # an overview of the commands
    ("docs/deployment.md", "console"): 7,  # several machines, a Ray cluster, containers, root
    ("docs/deployment.md", "ini"): 1,  # systemd
    ("docs/deployment.md", "slurm"): 1,
    ("docs/design.md", "text"): 1,  # modules
    ("docs/experiments.md", "text"): 2,  # files
    ("docs/sweeps.md", "slurm"): 2,
    ("docs/sweeps.md", "text"): 1,  # files
}


SLOW = (
    "--engine processes",
    "python -m chaos",
    "stop.rounds=200",
    "run_sweep",
)  # marks of blocks that take seconds


def of(language: str) -> list[Any]:
    return [
        pytest.param(
            block, id=f"{block.page}-{number}", marks=[pytest.mark.slow] * any(map(block.text.count, SLOW))
        )
        for number, block in enumerate(BLOCKS)
        if block.language == language
    ]


def example(name: str) -> str:
    (text,) = (block.text for block in BLOCKS if block.page == "docs/extending.md" and name in block.text)
    return text


def test_every_block_is_run_or_listed() -> None:
    others = [block for block in BLOCKS if block.language not in ("python", "yaml", "bash")]
    assert Counter((block.page, block.language) for block in others) == NOT_RUN


MODULES = ("mine", "mine_attack", "mine_codec", "mine_optimizer", "mine_private", "asking", "shapes")


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[None]:
    """The files that the text asks for, in the folder of the test; other tests have modules of the same names."""
    for name in MODULES:
        sys.modules.pop(name, None)
    (tmp_path / "mine.py").write_text(example("class PushGossip") + "\n\n" + example("def circles"))
    (tmp_path / "mine_codec.py").write_text(example("class Signs"))
    (tmp_path / "mine_attack.py").write_text(example("class SignFlip"))
    (tmp_path / "mine_private.py").write_text(example("class Private"))
    (tmp_path / "mine_optimizer.py").write_text(example("class MatricesDecay"))
    (tmp_path / "shapes.py").write_text(example("class Shapes"))
    (tmp_path / "asking.py").write_text(example("class Ask"))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("change", "rounds", "accuracy"),
    [
        ("algorithm.name=mine:PushGossip", 40, 0.3),
        ("task.name=mine:circles", 20, 0.7),
        ("task.name=shapes:Shapes", 40, 0.7),
        pytest.param("codec=mine_codec:Signs", 60, 0.6, marks=pytest.mark.slow),
        ("algorithm=asking:Ask", 60, 0.3),
    ],
)
@pytest.mark.usefixtures("examples")
def test_extensions_learn(cli: Cli, tmp_path: Path, change: str, rounds: int, accuracy: float) -> None:
    file = str(ROOT / "experiments" / "quickstart.yaml")
    code, _, errors = cli("run", file, "--set", change, "--set", f"stop.rounds={rounds}", "--out", "runs")
    assert code == 0, errors
    (folder,) = (tmp_path / "runs" / "quickstart").iterdir()
    metrics = load_run(folder).metrics
    last = metrics.filter(metrics["round"] == rounds, metrics["node"] >= 0)
    assert float(last["test_accuracy"].mean()) > accuracy  # type: ignore[arg-type]


def test_documented_base_class_paths_exist() -> None:
    table = TEXT[TEXT.index("| base class |") : TEXT.index("### A codec of your own")]
    paths = re.findall(r"`(gossamer\.[\w.]+)`", table)
    assert len(paths) > 10
    for path in paths:
        module, _, name = path.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), name), type)


def alternatives(text: str) -> Iterator[str]:
    """The parts of a block; a repeated key begins the next part."""
    part: dict[str, str] = {}
    for entry in re.split(r"^(?=\w)", text, flags=re.MULTILINE):
        if (key := entry.partition(":")[0]) in part:
            yield "".join(part.values())
            part = {}
        part[key] = entry
    yield "".join(part.values())


@pytest.mark.parametrize(
    "text", [text for block in BLOCKS if block.language == "yaml" for text in alternatives(block.text)]
)
def test_experiments_are_accepted(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in re.findall("torchvision|timm", text):
        pytest.importorskip(package)
    (tmp_path / "mymodels.py").write_text("def WideNet(width): pass")
    monkeypatch.syspath_prepend(tmp_path)
    fields = yaml.safe_load(text) or {}
    if "reproduction" in fields:
        assert Reproduction.model_validate(fields["reproduction"]).claims
    elif "cells" in fields:
        assert Sweep.of(fields, ROOT / "experiments" / "sweeps", out=tmp_path).planned
    else:
        Experiment.of({**yaml.safe_load(SMALL), **fields}, tmp_path)


RUN = "runs/mine/20260101-120000-000000-abcd"


@pytest.fixture
def folder(tmp_path: Path, examples: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the commands: experiments, a sweep, finished runs "mine", and a stopped one, RUN."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    experiment = Experiment.load(
        "experiments/quickstart.yaml",
        [
            *("name=mine", "task.model=logistic", "algorithm.local_steps=1", "compute.seconds_per_step=10"),
            "evaluation={every_rounds: 2, samples: 50, timeline: {from_s: 0, to_s: 100, nodes: 16}}",
            *("checkpoint={every_rounds: 2}", "stop.rounds=4", "engine.trainer=sequential"),
        ],
    )
    experiment.save("file.yaml")
    (tmp_path / "sweep.yaml").write_text(
        "base: file.yaml\nseeds: 2\ncells: {d-psgd: {}, local: {algorithm: local}}\n"
    )
    for seed in (1, 2):
        for algorithm in ("d-psgd", "local"):
            run(experiment.override(seed=seed, algorithm={"name": algorithm}))
    stopped = run(experiment, observer=Stopper(34))
    stopped.path.rename(RUN)
    return tmp_path


@pytest.mark.parametrize("block", of("python"))
def test_programs_run(block: Block, folder: Path) -> None:
    exec(compile(block.text, block.page, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("block", of("bash"))
def test_commands_run(block: Block, cli: Cli, folder: Path) -> None:
    for line in block.text.splitlines():
        words = [
            {"FILE": "file.yaml", "RUN": RUN}.get(word, word) for word in shlex.split(line, comments=True)
        ]
        if words[0] != "gossamer":
            subprocess.run(
                ["bash", "-c", line], cwd=ROOT, check=True, env={**os.environ, "PYTHONWARNINGS": ""}
            )
            continue
        fewer = ["--set", "stop.rounds=4"] if words[1] == "run" else []
        code, _, errors = cli(*words[1:], *fewer)
        assert code == 0, (line, errors)
