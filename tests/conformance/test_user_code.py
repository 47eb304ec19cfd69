"""A user's own algorithm and task, in files outside the package, under both engines."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import BadInput, Experiment, Run, RunFailed

ALGORITHM = '''
"""A ring on which every node averages with its left neighbour only, half and half."""
from gossamer import Algorithm, Node


class LeftHand(Algorithm):
    share: float = 0.5

    async def run(self, node: Node) -> None:
        left, right = (node.rank - 1) % node.size, (node.rank + 1) % node.size
        async for r in node.rounds():
            await node.train()
            node.send(right, node.parameters, tag=("hand", r))
            inbox = await node.gather([left], tag=("hand", r))
            await node.mix(inbox, {left: self.share})
            node.record(from_left=list(inbox)[0])
'''
TASK = '''
"""Which side of a line is a point on?"""
import torch
from torch import nn
from gossamer import Task


def accuracy(outputs, targets):
    return ((outputs > 0).float() == targets).float().mean()


def sides(points: int = 60, slope: float = 2.0) -> Task:
    angles = torch.linspace(0, 6.28, points)
    x = torch.stack([angles.cos(), angles.sin()], dim=1)
    y = (x[:, 1:] > slope * x[:, :1]).float()
    return Task(
        model=lambda: nn.Linear(2, 1),
        train=(x, y),
        test=(x, y),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics={"accuracy": accuracy},
    )
'''


COUNTER = """
from gossamer import Algorithm, Node


class Counter(Algorithm):
    steps: int = 1

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            self.count = r
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the user's two modules; no other path entry makes them importable."""
    (tmp_path / "left_hand_algorithm.py").write_text(ALGORITHM)
    (tmp_path / "line_task.py").write_text(TASK)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for module in ("left_hand_algorithm", "line_task"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def play(**changes: Any) -> Run:
    settings: dict[str, Any] = {
        "nodes": 4,
        "task": {"name": "line_task:sides", "points": 40, "slope": 1.0},
        "algorithm": {"name": "left_hand_algorithm:LeftHand", "share": 0.25},
        "batch_size": 5,
        "evaluation": {"every_rounds": 5},
        "engine": {"name": "simulate", "trainer": "sequential"},
        "stop": {"rounds": 40},
    }
    return gossamer.run(Experiment.of({**settings, **changes}))


@pytest.mark.usefixtures("workplace")
def test_files_of_the_working_directory_run_under_both_engines() -> None:
    simulated, real = play(), play(engine={"name": "processes"})
    for run in (simulated, real):
        last = run.metrics.filter(round=40)
        nodes = last.filter(last["node"] >= 0)
        assert nodes["from_left"].to_list() == [3, 0, 1, 2]
        assert (nodes["test_accuracy"] > 0.8).all()
        assert run.experiment["algorithm"] == {"name": "left_hand_algorithm:LeftHand", "share": 0.25}
        assert run.experiment["task"] == {"name": "line_task:sides", "points": 40, "slope": 1.0}
    assert simulated.parameters is not None
    assert real.parameters is not None
    assert torch.equal(simulated.parameters, real.parameters)


@pytest.mark.usefixtures("workplace")
def test_parameter_of_a_user_algorithm_takes_effect() -> None:
    quarter, half = (
        play(algorithm={"name": "left_hand_algorithm:LeftHand", "share": share}) for share in (0.25, 0.5)
    )
    assert quarter.parameters is not None
    assert half.parameters is not None
    assert not torch.equal(quarter.parameters, half.parameters)


@pytest.mark.usefixtures("workplace")
def test_task_source_class_runs() -> None:
    run = play(task={"name": "user_tasks:Plane", "samples": 32})
    assert run.setup["samples"] == [8, 8, 8, 8]
    assert run.metrics["test_spread"].drop_nulls().len() > 0


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"algorithm": {"name": "left_hand_algorithm:LeftHand", "shar": 1}}, r"algorithm\.shar\b"),
        ({"algorithm": "left_hand_algorithm:RightHand"}, "RightHand"),
        ({"algorithm": "right_hand_algorithm:LeftHand"}, "no module named 'right_hand_algorithm'"),
        ({"task": {"name": "line_task:sides", "points": "many"}}, r"task\.points.*many"),
        ({"task": "line_task:accuracy"}, "task"),
    ],
)
def test_unusable_user_code_is_named(field: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        play(**field)


@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_setting_an_attribute_on_an_algorithm_is_refused(workplace: Path, engine: str) -> None:
    (workplace / "counter_algorithm.py").write_text(COUNTER)
    with pytest.raises(RunFailed) as caught:
        play(algorithm="counter_algorithm:Counter", engine={"name": engine})
    line = 1 + COUNTER.splitlines().index("            self.count = r")
    assert re.sub(r"^node \d", "node k", str(caught.value)) == (
        "node k failed in round 0: AttributeError: Counter.count can't be set: the object holds settings only, and all nodes"
        " of a simulation share it; accepted: local variables of run(), or node.state, which checkpoints keep"
        f" (counter_algorithm.py, line {line})"
    )


def test_plain_for_over_rounds_names_its_line(workplace: Path) -> None:
    (workplace / "plain_loop.py").write_text(COUNTER.replace("async for", "for"))
    with pytest.raises(RunFailed, match=r"'AsyncRounds' object is not iterable \(plain_loop.py, line 9\)$"):
        play(algorithm="plain_loop:Counter")


@pytest.mark.usefixtures("shapes_unchecked")
def test_unrecordable_value_is_named_with_its_line(workplace: Path) -> None:
    (workplace / "odd_record.py").write_text(COUNTER.replace("self.count = r", "node.record(r=r, peers={r})"))
    message = r"TypeError: node.record: peers: got a set; accepted: numbers, text, None, lists, mappings \(odd_record.py, line 10\)$"
    with pytest.raises(RunFailed, match=message):
        play(algorithm="odd_record:Counter")


@pytest.mark.usefixtures("workplace")
def test_fork_server_reports_bad_input() -> None:
    with pytest.raises(BadInput, match="nodes: 50 for 40 samples"):
        play(nodes=50, engine={"name": "processes"})
    assert not Path("runs").exists()
