"""The claims of a paper as conditions on the cells of a sweep, and the verdicts on them.

A condition holds if the whole 95 % confidence interval of its number meets it, and does not hold if no part
of the interval does. Otherwise, or without an interval, these runs do not decide it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from gossamer.config import Section
from gossamer.errors import BadInput
from gossamer.results.comparison import Number, compare, measure
from gossamer.results.groups import Group, find_baseline

Verdict = Literal["holds", "holds in part", "does not hold", "not decidable here"]


class Check(Section):
    """A condition on one number of a cell.

    Attributes:
        cell: the cell's name in progress lines and tables.
        baseline: the cell with which it is compared, in pairs of equal seeds.
        measure: see :func:`gossamer.results.comparison.measure`.
        number: the mean over the seeds, or the ``difference`` from the baseline, or the ``ratio`` to it.
        at_least, at_most: the bounds of the number. At least one is required."""

    cell: str
    measure: str
    number: Number = "mean"
    baseline: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    @field_validator("measure")
    @classmethod
    def _known(cls, text: str) -> str:
        measure(text)
        return text

    @model_validator(mode="after")
    def _complete(self) -> Check:
        if self.at_least is None and self.at_most is None:
            raise ValueError("at_least, at_most, or both")
        if (self.number == "mean") != (self.baseline is None):
            raise ValueError("a baseline with number: difference or ratio, and only then")
        return self


class Claim(Section):
    """A sentence of a paper, and the conditions that express it. ``small`` tells whether the small size can
    decide them."""

    text: str
    small: bool = True
    checks: list[Check] = Field(min_length=1)


@dataclass(frozen=True)
class Finding:
    """The number of a condition with half the width of its interval, or None if it has none (``known`` of the
    ``runs`` have one), and the verdict."""

    check: Check
    value: float | None
    half: float | None
    known: int
    runs: int

    @property
    def verdict(self) -> Verdict:
        """The verdict on the condition."""
        if self.value is None or self.half is None:
            return "not decidable here"
        low, high = self.value - self.half, self.value + self.half
        lower = -math.inf if self.check.at_least is None else self.check.at_least
        upper = math.inf if self.check.at_most is None else self.check.at_most
        if high < lower or low > upper:
            return "does not hold"
        return "holds" if lower <= low and high <= upper else "not decidable here"

    def __str__(self) -> str:
        check, quantity = self.check, measure(self.check.measure)
        against = "" if check.baseline is None else f", {check.number} to {check.baseline}"
        bounds = {"≥": check.at_least, "≤": check.at_most}
        claimed = " and ".join(
            f"{sign} {quantity.text(bound, None, check.number)}"
            for sign, bound in bounds.items()
            if bound is not None
        )
        result = quantity.text(self.value, self.half, check.number)
        if self.value is None:
            result += f" ({self.known} of {self.runs} runs of {check.cell} have it)"
        return f"{check.measure} of {check.cell}{against}: {result}; claimed: {claimed}"


def find(claim: Claim, groups: Sequence[Group]) -> tuple[Verdict, list[Finding]]:
    """The verdict on a claim and on each of its conditions, from the runs of the cells. BadInput for a cell
    that does not exist."""
    findings = [_find(check, groups) for check in claim.checks]
    return combined_verdict(finding.verdict for finding in findings), findings


def combined_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim from those on its conditions."""
    distinct = set(verdicts)
    if len(distinct) == 1:
        return distinct.pop()
    # Conditions that were left out have no verdict.
    return "holds in part" if distinct >= {"holds", "does not hold"} else "not decidable here"


def _find(check: Check, groups: Sequence[Group]) -> Finding:
    group, *others = dict.fromkeys(find_baseline(check.cell, groups).groups.values())
    if others:
        labels = ", ".join(match.label for match in (group, *others))
        raise BadInput(
            f"reproduction: {check.cell!r} names {len(others) + 1} groups; accepted: one, such as {labels}"
        )
    baseline = None if check.baseline is None else find_baseline(check.baseline, groups)
    row = compare(groups, [measure(check.measure)], baseline).rows.filter(group=group.label).to_dicts()[0]
    number = check.number
    return Finding(check, row[number], row[f"{number}_half"], row["known"], row["runs"])
