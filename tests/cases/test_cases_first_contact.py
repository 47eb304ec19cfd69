"""The first minutes: what README promises, what the commands say next, and how Ctrl-C and errors answer."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import Cli
from gossamer import BadInput, Experiment, __version__, run
from gossamer.results.observer import Observer
from gossamer.results.trackers import WandB
from gossamer.runtime.recording import UNCOUNTED
from gossamer.runtime.simulate import simulation
from gossamer.sweep.display import SweepLines
from gossamer.sweep.execute import Counts

ROOT = Path(__file__).parents[2]
FIELDS: dict[str, Any] = {
    "nodes": 2,
    "task": {"name": "least-squares", "samples": 16, "features": 2},
    "batch_size": 4,
    "evaluation": {"every_rounds": 5},
    "engine": {"name": "simulate", "trainer": "sequential", "workers": 1},
}


class Heard(Observer):
    """Collects what a run says."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def own(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> str:
    """The name of an algorithm whose ``run`` has this body."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    head = "import signal\nfrom gossamer import Algorithm\nclass Own(Algorithm):\n    async def run(self, node):\n"
    (folder / f"{name}.py").write_text(head + lines)
    monkeypatch.syspath_prepend(folder)
    return f"{name}:Own"


def test_readme_says_how_fast_how_large_where_and_how_to_cite() -> None:
    """Each number stands on the page that the sentence links, and each link leads to something."""
    first_screen = (ROOT / "README.md").read_text().partition("## Start")[0]
    assert first_screen.count("\n") < 25
    points = re.findall(r"^- \*\*(\w[\w ]*)\*\*(.*?)(?=^- |\Z)", first_screen, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in points] == ["Fast", "Large", "Documented", "To cite"]
    for name, text in points[:2]:
        pages = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
        linked = " ".join((ROOT / page).read_text() for page in pages)
        numbers = re.findall(r"\d[\d,.]*\d", re.sub(r"\]\([^)]*\)", "]", text))
        assert len(numbers) >= 4, name
        assert [number for number in numbers if number not in linked] == []
    for link in re.findall(r"\]\(([^)#]+)", first_screen):
        assert (ROOT / link).exists(), link
    [image] = re.findall(r"!\[[^]]*\]\(([^)]+)\)", first_screen)
    assert (ROOT / image).read_bytes()[:6] == b"GIF89a"
    assert (ROOT / image).stat().st_size < 1_000_000


def test_the_citation_file_fits_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # required by the format
    assert str(citation["version"]) == __version__
    assert citation["license"] == "MIT"


def test_an_own_error_in_a_notebook_begins_at_the_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that raises when it is tried: the cause that a notebook shows begins at the model's line."""
    (tmp_path / "odd_model.py").write_text("def odd(shape, classes):\n    raise OSError('no weights here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = {"name": "digits", "model": "odd_model:odd"}
    with pytest.raises(BadInput, match=r"no weights here \(odd_model.py, line 2\)") as raised:
        run(Experiment(**{**FIELDS, "algorithm": "d-psgd", "task": task}, stop={"rounds": 1}), tmp_path)
    cause = raised.value.__cause__
    assert cause is not None
    assert cause.__traceback__ is not None
    assert Path(cause.__traceback__.tb_frame.f_code.co_filename).name == "odd_model.py"


def test_the_first_ctrl_c_answers_an_algorithm_that_never_yields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "async for r in node.rounds():\n"
        "    if node.rank == 0 and r == 0:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    await node.train()"
    )
    name = own(tmp_path, monkeypatch, "never_yields", body)
    experiment = Experiment(algorithm=name, stop={"rounds": 9}, **FIELDS)
    heard = Heard()
    done = run(experiment, tmp_path, observer=heard)
    assert done.status == "stopped"
    [answer] = [text for text in heard.texts if text.startswith("Ctrl-C")]
    assert (
        answer
        == "Ctrl-C: the run ends and keeps its record; once more ends it at once (never_yields.py, line 7)"
    )
    assert (
        done.summary["to continue"] == "impossible without checkpoints (checkpoint.every_rounds saves some)"
    )


