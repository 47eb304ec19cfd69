from __future__ import annotations

import sys

import pytest
import torch

from gossamer.config.registry import build, names
from gossamer.errors import BadInput
from gossamer.tasks import Task, load_task

USERS = """
import torch
from gossamer.config.registry import Component
from gossamer.tasks import Task

def mine(samples: int = 5):
    data = torch.ones(samples, 2), torch.zeros(samples, 1)
    return Task(model=lambda: torch.nn.Linear(2, 1), train=data, test=data, loss=torch.nn.functional.mse_loss)

def number():
    return 3

class Other(Component):
    pass
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_own_task.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_own_task"
    sys.modules.pop("users_own_task", None)


def test_a_users_function_is_called_with_its_parameters(users_module):
    loaded = load_task(build("task", {"name": f"{users_module}:mine", "samples": 7}), None, 1)
    assert isinstance(loaded, Task)
    assert loaded.samples == 7


def test_what_is_not_a_task_is_refused(users_module):
    with pytest.raises(BadInput, match=r"'users_own_task:number' gave int; accepted: gossamer.Task"):
        load_task(build("task", f"{users_module}:number"), None, 1)
    with pytest.raises(BadInput, match=r"'users_own_task:Other' is no task"):
        load_task(build("task", f"{users_module}:Other"), None, 1)


def test_every_built_in_task_says_its_parameters_and_is_built_again_from_them():
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


def test_a_built_in_task_is_loaded():
    loaded = load_task(build("task", "digits"), None, 1)
    assert loaded.train[0].dtype == torch.float32
