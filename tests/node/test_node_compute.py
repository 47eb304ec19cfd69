"""Node: train, gradient, apply, evaluate, the learning rate and the optimizer's state."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer import Node, RunFailed
from gossamer.errors import BadInput
from gossamer.learning.batches import BatchStream
from gossamer.learning.parameters import initial_model
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import SequentialTrainer, TrainJob
from gossamer.randomness import torch_seed
from gossamer.runtime.setup import prepare
from scenario import FEATURES, LR, data, descend, experiment, play, slope, wide

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def trained(described: Any, rank: int, start: torch.Tensor, steps: int) -> torch.Tensor:
    """Parameters after steps of the sequential trainer on full batches, bit for bit."""
    setup = prepare(described)
    trainer = SequentialTrainer(setup.task, described.optimizer, Rows(FEATURES))
    batches = [torch.from_numpy(setup.parts[rank])] * steps
    model = initial_model(setup.task.model, 0)._replace(parameters=start)
    (result,) = trainer.train([TrainJob(model, batches, LR, {}, torch_seed(1, "train", rank, 0))])
    return result.model.parameters


def test_training_is_gradient_descent_and_takes_its_duration(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        loss = await node.train(3)
        return start, loss, node.parameters, node.now(), node.step

    described = experiment(script)
    for rank, (start, loss, after, now, step) in play(tmp_path, script).values.items():
        x, y = data(described, rank)
        np.testing.assert_allclose(wide(after), descend(x, y, start, 3), **CLOSE)
        losses = [np.mean((x @ descend(x, y, start, k) - y) ** 2) / 2 for k in range(3)]
        assert loss == pytest.approx(np.mean(losses), rel=1e-5)
        assert now == 3.0
        assert step == 3


def test_training_result_is_assigned_exactly_when_due(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        training = node.spawn(node.train(2))
        await node.sleep(1.999_999_999)
        assert node.parameters is start
        await node.sleep(0.000_000_001)
        assert not torch.equal(node.parameters, start)
        assert training.done() or node.now() == 2.0
        await training
        return start, node.parameters

    start, after = play(tmp_path, script, 1).values[0]
    assert torch.equal(after, trained(experiment(script, 1), 0, start, 2))


def test_training_update_is_added_to_a_write_made_meanwhile(
    tmp_path: Path,
) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        training = node.spawn(node.train(2))
        await node.sleep(0.5)
        node.parameters = torch.zeros(FEATURES)
        await training
        return start, node.parameters

    start, after = play(tmp_path, script, 1).values[0]
    assert torch.equal(after, trained(experiment(script, 1), 0, start, 2) - start)


def test_assigning_equal_values_during_training_counts_as_a_write(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.parameters = torch.tensor([1e6, -1e6, 3e5])  # so large that adding the update rounds differently
        start = node.parameters
        training = node.spawn(node.train(2))
        await node.sleep(0.5)
        node.parameters = start.clone()
        await training
        return start, node.parameters

    start, after = play(tmp_path, script, 1).values[0]
    result = trained(experiment(script, 1), 0, start, 2)
    assert torch.equal(after, start + (result - start))


def test_queued_trainings_start_from_the_snapshots_of_their_calls(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        first, second = node.spawn(node.train(2)), node.spawn(node.train(3))
        await first
        assert node.now() == 2.0
        between = node.parameters
        await second
        assert node.now() == 5.0
        return start, between, node.parameters

    start, between, after = play(tmp_path, script, 1).values[0]
    x, y = data(experiment(script, 1), 0)
    np.testing.assert_allclose(wide(between), descend(x, y, start, 2), **CLOSE)
    both = wide(between) + descend(x, y, start, 3) - wide(start)
    np.testing.assert_allclose(wide(after), both, **CLOSE)


def test_nodes_compute_concurrently(tmp_path: Path) -> None:
    async def script(node: Node) -> float:
        await node.train(1 + node.rank)
        await node.gradient()
        return node.now()

    assert play(tmp_path, script, 3).values == {0: 2.0, 1: 3.0, 2: 4.0}


def test_cancelled_training_is_discarded_and_the_next_starts_at_once(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        first, second = node.spawn(node.train(2)), node.spawn(node.train(3))
        await node.sleep(0.5)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert node.step == 5
        assert node.parameters is start
        await second
        assert node.now() == 3.5
        return start, node.parameters

    start, after = play(tmp_path, script, 1).values[0]
    # Nothing wrote the parameters since the second call: its result is assigned, not added.
    assert torch.equal(after, trained(experiment(script, 1), 0, start, 3))


def test_queued_training_can_be_cancelled_before_it_starts(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        tasks = [node.spawn(node.train()) for _ in range(3)]
        await node.sleep(0.5)
        tasks[1].cancel()
        await tasks[2]
        assert node.now() == 2.0
        assert node.step == 3
        return start, node.parameters

    start, after = play(tmp_path, script, 1).values[0]
    x, y = data(experiment(script, 1), 0)
    once = descend(x, y, start, 1) - wide(start)
    np.testing.assert_allclose(wide(after), wide(start) + 2 * once, **CLOSE)


def test_cancelled_training_still_advances_the_batch_counter(tmp_path: Path) -> None:
    """The batch after a cancelled training of two steps is batch 2; a number requests a batch explicitly."""

    async def script(node: Node) -> Any:
        training = node.spawn(node.train(2))
        await node.sleep(0.1)
        training.cancel()
        return node.parameters, await node.gradient(), node.step, await node.gradient(batch=0), node.step

    w, third, step, first, same_step = play(tmp_path, script, 1, batch_size=3).values[0]
    described = experiment(script, 1, batch_size=3)
    setup = prepare(described)
    inputs, targets = setup.task.train
    stream = BatchStream(described.seed, 0, setup.parts[0], 3)
    for number, got in ((2, third), (0, first)):
        batch = stream.batch(number)
        x, y = inputs[batch].double().numpy(), targets[batch, 0].double().numpy()
        np.testing.assert_allclose(wide(got), slope(x, y, w), **CLOSE)
    assert step == same_step == 3


def test_gradient_equals_its_closed_form(tmp_path: Path) -> None:
    at = torch.tensor([1.0, -2.0, 0.5])

    async def script(node: Node) -> Any:
        start = node.parameters
        here = await node.gradient(batch="full")
        there = await node.gradient(at=at, batch="full")
        some = await node.gradient(at=at, batch=[0, 2, 5])
        assert node.step == 0
        assert node.now() == 3.0
        assert node.parameters is start
        await node.gradient()
        assert node.step == 1
        return start, here, there, some

    described = experiment(script)
    for rank, (start, here, there, some) in play(tmp_path, script).values.items():
        x, y = data(described, rank)
        np.testing.assert_allclose(wide(here), slope(x, y, start), **CLOSE)
        np.testing.assert_allclose(wide(there), slope(x, y, at), **CLOSE)
        np.testing.assert_allclose(wide(some), slope(x[[0, 2, 5]], y[[0, 2, 5]], at), **CLOSE)


def test_gradient_is_taken_at_the_parameters_of_the_call(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        start, mine = node.parameters, torch.ones(FEATURES)
        here = node.spawn(node.gradient())
        there = node.spawn(node.gradient(at=mine))
        await node.sleep(0.1)
        node.parameters = torch.zeros(FEATURES)
        mine.zero_()
        return start, await here, await there

    start, here, there = play(tmp_path, script, 1).values[0]
    x, y = data(experiment(script, 1), 0)
    np.testing.assert_allclose(wide(here), slope(x, y, start), **CLOSE)
    np.testing.assert_allclose(wide(there), slope(x, y, np.ones(FEATURES)), **CLOSE)


MOMENTUM = {"name": "sgd", "lr": LR, "momentum": 0.9}


@pytest.mark.parametrize("reset", [False, True])
def test_apply_takes_no_time_and_shares_the_momentum_of_train(tmp_path: Path, reset: bool) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        await node.train()
        if reset:
            node.reset_optimizer()
        await node.apply(torch.ones(FEATURES))
        assert node.now() == 1.0
        assert node.step == 1
        await node.train()
        return start, node.parameters

    start, after = play(tmp_path, script, 1, optimizer=MOMENTUM).values[0]
    x, y = data(experiment(script, 1), 0)
    w, velocity = wide(start), np.zeros(FEATURES)
    velocity = slope(x, y, w)
    w = w - LR * velocity
    velocity = np.ones(FEATURES) if reset else 0.9 * velocity + 1
    w = w - LR * velocity
    velocity = 0.9 * velocity + slope(x, y, w)
    w = w - LR * velocity
    np.testing.assert_allclose(wide(after), w, **CLOSE)


def test_queued_trainings_pass_on_the_momentum(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        tasks = [node.spawn(node.train()), node.spawn(node.train())]
        for task in tasks:
            await task
        return start, node.parameters

    start, after = play(tmp_path, script, 1, optimizer=MOMENTUM).values[0]
    x, y = data(experiment(script, 1), 0)
    g = slope(x, y, start)  # both work from the same snapshot
    np.testing.assert_allclose(wide(after), wide(start) - LR * g - LR * (0.9 * g + g), **CLOSE)


def test_apply_uses_the_gradient_as_of_the_call(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        start, g = node.parameters, torch.ones(FEATURES)
        blocker = node.spawn(node.gradient())
        applying = node.spawn(node.apply(g))
        await node.sleep(0.5)
        g.zero_()
        await blocker
        await applying
        return start, node.parameters

    start, after = play(tmp_path, script, 1).values[0]
    torch.testing.assert_close(after, start - LR, rtol=0, atol=1e-6)


def test_step_uses_the_learning_rate_of_its_call(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        node.lr = 0.5
        training = node.spawn(node.train())
        await node.sleep(0.1)
        node.lr = 0.01
        await training
        middle = node.parameters
        await node.train()
        return start, middle, node.parameters

    start, middle, after = play(tmp_path, script, 1).values[0]
    x, y = data(experiment(script, 1), 0)
    np.testing.assert_allclose(wide(middle), descend(x, y, start, 1, 0.5), **CLOSE)
    np.testing.assert_allclose(wide(after), descend(x, y, middle, 1, 0.01), **CLOSE)


def test_evaluation_takes_a_third_of_the_training_time_per_sample(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        test = await node.evaluate()
        assert node.now() == pytest.approx(20 / 8 / 3)
        zero = await node.evaluate(torch.zeros(FEATURES))
        before = node.now()
        train = await node.evaluate(on="train")
        assert node.now() - before == pytest.approx(1 / 3)
        return node.parameters, test, zero, train

    w, test, zero, train = play(tmp_path, script, 1).values[0]
    described = experiment(script, 1)
    x, y = data(described, 0)
    inputs, targets = prepare(described).task.test
    residual = inputs.double().numpy() @ wide(w) - targets[:, 0].double().numpy()
    assert test["loss"] == pytest.approx(np.mean(residual**2) / 2, rel=1e-5)
    assert zero["loss"] == pytest.approx(np.mean(targets.double().numpy() ** 2) / 2, rel=1e-5)
    assert train["loss"] == pytest.approx(np.mean((x @ wide(w) - y) ** 2) / 2, rel=1e-5)


def test_evaluation_queues_behind_training(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        training = node.spawn(node.train(2))
        await node.sleep(0.5)
        await node.evaluate(on="train")
        assert training.done()
        assert node.now() == pytest.approx(2 + 1 / 3)

    play(tmp_path, script, 1)


def broken(node: Node) -> Any:
    return node.gradient(batch=[node.samples])


def test_error_in_a_computation_fails_its_node(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        async for _ in node.rounds():
            await node.train()
            if node.rank == 2 and node.round == 1:
                await broken(node)

    with pytest.raises(RunFailed, match="node 2 failed in round 1: IndexError") as failure:
        play(tmp_path, script, 3, stop={"rounds": 3})
    assert (failure.value.node, failure.value.round) == (2, 1)


@pytest.mark.parametrize("trainer", ["sequential", "batched", "auto"])
def test_every_trainer_gives_the_same_model(tmp_path: Path, trainer: str) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        await node.train(2)
        await node.gradient()
        return start, node.parameters

    engine = {"name": "simulate", "trainer": trainer}
    described = experiment(script, 3)
    for rank, (start, after) in play(tmp_path, script, 3, engine=engine).values.items():
        np.testing.assert_allclose(wide(after), descend(*data(described, rank), start, 2), **CLOSE)


class Dropping(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.5, training=self.training))


def dropping() -> Any:
    from gossamer import Task

    inputs = torch.ones(24, FEATURES)
    data = (inputs, inputs[:, :1])
    return Task(lambda: Dropping(FEATURES, 1), data, data, lambda a, b: ((a - b) ** 2).mean())


def test_auto_trainer_is_sequential_for_a_random_forward_pass(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        await node.train()

    engine = {"name": "simulate", "trainer": "auto"}
    recorded = play(tmp_path, script, 3, engine=engine, task=f"{__name__}:dropping").run
    assert recorded.experiment["engine"]["trainer"] == "sequential"


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("how", ["train", "apply"])
def test_optimizer_reset_survives_a_cancelled_step(tmp_path: Path, how: str, queued: bool) -> None:
    async def script(node: Node) -> Any:
        await node.train()
        node.reset_optimizer()
        before = node.parameters
        blocker = (
            node.spawn(node.gradient()) if queued or how == "apply" else None
        )  # a step by itself is due at once
        task = node.spawn(node.train() if how == "train" else node.apply(torch.ones(FEATURES)))  # type: ignore[arg-type]
        await node.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if blocker is not None:
            await blocker
        assert node.parameters is before
        await node.train()
        between = node.parameters
        await node.train()
        return before, between, node.parameters

    before, between, after = play(tmp_path, script, 1, optimizer=MOMENTUM).values[0]
    x, y = data(experiment(script, 1), 0)
    velocity = slope(x, y, before)  # the first step's velocity is gone
    np.testing.assert_allclose(wide(between), wide(before) - LR * velocity, **CLOSE)
    velocity = 0.9 * velocity + slope(x, y, between)  # and this step's continues
    np.testing.assert_allclose(wide(after), wide(between) - LR * velocity, **CLOSE)


class HalfFrozen(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, 1)
        self.bias.requires_grad_(False)


def half_frozen() -> Any:
    from gossamer import Task

    inputs = torch.ones(24, FEATURES)
    data = (inputs, inputs[:, :1])
    return Task(HalfFrozen, data, data, lambda a, b: ((a - b) ** 2).mean())


@pytest.mark.parametrize("trainer", ["sequential", "batched"])
def test_frozen_parameters_use_the_common_seed_and_are_in_no_vector(tmp_path: Path, trainer: str) -> None:
    async def script(node: Node) -> Any:
        start = node.parameters
        await node.train(3)
        await node.apply(torch.ones(FEATURES))
        assert len(await node.gradient()) == FEATURES
        assert [field.name for field in node.layout] == ["weight"]
        return start, node.parameters, (await node.evaluate())["loss"]

    decaying = {"name": "sgd", "lr": LR, "momentum": 0.9, "weight_decay": 0.5}
    engine = {"name": "simulate", "trainer": trainer}
    played = play(tmp_path, script, 2, engine=engine, optimizer=decaying, task=f"{__name__}:half_frozen")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(1, "initial"))
        bias = HalfFrozen()
    for start, after, loss in played.values.values():
        assert bool((after != start).all())
        assert loss == pytest.approx(float((after.sum() + bias.bias - 1) ** 2), rel=1e-5)


def test_duration_depends_on_when_the_computation_starts(tmp_path: Path) -> None:
    """The second step is requested at 0 s, but starts when the first is done, during the slowdown."""

    async def script(node: Node) -> list[float]:
        tasks = [node.spawn(node.train()) for _ in range(3)]
        ends = []
        for task in tasks:
            await task
            ends.append(node.now())
        return ends

    compute = {
        "name": "slowdowns",
        "base": {
            "name": "stragglers",
            "ranks": [1],
            "factor": 2,
            "base": {"name": "constant", "seconds_per_step": 1.0},
        },
        "windows": [{"from_s": 1, "to_s": 3, "factor": 4}],
    }
    played = play(tmp_path, script, nodes=2, compute=compute)
    assert played.values == {0: [1, 3.5, 4.5], 1: [1 + 2 + 0.5, 5.5, 7.5]}


def test_profile_of_the_wrong_size_is_refused_before_the_start(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        raise AssertionError("the run started")

    with pytest.raises(BadInput, match=r"compute\.factors: 3 values for 2 nodes"):
        play(tmp_path, script, nodes=2, compute={"name": "per-node", "factors": [1, 2, 3]})
