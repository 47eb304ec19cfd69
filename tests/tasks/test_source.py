from __future__ import annotations

import sys

import pytest

from gossamer import Experiment
from gossamer.config.registry import build, names
from gossamer.errors import BadInput
from gossamer.tasks import Task, load_task

USERS = """
from pathlib import Path
import torch
from gossamer.config.registry import Component
from gossamer.tasks import Task, TaskSource

def mine(samples: int = 5):
    data = torch.ones(samples, 2), torch.zeros(samples, 1)
    return Task(model=lambda: torch.nn.Linear(2, 1), train=data, test=data, loss=torch.nn.functional.mse_loss)

def given(seed, data_root=None, file: Path = Path("default.txt"), other: Path | None = None, text: str = "a.txt"):
    task = mine()
    object.__setattr__(task, "seen", (seed, data_root, file, other, text))
    return task

def number():
    return 3

class Other(Component):
    pass

class Reads(TaskSource):
    file: Path

    def load(self, data_root, seed):
        return given(seed, data_root, self.file)
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_own_task.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_own_task"
    sys.modules.pop("users_own_task", None)


def test_user_function_receives_its_parameters(users_module):
    loaded = load_task(build("task", {"name": f"{users_module}:mine", "samples": 7}), None, 1)
    assert isinstance(loaded, Task)
    assert loaded.samples == 7


def test_user_function_receives_seed_and_data_root(users_module, tmp_path):
    bare = build("task", f"{users_module}:given")
    assert load_task(bare, tmp_path, 7).seen[:2] == (7, tmp_path)
    assert load_task(build("task", bare.spec()), tmp_path, 8).seen[:2] == (8, tmp_path)
    fixed = build("task", {"name": f"{users_module}:given", "seed": 3, "data_root": None})
    assert load_task(fixed, tmp_path, 7).seen[:2] == (3, tmp_path)


def test_user_task_paths_are_relative_to_experiment_file(users_module, tmp_path, monkeypatch):
    folder, here = tmp_path / "there", tmp_path / "here"
    for path in (folder, here):
        path.mkdir()
    monkeypatch.chdir(here)
    base = "nodes: 2\nalgorithm: d-psgd\nstop: {rounds: 1}\n"
    (folder / "a.yaml").write_text(f"{base}task: {{name: {users_module}:given, other: ../x.txt}}\n")
    experiment = Experiment.load(folder / "a.yaml")
    expected = (folder / "default.txt", tmp_path / "x.txt", "a.txt")
    assert load_task(experiment.task, None, 1).seen[2:] == expected
    experiment.save(tmp_path / "saved.yaml")
    assert load_task(Experiment.load(tmp_path / "saved.yaml").task, None, 1).seen[2:] == expected
    overridden = Experiment.load(folder / "a.yaml", ["task.file=b.txt"])
    assert load_task(overridden.task, None, 1).seen[2] == here / "b.txt"
    (folder / "b.yaml").write_text(f"{base}task: {{name: {users_module}:Reads, file: y.txt}}\n")
    assert load_task(Experiment.load(folder / "b.yaml").task, None, 1).seen[2] == folder / "y.txt"


def test_non_task_is_refused(users_module):
    with pytest.raises(BadInput, match=r"'users_own_task:number' returned int; accepted: gossamer.Task"):
        load_task(build("task", f"{users_module}:number"), None, 1)
    with pytest.raises(BadInput, match=r"'users_own_task:Other' is not a task"):
        load_task(build("task", f"{users_module}:Other"), None, 1)


def test_built_in_tasks_are_rebuilt_from_their_spec():
    built_in = {
        "digits",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "least-squares",
        "movielens",
        "shakespeare",
    }
    assert built_in <= set(names("task"))
    for name in built_in:
        component = build("task", name)
        assert build("task", component.spec()) == component
