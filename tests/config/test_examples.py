"""Experiments that ship with gossamer load by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer import BadInput, Experiment, Sweep
from gossamer.config import examples
from gossamer.reproduce import load as load_reproduction

FOLDER = Path(__file__).parents[2] / "experiments"


def test_every_example_has_name_and_summary() -> None:
    all_names = {*examples.names(), *examples.names(sweeps=True)}
    assert {FOLDER / f"{name}.yaml" for name in all_names} == set(FOLDER.rglob("*.yaml"))
    assert all(examples.located(name).resolve() == FOLDER / f"{name}.yaml" for name in all_names)
    assert all(examples.summary(name) for name in all_names)


def test_a_summary_is_a_whole_sentence() -> None:
    text = examples.summary("topology-aware/beyond")
    assert text.startswith("Questions that the paper of Sakarvadia et al. (arXiv 2505.11760) leaves open, ")


def test_experiments_and_sweeps_load_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Experiment.load("quickstart", ["nodes=8"]) == Experiment.load(
        FOLDER / "quickstart.yaml", ["nodes=8"]
    )
    assert Sweep.load("sweeps/quickstart").name == "quickstart-sweep"
    # Its network file lies in the folder of the example.
    assert Experiment.load("divshare/kollaps").network.path.name == "star-60.xml"


def test_file_shadows_example_but_folder_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert Experiment.load("quickstart").name == "quickstart"
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text(
        (FOLDER / "quickstart.yaml").read_text().replace("quickstart", "mine")
    )
    assert Experiment.load("quickstart").name == "mine"


def test_unknown_example_lists_accepted_names() -> None:
    with pytest.raises(
        BadInput, match=r"^quikstart: no file .*'quickstart'\?\); accepted: a YAML file, or cifar10/d-psgd"
    ):
        Experiment.load("quikstart")
    with pytest.raises(BadInput, match=r"or codecs/digits, .*sweeps/quickstart"):
        Sweep.load("quikstart")
    with pytest.raises(
        BadInput,
        match=r"\(did you mean 'decentralizepy/figure5'\?\); accepted: a YAML file, or decentralizepy/figure3, ",
    ):
        load_reproduction("figure5")
    with pytest.raises(BadInput, match=r"a sweep; accepted: an experiment"):
        Experiment.load("sweeps/quickstart")
