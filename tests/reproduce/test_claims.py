"""Verdicts on claims, against numbers and intervals computed independently here."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy import stats

from gossamer.errors import BadInput
from gossamer.reproduce import Claim, Condition, find
from gossamer.reproduce.claims import combined_verdict
from gossamer.results.groups import Group
from gossamer.results.run import Run
from synthetic_run import synthetic

RATES = {"slow": 0.01, "fast": 0.04}
SEEDS = 3


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    """Two cells of three seeds each; one cell learns faster."""
    groups = []
    for cell, rate in RATES.items():
        folder = tmp_path_factory.mktemp(cell)
        runs = [synthetic(folder, name=cell, seed=seed, rate=rate) for seed in range(1, SEEDS + 1)]
        groups.append(
            Group(cell, tuple(Run(run.path, cell, {"cell": cell}) for run in runs), {"cell": cell}, SEEDS)
        )
    return groups


def accuracies(group: Group) -> np.ndarray:
    """The final mean accuracy, by seed."""
    last = (pl.col("round") == 100) & (pl.col("node") >= 0)  # the average model is node -1
    ends = [run.metrics.filter(last)["test_accuracy"].mean() for run in group.runs]
    return np.array(ends)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The mean, and half of the 95 % interval of Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def verdict(groups: list[Group], **check: object) -> tuple[str, float | None, float | None]:
    """The verdict on one condition, with its number and interval."""
    claim = Claim.model_validate({"text": "a claim", "checks": [check]})
    combined, [finding] = find(claim, groups)
    assert combined == finding.verdict
    return finding.verdict, finding.value, finding.half


def test_difference_is_paired_by_seed_and_judged_by_interval(groups: list[Group]) -> None:
    slow, fast = map(accuracies, groups)
    mean, half = interval(fast - slow)
    assert half > 0
    condition = {"cell": "fast", "baseline": "slow", "measure": "test_accuracy", "number": "difference"}
    for bounds, expected in [
        ({"at_least": mean - 1.01 * half}, "holds"),
        ({"at_least": mean}, "not decidable here"),
        ({"at_least": mean + 1.01 * half}, "does not hold"),
        ({"at_most": mean + 1.01 * half}, "holds"),
        ({"at_most": mean - 1.01 * half}, "does not hold"),
        ({"at_least": mean - 2 * half, "at_most": mean + 2 * half}, "holds"),
        ({"at_least": mean - 2 * half, "at_most": mean}, "not decidable here"),
    ]:
        judged, value, half_width = verdict(groups, **condition, **bounds)
        assert (judged, value, half_width) == (expected, pytest.approx(mean), pytest.approx(half)), bounds


def test_verdicts_on_means_ratios_times_and_budgets(groups: list[Group]) -> None:
    slow, fast = map(accuracies, groups)
    mean, half = interval(slow)
    assert verdict(groups, cell="slow", measure="test_accuracy", at_most=1) == (
        "holds",
        pytest.approx(mean),
        pytest.approx(half),
    )
    judged, value, _ = verdict(
        groups, cell="fast", baseline="slow", measure="test_accuracy", number="ratio", at_least=1
    )
    assert (judged, value) == ("holds", pytest.approx(fast.mean() / slow.mean()))
    # All runs send the same number of bytes, so the interval is a point.
    assert verdict(
        groups, cell="fast", baseline="slow", measure="bytes", number="ratio", at_least=1, at_most=1
    )[:2] == ("holds", 1)
    judged, value, _ = verdict(groups, cell="fast", measure="bytes to test_accuracy=0.3", at_most=1e12)
    assert (judged, value is not None) == ("holds", True)
    judged, value, _ = verdict(groups, cell="fast", measure="test_accuracy at bytes=1e6", at_least=0)
    assert (judged, value is not None) == ("holds", True)


def test_missing_number_or_interval_is_not_decidable(groups: list[Group]) -> None:
    never = {"cell": "slow", "measure": "time_s to test_accuracy=0.999", "at_least": 0}
    assert verdict(groups, **never) == ("not decidable here", None, None)
    [finding] = find(Claim.model_validate({"text": "a claim", "checks": [never]}), groups)[1]
    assert str(finding).endswith("– (0 of 3 runs of slow reached it); claimed: ≥ 0 s")
    one = [Group(group.label, group.runs[:1], group.labels, 1) for group in groups]
    judged, value, half = verdict(one, cell="fast", measure="test_accuracy", at_least=0)
    assert (judged, half) == ("not decidable here", None)
    assert value is not None


def test_verdicts_of_several_conditions_are_combined() -> None:
    assert combined_verdict(["holds", "holds"]) == "holds"
    assert combined_verdict(["does not hold"]) == "does not hold"
    assert combined_verdict(["holds", "does not hold", "not decidable here"]) == "holds in part"
    assert combined_verdict(["holds", "not decidable here"]) == "not decidable here"


def test_unknown_cell_is_bad_input(groups: list[Group]) -> None:
    with pytest.raises(BadInput, match="fasd.*did you mean 'fast'|fasd.*fast"):
        verdict(groups, cell="fasd", measure="test_accuracy", at_least=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"at_least": None},
        {"more_than": 1},
        {"baseline": "slow"},
        {"number": "ratio"},
        {"measure": "time to 0.9"},
        {"bound": 3},
    ],
)
def test_inconsistent_condition_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="accept|at_least|baseline|METRIC|extra"):
        Condition.model_validate({"cell": "fast", "measure": "bytes", "at_least": 1, **changes})


def test_ambiguous_cell_is_bad_input(groups: list[Group]) -> None:
    twice = [
        Group(f"{group.label} {k}", group.runs, {"cell": group.label, "k": k}, SEEDS)
        for group in groups
        for k in (1, 2)
    ]
    with pytest.raises(BadInput, match="'fast' names 2 groups; accepted: one, such as fast 1, fast 2"):
        verdict(twice, cell="fast", measure="test_accuracy", at_least=0)


def tied(groups: list[Group]) -> list[Group]:
    """The slow cell under two names."""
    slow = groups[0]
    return [Group(name, slow.runs, {"cell": name}, SEEDS) for name in ("first", "second")]


def test_tie_is_at_least_but_not_more(groups: list[Group]) -> None:
    for number, equal in (("difference", 0.0), ("ratio", 1.0)):
        condition = {"cell": "second", "baseline": "first", "measure": "test_accuracy", "number": number}
        for bound, expected in [
            ("at_least", "holds"),
            ("at_most", "holds"),
            ("more_than", "does not hold"),
            ("less_than", "does not hold"),
        ]:
            assert verdict(tied(groups), **condition, **{bound: equal}) == (expected, equal, 0.0), bound


def test_strict_bound_is_judged_by_the_whole_interval(groups: list[Group]) -> None:
    slow, fast = map(accuracies, groups)
    mean, half = interval(fast - slow)
    condition = {"cell": "fast", "baseline": "slow", "measure": "test_accuracy", "number": "difference"}
    assert verdict(groups, **condition, more_than=0)[0] == "holds"
    assert verdict(groups, **condition, more_than=mean)[0] == "not decidable here"
    assert verdict(groups, **condition, less_than=mean - 1.01 * half)[0] == "does not hold"


def test_equivalence_names_margin_levels_and_rounds(groups: list[Group]) -> None:
    check = {"cell": "second", "baseline": "first", "measure": "test_accuracy", "number": "difference"}
    claim = Claim.model_validate(
        {"text": "a claim", "checks": [{**check, "at_least": -0.02, "at_most": 0.02}]}
    )
    [finding] = find(claim, tied(groups))[1]
    mean, half = interval(accuracies(groups[0]))
    level = f"{100 * mean:.1f} ± {100 * half:.2g} %"
    assert str(finding) == (
        f"test_accuracy of second, difference to first: 0 ± 0 points, at {level} and {level} after 100 rounds;"
        " claimed: within 2 points"
    )
