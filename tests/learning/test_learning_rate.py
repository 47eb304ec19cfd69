from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer import BadInput, Experiment
from gossamer.config.registry import build, names
from gossamer.learning import SGD, LearningRateSchedule

LR, ROUNDS = 0.1, 12
LinearLR = torch.optim.lr_scheduler.LinearLR
CASES: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [
    ({"name": "constant"}, torch.optim.lr_scheduler.ConstantLR, {"factor": 1.0}),
    ({"name": "step", "every": 3}, torch.optim.lr_scheduler.StepLR, {"step_size": 3}),
    (
        {"name": "step", "every": 4, "factor": 0.5},
        torch.optim.lr_scheduler.StepLR,
        {"step_size": 4, "gamma": 0.5},
    ),
    (
        {"name": "multi-step", "milestones": [1, 5, 9], "factor": 0.3},
        torch.optim.lr_scheduler.MultiStepLR,
        {"milestones": [1, 5, 9], "gamma": 0.3},
    ),
    ({"name": "exponential", "factor": 0.9}, torch.optim.lr_scheduler.ExponentialLR, {"gamma": 0.9}),
    ({"name": "cosine", "rounds": ROUNDS}, torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": ROUNDS}),
    (
        {"name": "cosine", "rounds": ROUNDS, "minimum": 0.1},
        torch.optim.lr_scheduler.CosineAnnealingLR,
        {"T_max": ROUNDS, "eta_min": 0.1 * LR},
    ),
    (
        {"name": "linear", "rounds": 7},
        LinearLR,
        {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 7},
    ),
    (
        {"name": "linear", "start": 0.2, "end": 0.7, "rounds": 5},
        LinearLR,
        {"start_factor": 0.2, "end_factor": 0.7, "total_iters": 5},
    ),
]
IDS = [str(case[0]) for case in CASES]


def schedule(fields: dict[str, Any]) -> LearningRateSchedule:
    built = build("schedule", fields)
    assert isinstance(built, LearningRateSchedule)
    return built


def theirs(kind: Any, options: dict[str, Any], rounds: int = ROUNDS + 1) -> list[float]:
    """torch's learning rate in each epoch, starting from LR."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = kind(optimizer, **options)
    rates = []
    for _ in range(rounds):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("fields", "kind", "options"), CASES, ids=IDS)
def test_factors_match_torch(fields: dict[str, Any], kind: Any, options: dict[str, Any]) -> None:
    ours = [LR * schedule(fields).factor_at(round) for round in range(ROUNDS + 1)]
    assert ours == pytest.approx(theirs(kind, options), rel=1e-9, abs=1e-12)


def test_every_schedule_is_compared_to_torch() -> None:
    assert {case[0]["name"] for case in CASES} == set(names("schedule"))


@pytest.mark.parametrize("fields", [case[0] for case in CASES], ids=IDS)
def test_warmup_precedes_the_schedule(fields: dict[str, Any]) -> None:
    plain, warm = schedule(fields), schedule({**fields, "warmup_rounds": 4})
    rising = theirs(LinearLR, {"start_factor": 1 / 5, "total_iters": 4}, 4)
    first = plain.factor_at(0)
    assert [LR * warm.factor_at(r) for r in range(4)] == pytest.approx([first * rate for rate in rising])
    after = [warm.factor_at(4 + r) for r in range(ROUNDS)]
    assert after == [plain.factor_at(r) for r in range(ROUNDS)]


def test_schedule_keeps_its_last_value() -> None:
    for fields in ({"name": "cosine", "minimum": 0.25}, {"name": "linear", "end": 0.25}):
        factors = {schedule({**fields, "rounds": 5}).factor_at(round) for round in (5, 6, 8, 10**9)}
        assert factors == {0.25}
    far = schedule({"name": "exponential", "factor": 0.5}).factor_at(10**9)
    assert far == 0.0


def test_learning_rate_is_constant_without_a_schedule() -> None:
    assert [SGD(lr=0.3).lr_at(round) for round in (0, 1, 1000)] == [0.3] * 3


def test_schedule_is_part_of_the_experiment() -> None:
    scheduled = {"name": "sgd", "lr": LR, "schedule": {"name": "cosine", "rounds": 5, "warmup_rounds": 2}}
    raw = {"nodes": 4, "task": "digits", "algorithm": "d-psgd", "stop": {"rounds": 5}, "optimizer": scheduled}
    described = Experiment.of(raw)
    assert Experiment.parse(described.to_yaml()) == described
    spec = described.model_dump(mode="json")["optimizer"]["schedule"]
    assert spec == {"name": "cosine", "warmup_rounds": 2, "rounds": 5, "minimum": 0.0}
    changed = Experiment.parse(described.to_yaml(), ["optimizer.schedule.rounds=9"])
    assert changed.optimizer.schedule.rounds == 9
    plain = Experiment.parse(described.to_yaml(), ["optimizer.schedule=null"])
    assert plain.optimizer == SGD(lr=LR)


def test_custom_schedule_is_loaded_by_its_path() -> None:
    optimizer = build("optimizer", {"name": "sgd", "lr": 1.0, "schedule": {"name": f"{__name__}:Halving"}})
    assert isinstance(optimizer, SGD)
    assert [optimizer.lr_at(r) for r in range(3)] == [1.0, 0.5, 1 / 3]


class Halving(LearningRateSchedule):
    """1 / (1 + r)."""

    def factor_after_warmup(self, round: int) -> float:
        return 1 / (1 + round)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            "cosin",
            "optimizer.schedule: unknown name 'cosin' (did you mean 'cosine'?); accepted: constant, cosine, ",
        ),
        ({"name": "cosine"}, "optimizer.schedule.rounds: missing; a value is required"),
        (
            {"name": "exponential", "factor": 1.5},
            "optimizer.schedule.factor: got 1.5; accepted: less than or equal to 1",
        ),
        (
            {"name": "linear", "rounds": 3, "gamma": 1},
            "optimizer.schedule.gamma: unknown field; accepted: end, ",
        ),
        *(
            (
                {"name": "multi-step", "milestones": milestones},
                f"optimizer.schedule.milestones: got {milestones}; accepted: one or more rounds from 1 on, ascending",
            )
            for milestones in ([], [0, 3], [4, 2], [2, 2])
        ),
        (3, "optimizer.schedule: got 3; accepted: a name, or a mapping with 'name' and its parameters"),
    ],
)
def test_invalid_schedules_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(BadInput) as failure:
        build("optimizer", {"name": "sgd", "lr": 0.1, "schedule": fields})
    (problem,) = failure.value.problems
    assert problem.startswith(message)
