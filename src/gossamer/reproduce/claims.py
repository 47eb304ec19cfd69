"""The claims of a paper, as conditions on the cells of a sweep, and the verdicts on them.

A condition holds if the whole 95 % confidence interval of its number meets it, and does not hold if none of the interval
does. Otherwise, and where there is no interval, these runs do not decide it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from gossamer.config import Section
from gossamer.results.comparison import Measure, Number, at_budget, compare, finals, time_to, totals
from gossamer.results.groups import Group, find_baseline

Verdict = Literal["holds", "holds in part", "does not hold", "not decidable here"]

_NUMBER = r"([0-9.]+(?:e[+-]?[0-9]+)?)"


class Check(Section):
    """A condition on one number of a cell.

    Attributes:
        cell: the cell's name in progress lines and tables.
        baseline: the cell that it is compared with, in pairs of equal seeds.
        measure: a metric at the end; ``time_s`` or ``bytes`` of a run; ``time_s to METRIC=LEVEL``, ``bytes to METRIC=LEVEL``;
            ``METRIC at bytes=N`` or ``METRIC at time_s=SECONDS``.
        number: the mean over the seeds, or the ``difference`` to the baseline, or the ``ratio``.
        at_least, at_most: the bounds of the number, of which one is required."""

    cell: str
    measure: str
    number: Number = "mean"
    baseline: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    @field_validator("measure")
    @classmethod
    def _known(cls, measure: str) -> str:
        measure_of(measure)
        return measure

    @model_validator(mode="after")
    def _complete(self) -> Check:
        if self.at_least is None and self.at_most is None:
            raise ValueError("at_least, at_most, or both")
        if (self.number == "mean") != (self.baseline is None):
            raise ValueError("a baseline with number: difference or ratio, and only then")
        return self


def measure_of(text: str) -> Measure:
    """The measure by its name in a condition; ValueError for none."""
    if found := re.fullmatch(rf"(time_s|bytes) to (\w+)={_NUMBER}", text):
        axis, metric, level = found.groups()
        return next(each for each in time_to([(metric, float(level))]) if each.name.startswith(axis))
    if found := re.fullmatch(rf"(\w+) at (time_s|bytes)={_NUMBER}", text):
        metric, axis, budget = found.groups()
        return at_budget([(axis, float(budget))], [metric])[0]
    if not re.fullmatch(r"\w+", text):
        raise ValueError("METRIC, time_s, bytes, 'time_s to METRIC=LEVEL', or 'METRIC at bytes=N'")
    return next((each for each in totals() if each.name == text), finals([text])[0])


class Claim(Section):
    """A sentence of a paper, and the conditions that it stands for; ``small`` says whether a small size can decide them."""

    text: str
    small: bool = True
    checks: list[Check] = Field(min_length=1)


@dataclass(frozen=True)
class Finding:
    """The number of a condition with half the width of its interval, or None if it has none (of this number of ``runs``,
    ``known`` have one), and the verdict."""

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
        least = -math.inf if self.check.at_least is None else self.check.at_least
        most = math.inf if self.check.at_most is None else self.check.at_most
        if high < least or low > most:
            return "does not hold"
        return "holds" if least <= low and high <= most else "not decidable here"

    def __str__(self) -> str:
        check, measure = self.check, measure_of(self.check.measure)
        against = "" if check.baseline is None else f", {check.number} to {check.baseline}"
        bounds = {"≥": check.at_least, "≤": check.at_most}
        asked = " and ".join(
            f"{sign} {measure.text(bound, None, check.number)}"
            for sign, bound in bounds.items()
            if bound is not None
        )
        found = measure.text(self.value, self.half, check.number)
        if self.value is None:
            found += f" ({self.known} of {self.runs} runs of {check.cell} have it)"
        return f"{check.measure} of {check.cell}{against}: {found}; claimed: {asked}"


def find(claim: Claim, groups: Sequence[Group]) -> tuple[Verdict, list[Finding]]:
    """The verdict on a claim, and on each of its conditions, from the runs of the cells. A cell that does not exist is bad
    input."""
    found = [_find(check, groups) for check in claim.checks]
    return together(each.verdict for each in found), found


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim from those on its conditions."""
    found = set(verdicts)
    if len(found) == 1:
        return found.pop()
    # Of conditions that were left out there is no verdict.
    return "holds in part" if found >= {"holds", "does not hold"} else "not decidable here"


def _find(check: Check, groups: Sequence[Group]) -> Finding:
    own = next(iter(find_baseline(check.cell, groups).groups.values()))
    baseline = None if check.baseline is None else find_baseline(check.baseline, groups)
    row = compare(groups, [measure_of(check.measure)], baseline).rows.filter(group=own.label).to_dicts()[0]
    number = check.number
    return Finding(check, row[number], row[f"{number}_half"], row["known"], row["runs"])