def test_a_second_ctrl_c_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "signal.raise_signal(signal.SIGINT)\nsignal.raise_signal(signal.SIGINT)"
    name = own(tmp_path, monkeypatch, "twice_interrupted", body)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(Experiment(algorithm=name, stop={"rounds": 9}, **FIELDS), tmp_path, observer=Heard())
    finally:
        signal.signal(signal.SIGINT, before)


class Impatient(Heard):
    """Ends a run once it has heard the line on rounds."""

    def say(self, text: str) -> None:
        super().say(text)
        self.stopping = text == UNCOUNTED


@pytest.mark.parametrize("ends", [True, False])
def test_an_algorithm_that_counts_no_rounds_gets_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """While it runs on although the rounds are long over, or at its end if the rounds of the stop rule do not matter."""
    monkeypatch.setattr(simulation, "UNCOUNTED_S", 0.0)
    monkeypatch.setattr(simulation, "PROGRESS_S", 0.0)
    body = "for _ in range(3):\n    await node.train()" if ends else "while True:\n    await node.train()"
    name = own(tmp_path, monkeypatch, f"uncounted_{ends}", body)
    heard = Impatient()
    run(
        Experiment(algorithm=name, stop={"time_s": 100.0} if ends else {"rounds": 3}, **FIELDS),
        tmp_path,
        observer=heard,
    )
    assert heard.texts.count(UNCOUNTED) == 1


@pytest.mark.slow
def test_an_algorithm_that_counts_no_rounds_gets_a_line_from_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = own(tmp_path, monkeypatch, "uncounted_processes", "for _ in range(3):\n    await node.train()")
    for algorithm, times in ((name, 1), ("d-psgd", 0)):
        heard = Heard()
        fields = {**FIELDS, "engine": {"name": "processes"}, "stop": {"rounds": 3}}
        run(Experiment(algorithm=algorithm, **fields), tmp_path, observer=heard)
        assert heard.texts.count(UNCOUNTED) == times


def test_no_line_about_rounds_for_an_algorithm_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "UNCOUNTED_S", 0.0)
    monkeypatch.setattr(simulation, "PROGRESS_S", 0.0)
    for algorithm in ("d-psgd", "gossip-learning"):
        heard = Heard()
        run(Experiment(algorithm=algorithm, stop={"rounds": 3}, **FIELDS), tmp_path, observer=heard)
        assert UNCOUNTED not in heard.texts


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_a_tracker_without_its_key_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    class Settings:
        api_key: str | None = None
        base_url = "https://api.wandb.ai"

    class Service:
        settings = Settings()

    monkeypatch.setattr(wandb, "setup", Service)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.delenv("WANDB_IDENTITY_TOKEN_FILE", raising=False)
    experiment = Experiment(algorithm="d-psgd", stop={"rounds": 1}, trackers=["wandb"], **FIELDS)
    with pytest.raises(
        BadInput, match=r"trackers: 'wandb' finds no key .*; accepted: after wandb login, .* mode: offline"
    ):
        run(experiment, tmp_path / "runs", observer=Heard())
    assert not (tmp_path / "runs").exists()
    WandB(mode="offline").check()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123\n")
    (tmp_path / ".netrc").chmod(0o600)
    WandB().check()
    (tmp_path / ".netrc").unlink()
    monkeypatch.setattr(Settings, "api_key", "0123")
    WandB().check()


SWEEP: Mapping[str, Any] = {
    "name": "first",
    "base": {**FIELDS, "algorithm": "d-psgd", "stop": {"rounds": 2}},
    "seeds": 1,
}


def test_a_dry_run_says_what_it_does(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(dict(SWEEP)))
    code, _, err = cli("sweep", "sweep.yaml", "--dry-run")
    assert (code, err) == (0, "each cell without a finished run is tried for some seconds\n")
    assert cli("sweep", "sweep.yaml", "--dry-run", "--quiet")[2] == ""


def test_a_sweep_whose_first_run_takes_a_while_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    lines = SweepLines()
    for _ in range(2):
        lines.update(Counts(5, skipped=1, running=2))
    assert capsys.readouterr().err == "4 of 5 runs to do; a line follows for each that ends\n"
    quick = SweepLines()
    quick.update(Counts(5, done=1))
    assert capsys.readouterr().err == ""
