"""Node: parameters, buffers, the whole model, and the layout behind the vectors."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer import Model, Node, RunFailed, Task
from scenario import FEATURES, data, experiment, play


def normed() -> Task:
    """Two inputs, batch norm, one output: P = 2 + 2 + 2 + 1, B = 2 + 2 + 1."""
    inputs = torch.arange(24, dtype=torch.float32).reshape(12, 2)
    targets = inputs.sum(1, keepdim=True)

    def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return ((outputs - wanted) ** 2).mean()

    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))

    return Task(model, (inputs, targets), (inputs, targets), loss)


NORMED = f"{__name__}:normed"


def test_parameters_start_equal_unless_independent(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        return node.parameters

    common = play(tmp_path, script, 3).values
    assert common[0].shape == (FEATURES,)
    assert common[0].dtype == torch.float32
    assert torch.equal(common[0], common[1])
    assert torch.equal(common[0], common[2])
    independent = play(tmp_path, script, 3, initial="independent").values
    assert not torch.equal(independent[0], independent[1])


def test_assignment_copies_and_keeps_earlier_snapshots(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        before = node.parameters
        kept = before.clone()
        mine = torch.tensor([1.0, 2.0, 3.0])
        node.parameters = mine
        mine.zero_()
        assert torch.equal(node.parameters, torch.tensor([1.0, 2.0, 3.0]))
        assert torch.equal(before, kept)
        return node.parameters

    play(tmp_path, script, 1)


def test_assigned_parameters_last_to_the_end_of_the_run(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        node.parameters = torch.full((FEATURES,), float(node.rank))

    recorded = play(tmp_path, script, 3).run
    assert recorded.parameters is not None
    assert torch.equal(recorded.parameters, torch.arange(3.0)[:, None].expand(3, FEATURES))


@pytest.mark.parametrize("assigned", [False, True])
def test_augmented_assignment_fails_at_its_line(tmp_path: Path, assigned: bool) -> None:
    async def script(node: Node) -> None:
        if assigned:
            node.parameters = torch.ones(FEATURES)
        await node.sleep(1 + node.rank)
        node.parameters -= 1.0

    line = script.__code__.co_firstlineno + 4
    said = rf"node 0: .*in place.*compute a new vector.*\(test_node_model.py, line {line}\)"
    with pytest.raises(RunFailed, match=said) as failure:
        play(tmp_path, script, 3)
    assert failure.value.node == 0


CALLS: dict[str, Callable[[Node], Any]] = {
    "read": lambda node: node.parameters,
    "model": lambda node: node.model,
    "assign": lambda node: setattr(node, "parameters", torch.zeros(FEATURES)),
    "assign model": lambda node: setattr(node, "model", Model(torch.zeros(FEATURES))),
    "train": lambda node: node.train(),
    "gradient": lambda node: node.gradient(),
    "gradient elsewhere": lambda node: node.gradient(at=torch.zeros(FEATURES)),
    "apply": lambda node: node.apply(torch.zeros(FEATURES)),
    "combine": lambda node: node.combine(torch.zeros(FEATURES), {}, {}),
    "mix": lambda node: node.mix({}, {}),
    "evaluate": lambda node: node.evaluate(),
    "evaluate another": lambda node: node.evaluate(torch.zeros(FEATURES)),
    "receive": lambda node: node.receive("m"),
    "gather": lambda node: node.gather([1], "m"),
    "ask": lambda node: node.ask(1, None, "m"),
    "next answer": lambda node: node.next_answer(),
    "sleep": lambda node: node.sleep(1),
    "end of the round": lambda node: node.end_round(0),
}


@pytest.mark.parametrize("then", CALLS)
def test_in_place_write_is_detected_by_the_next_call(tmp_path: Path, then: str) -> None:
    """The call comes before other nodes, which share the vector, can see the write."""

    async def script(node: Node) -> None:
        vector = node.parameters
        if node.rank == 1:
            await node.sleep(0.5)
            vector.add_(1.0)
            with pytest.raises(RuntimeError, match="node 1: its parameters were modified in place"):
                await result if isawaitable(result := CALLS[then](node)) else None
        await node.sleep(1)

    with pytest.raises(RunFailed, match=r"node 1 failed in round \d: RuntimeError: node 1: its parameters"):
        play(tmp_path, script, 3)


def test_in_place_write_at_the_very_end_fails_its_node(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        if node.rank == 1:
            node.parameters.mul_(2.0)

    with pytest.raises(RunFailed, match="its parameters were modified in place") as failure:
        play(tmp_path, script)
    assert failure.value.node == 1


def test_in_place_write_to_the_buffers_is_refused(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        node.buffers.add_(1.0)
        with pytest.raises(RuntimeError, match="its buffers were modified in place"):
            _ = node.buffers

    with pytest.raises(RunFailed, match="node 0 .*its buffers were modified in place"):
        play(tmp_path, script, 1, task=NORMED)


@pytest.mark.parametrize(
    ("v", "said"),
    [
        (
            torch.zeros(FEATURES + 1),
            r"float32 of shape \(4,\); accepted: torch.float32 of shape \(3,\)",
        ),
        (torch.zeros(FEATURES, dtype=torch.float64), "got torch.float64"),
    ],
)
def test_only_a_float32_vector_of_the_right_length_is_accepted(
    tmp_path: Path, v: torch.Tensor, said: str
) -> None:
    async def script(node: Node) -> None:
        before = node.parameters
        with pytest.raises(ValueError, match=said):
            node.parameters = v
        with pytest.raises(ValueError, match=said):
            await node.apply(v)
        with pytest.raises(ValueError, match=said):
            await node.gradient(at=v)
        assert torch.equal(node.parameters, before)

    play(tmp_path, script, 1)


def test_read_and_write_without_an_await_between_is_atomic(tmp_path: Path) -> None:
    """Ten tasks add one a hundred times each: nothing is lost."""

    async def script(node: Node) -> Any:
        node.parameters = torch.zeros(FEATURES)

        async def adder() -> None:
            for _ in range(100):
                node.parameters = node.parameters + 1.0
                await node.sleep(0.01)

        for task in [node.spawn(adder()) for _ in range(10)]:
            await task
        return node.parameters

    assert play(tmp_path, script, 1).values[0].tolist() == [1000.0] * FEATURES


def test_assigning_a_model_copies_parameters_and_buffers(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        assert node.buffers.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0]  # mean, variance, batches
        assert node.model.parameters is node.parameters
        other = Model(torch.arange(7.0), torch.arange(5.0))
        node.model = other
        assert torch.equal(node.parameters, other.parameters)
        assert torch.equal(node.buffers, other.buffers)
        other.buffers.zero_()
        assert node.buffers.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        with pytest.raises(ValueError, match=r"node.buffers: .*accepted: torch.float32 of shape \(5,\)"):
            node.buffers = torch.zeros(4)

    played = play(tmp_path, script, 1, task=NORMED)
    assert (played.run.path / "models.safetensors").exists()


def test_training_updates_buffers_by_the_batch_norm_rule(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        await node.train(2)
        return node.buffers

    played = play(tmp_path, script, 1, task=NORMED)
    inputs = normed().train[0]
    mean, variance = torch.zeros(2), torch.ones(2)
    for _ in range(2):  # torch's momentum 0.1, unbiased variance
        mean = 0.9 * mean + 0.1 * inputs.mean(0)
        variance = 0.9 * variance + 0.1 * inputs.var(0)
    expected = torch.cat([mean, variance, torch.tensor([2.0])])
    torch.testing.assert_close(played.values[0], expected, rtol=1e-5, atol=1e-6)


def test_buffers_written_during_training_keep_write_and_update(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        training = node.spawn(node.train())
        await node.sleep(0.5)
        node.buffers = torch.full((5,), 100.0)
        await training
        return node.buffers

    got = play(tmp_path, script, 1, task=NORMED).values[0]
    inputs = normed().train[0]
    update = torch.cat([0.1 * inputs.mean(0), 0.1 * (inputs.var(0) - 1), torch.tensor([1.0])])
    torch.testing.assert_close(got, 100 + update, rtol=1e-5, atol=1e-5)


def test_whole_model_can_be_sent_and_mixed(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        other = 1 - node.rank
        node.model = Model(torch.full((7,), float(node.rank)), torch.full((5,), 10.0 * node.rank))
        node.send(other, node.model, "m")
        await node.mix(await node.gather([other], "m"), {other: 0.25})
        return node.model

    values = play(tmp_path, script, 2, task=NORMED).values
    assert values[0].parameters.tolist() == [0.25] * 7
    assert values[0].buffers.tolist() == [2.5] * 5
    assert values[1].parameters.tolist() == [0.75] * 7
    assert values[1].buffers.tolist() == [7.5] * 5


def test_layout_names_the_tensors_in_the_vector(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        assert [(field.name, field.start, field.shape) for field in node.layout] == [
            ("0.weight", 0, (2,)),
            ("0.bias", 2, (2,)),
            ("1.weight", 4, (1, 2)),
            ("1.bias", 6, (1,)),
        ]
        node.parameters = torch.arange(7.0)
        assert node.layout[2].of(node.parameters).tolist() == [[4.0, 5.0]]
        stacked = torch.stack([node.parameters, node.parameters + 10])
        assert node.layout[3].of(stacked).tolist() == [[6.0], [16.0]]

    play(tmp_path, script, 1, task=NORMED)


def test_node_knows_its_rank_size_samples_and_peers(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        assert node.label_counts is None
        assert node.lr == pytest.approx(0.1)
        return node.rank, node.size, node.samples, node.peers()

    values = play(tmp_path, script, 3).values
    assert values == {0: (0, 3, 8, (1, 2)), 1: (1, 3, 8, (0, 2)), 2: (2, 3, 8, (0, 1))}
    assert len(data(experiment(script, 3), 2)[1]) == 8


def test_label_counts_match_the_samples_of_the_node(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        assert node.label_counts is not None
        assert int(node.label_counts.sum()) == node.samples
        return node.label_counts

    task = {"name": "digits", "model": "logistic"}
    values = play(tmp_path, script, 2, task=task, partition={"name": "shards", "per_node": 2}).values
    assert (values[0] > 0).sum() < 10
    assert int((values[0] + values[1]).sum()) == 1437
