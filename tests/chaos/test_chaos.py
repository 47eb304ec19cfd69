"""A few schedules of each kind, and injected bugs that the harness must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos import real, simulated
from chaos.schedule import Schedule, draw
from gossamer.node.shown import ShownModel
from gossamer.runtime.recording import RunRecord
from gossamer.runtime.simulate import presence
from gossamer.runtime.simulate.links import Links
from gossamer.runtime.simulate.replay import Replay
from gossamer.topology import TopologySchedule

pytestmark = [pytest.mark.usefixtures("shapes_unchecked"), pytest.mark.timeout(300)]

ENOUGH = 300
"""The number of schedules within which a bug must be found."""


@pytest.mark.parametrize(
    "first",
    [
        0,
        pytest.param(50, marks=pytest.mark.slow),
        pytest.param(100, marks=pytest.mark.slow),
        pytest.param(150, marks=pytest.mark.slow),
    ],
)
def test_simulated_schedules_violate_no_invariant(tmp_path: Path, first: int) -> None:
    checked = {seed: simulated.check(draw(seed), tmp_path / str(seed)) for seed in range(first, first + 50)}
    assert {seed: lines for seed, lines in checked.items() if lines} == {}


@pytest.mark.parametrize(
    "seed",
    [290, 999, 1915, 2993],
    ids=[
        "a node that is shown with its checkpoint's earlier round",
        "a node that is called back while it ends its last round",
        "nodes that go on in another order after the run was resumed",
        "a node that is called back while it leaves",
    ],
)
def test_fixed_violations_do_not_return(tmp_path: Path, seed: int) -> None:
    assert simulated.check(draw(seed), tmp_path / "run") == []


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, id="cut connections"),
        pytest.param(21, id="a crash and strangers"),
        pytest.param(23, id="replayed connections"),
        pytest.param(31, id="all is killed and resumed"),
    ],
)
@pytest.mark.usefixtures("no_process_is_left")
def test_real_schedules_violate_no_invariant(tmp_path: Path, seed: int) -> None:
    assert real.check(draw(seed), tmp_path / "run") == []


def test_schedule_is_a_function_of_its_seed() -> None:
    for seed in range(20):
        schedule = draw(seed)
        assert schedule == draw(seed)
        described = yaml.safe_load(str(schedule))
        assert Schedule.__dataclass_fields__.keys() >= described.keys() >= {"name", "fields"}
        assert described["fields"] == yaml.safe_load(yaml.safe_dump(schedule.fields))
    assert len({str(draw(seed)) for seed in range(200)}) == 200


Mutant = Callable[[Any], Callable[..., Any]]
MUTANTS: dict[str, tuple[Any, str, Mutant, str, int]] = {}


def mutant(target: Any, method: str, found_as: str, first: int = 0) -> Callable[[Mutant], Mutant]:
    """Register a bug: the replacement of a method, made from the original; the prefix of its violation; and the first
    seed that is tried (one that finds it, so that the test takes a second)."""

    def add(make: Mutant) -> Mutant:
        MUTANTS[make.__name__] = target, method, make, found_as, first
        return make

    return add


@mutant(RunRecord, "row", "rows_once_and_in_order")
def a_row_twice(original: Any) -> Any:
    def row(self: Any, moment: Any, row: dict[str, Any], *others: Any) -> None:
        for _ in range(1 + (row["node"] == 1 and moment == 2)):
            original(self, moment, dict(row), *others)

    return row


@mutant(RunRecord, "row", "rows_once_and_in_order")
def no_row(original: Any) -> Any:
    def row(self: Any, moment: Any, row: dict[str, Any], *others: Any) -> None:
        if (row["node"], moment) != (1, 2):
            original(self, moment, row, *others)

    return row


@mutant(Links, "_left", "messages_add_up", 69)
def a_lost_message_counts_as_received(original: Any) -> Any:
    def left(self: Any, transfer: Any) -> None:
        original(self, transfer)
        if transfer.lost:
            self._messages_received[transfer.to] += 1

    return left


@mutant(Links, "_arrived", "messages_add_up")
def a_message_arrives_twice(original: Any) -> Any:
    def arrived(self: Any, message: Any, to: Any, size: int) -> None:
        for _ in range(1 + (message.source == 1)):
            original(self, message, to, size)

    return arrived


@mutant(Links, "_arrived", "")
def a_message_vanishes(original: Any) -> Any:
    def arrived(self: Any, message: Any, to: Any, size: int) -> None:
        if message.source != 1 or message.sent_at < 0.15:
            original(self, message, to, size)

    return arrived


@mutant(TopologySchedule, "mixing_weights", "models_stay_sums", 50)
def a_weight_is_off_by_one_per_cent(original: Any) -> Any:
    def mixing_weights(self: Any, rank: int, round: int, layer: str | None = None) -> dict[int, float]:
        weights = original(self, rank, round, layer)
        return {other: weight * (1.01 if rank == 0 else 1.0) for other, weight in weights.items()}

    return mixing_weights


@mutant(presence, "first_round", "rows_once_and_in_order", 25)
def a_node_that_returns_repeats_a_round(original: Any) -> Any:
    return lambda in_round, least: max(least - 2, 0)


@mutant(ShownModel, "restore", "rows_show_the_last_model", 290)
def a_checkpoint_is_shown_as_a_new_model(original: Any) -> Any:
    return lambda self, saved: None


@mutant(ShownModel, "now", "rows_show_the_last_model")
def the_middle_of_a_round_is_shown(original: Any) -> Any:
    return lambda self: self.instant()


@mutant(Replay, "delivered", "two runs have other models", 210)
def messages_under_way_are_not_restored(original: Any) -> Any:
    return lambda self, message, to: message


@pytest.mark.parametrize("name", MUTANTS)
def test_injected_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target, method, make, found_as, first = MUTANTS[name]
    monkeypatch.setattr(target, method, make(getattr(target, method)))
    for seed in range(first, first + ENOUGH):
        if any(line.startswith(found_as) for line in simulated.check(draw(seed), tmp_path / str(seed))):
            return
    pytest.fail(f"none of {ENOUGH} schedules finds it")
