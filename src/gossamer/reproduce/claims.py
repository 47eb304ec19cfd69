"""The claims of a paper as conditions on the cells of a sweep, and the verdicts on them.

A condition holds if the whole 95 % confidence interval of its number meets it, and does not hold if no part
of the interval does. Otherwise, or without an interval, these runs do not decide it. "At least" includes
equality, "more than" does not: of two cells that are equal in every run, neither has more than the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from gossamer.config import Section
from gossamer.errors import BadInput
from gossamer.results.comparison import Number, compare, quantity
from gossamer.results.finals import final_summary
from gossamer.results.groups import Group, find_baseline

Verdict = Literal["holds", "holds in part", "does not hold", "not decidable here"]


class Condition(Section):
    """A condition on one number of a cell.

    Attributes:
        cell: the cell's name in progress lines and tables.
        baseline: the cell with which it is compared, in pairs of equal seeds.
        measure: see :func:`gossamer.results.comparison.quantity`.
        number: the mean over the seeds, or the ``difference`` from the baseline, or the ``ratio`` to it.
        at_least, at_most, more_than, less_than: the bounds of the number, one or two of them. The last two are
            strict."""

    cell: str
    measure: str
    number: Number = "mean"
    baseline: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    more_than: float | None = None
    less_than: float | None = None

    @field_validator("measure")
    @classmethod
    def _known(cls, text: str) -> str:
        quantity(text)
        return text

    @model_validator(mode="after")
    def _complete(self) -> Condition:
        lower, upper = (self.at_least, self.more_than), (self.at_most, self.less_than)
        if (*lower, *upper) == (None,) * 4 or None not in lower or None not in upper:
            raise ValueError("at_least or more_than, at_most or less_than, or one of each")
        if (self.number == "mean") != (self.baseline is None):
            raise ValueError("a baseline with number: difference or ratio, and only then")
        return self

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds, by sign."""
        signs = {"≥": self.at_least, ">": self.more_than, "≤": self.at_most, "<": self.less_than}
        return {sign: bound for sign, bound in signs.items() if bound is not None}

    @property
    def margin(self) -> float | None:
        """The margin of an equivalence: a difference between a bound and its opposite."""
        lower = self.more_than if self.at_least is None else self.at_least
        upper = self.less_than if self.at_most is None else self.at_most
        return upper if self.number == "difference" and upper is not None and lower == -upper else None


class Claim(Section):
    """A sentence of a paper, and the conditions that express it. ``small`` tells whether the small size can
    decide them."""

    text: str
    small: bool = True
    checks: list[Condition] = Field(min_length=1)


@dataclass(frozen=True)
class Finding:
    """The number of a condition with half the width of its interval, or None if it has none (``known`` of the
    ``runs`` have one, ``diverged`` of them diverged), and the verdict. ``levels`` are the means of the cell and
    of its baseline, with half the widths of their intervals, and ``rounds`` the largest number of rounds of
    their runs."""

    check: Condition
    value: float | None
    half: float | None
    known: int
    runs: int
    diverged: int = 0
    levels: tuple[tuple[float | None, float | None], ...] = ()
    rounds: int | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict on the condition."""
        if self.value is None or self.half is None:
            return "not decidable here"
        low, high = self.value - self.half, self.value + self.half
        meets = {
            "≥": lambda end, bound: end >= bound,
            ">": lambda end, bound: end > bound,
            "≤": lambda end, bound: end <= bound,
            "<": lambda end, bound: end < bound,
        }
        met = [
            (meets[sign](low, bound), meets[sign](high, bound)) for sign, bound in self.check.bounds.items()
        ]
        if any(not at_low and not at_high for at_low, at_high in met):
            return "does not hold"
        return "holds" if all(at_low and at_high for at_low, at_high in met) else "not decidable here"

    def __str__(self) -> str:
        check, compared = self.check, quantity(self.check.measure)
        against = "" if check.baseline is None else f", {check.number} to {check.baseline}"
        claimed = " and ".join(
            f"{sign} {compared.text(bound, None, check.number)}" for sign, bound in check.bounds.items()
        )
        result = compared.text(self.value, self.half, check.number)
        if self.diverged:
            result += f" ({self.diverged} of {self.runs} runs of {check.cell} diverged)"
        elif self.value is None:
            result += f" ({self.known} of {self.runs} runs of {check.cell} {compared.having})"
        if (margin := check.margin) is not None:
            claimed = f"within {compared.text(margin, None, check.number).removeprefix('+')}"
            # A small difference means little where both are low, or have hardly begun to learn.
            levels = [compared.text(*level) for level in self.levels if level[0] is not None]
            after = "" if self.rounds is None else f" after {self.rounds:,} rounds"
            result += f", at {' and '.join(levels)}{after}" if levels else ""
        return f"{check.measure} of {check.cell}{against}: {result}; claimed: {claimed}"


def find(claim: Claim, groups: Sequence[Group], unit: str = "seed") -> tuple[Verdict, list[Finding]]:
    """The verdict on a claim and on each of its conditions, from the runs of the cells. ``unit`` is as in
    :func:`~gossamer.results.comparison.compare`. BadInput for a cell that does not exist."""
    findings = [_find(check, groups, unit) for check in claim.checks]
    return combined_verdict(finding.verdict for finding in findings), findings


def combined_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim from those on its conditions."""
    distinct = set(verdicts)
    if len(distinct) == 1:
        return distinct.pop()
    # Conditions that were left out have no verdict.
    return "holds in part" if distinct >= {"holds", "does not hold"} else "not decidable here"


def _find(check: Condition, groups: Sequence[Group], unit: str) -> Finding:
    baseline = None if check.baseline is None else find_baseline(check.baseline, groups)
    cells = [_cell(name, groups, unit) for name in (check.cell, check.baseline) if name is not None]
    table = compare(groups, [quantity(check.measure)], baseline, unit=unit).rows
    rows = [table.filter(group=label).row(0, named=True) for label, _ in cells]
    runs = [run for _, members in cells for group in members for run in group.samples]
    row, number = rows[0], check.number
    return Finding(
        check,
        row[number],
        row[f"{number}_half"],
        row["known"],
        row["runs"],
        row["diverged"],
        tuple((row["mean"], row["mean_half"]) for row in rows),
        max((last for run in runs if (last := final_summary(run).rounds) is not None), default=None),
    )


def _cell(name: str, groups: Sequence[Group], unit: str) -> tuple[str, Sequence[Group]]:
    """The label of a cell's row, and its groups: one, unless an axis is the unit."""
    members = [*dict.fromkeys(find_baseline(name, groups).groups.values())]
    if unit != "seed":
        return name, members
    if len(members) > 1:
        labels = ", ".join(match.label for match in members)
        raise BadInput(f"reproduction: {name!r} names {len(members)} groups; accepted: one, such as {labels}")
    return members[0].label, members
