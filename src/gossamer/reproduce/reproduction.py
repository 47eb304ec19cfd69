"""A reproduction: a sweep file with a section about the paper's claims and the departures from its setting,
and its page in Markdown (``page.md``): claim, setting, result, verdict and cost, with the figure."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Literal

import polars as pl
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import Field, ValidationError

from gossamer.config import Section, as_name, examples
from gossamer.config.experiment import read_mapping
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput
from gossamer.reproduce.claims import Claim, Finding, Verdict, find
from gossamer.results.folder import write_text
from gossamer.results.formatting import bytes_text, seconds_text
from gossamer.results.plots import write_figures
from gossamer.sweep.sweep import Overrides, Sweep
from gossamer.sweep.table import compared, groups_of, results

Size = Literal["small", "full"]
_FOLDER = "reproductions"


class Figure(Section):
    """The figure of a reproduction: a metric of all cells over an axis."""

    metric: str = "test_accuracy"
    axis: Literal["round", "time_s", "bytes"] = "round"


class Reproduction(Section):
    """The section ``reproduction`` of a sweep file.

    Attributes:
        title: the title, one line.
        paper: authors, title, venue, figure.
        published: the published setting.
        departures: how the file differs from the published setting.
        small: changes to the sweep (``seeds``, ``cells``, ``grid``, or fields of all cells) for a check that
            takes at most ten minutes on two cores and needs no downloaded data.
        full: the changes for the published size.
        figure: the figure to draw.
        unit: what intervals are over: the seed, or an axis of the grid.
        claims: the paper's claims."""

    title: str
    paper: str
    published: str
    departures: list[str] = Field(default_factory=list)
    small: Overrides
    full: Overrides
    figure: Figure = Figure()
    unit: str = "seed"
    claims: list[Claim] = Field(min_length=1)


def names() -> list[str]:
    """The names of the reproductions included in gossamer, such as ``decentralizepy/figure5``."""
    return examples.names(_FOLDER, sweeps=True)


def load(
    path: str | Path, size: Size | None = None, overrides: Iterable[str] = (), out: str | Path = "runs"
) -> tuple[Reproduction, Sweep]:
    """The reproduction with a name or in a file, and its sweep in a size; None is the size in the file. Each
    size has its own folder.

    Raises:
        BadInput: for invalid content."""
    file = examples.located(path, _FOLDER, sweeps=True)
    raw = read_mapping(file, "a YAML sweep file", "a mapping with 'base' and 'reproduction'")
    if "reproduction" not in raw:
        raise BadInput(
            f"{path}: no section 'reproduction'; accepted: a file that has one, or {', '.join(names())}"
        )
    try:
        described = Reproduction.model_validate(raw.pop("reproduction"))
    except ValidationError as error:
        raise bad_input(error, Reproduction, "reproduction") from None
    if size == "small":
        for claim in described.claims:
            if not claim.small:
                claim.checks.clear()
        described.departures.append(
            f"These are the departures of the file itself; the small size changes {', '.join(described.small)} as well."
        )
    raw.setdefault("name", as_name(file.stem))
    if size is not None:
        changes = deepcopy(dict(getattr(described, size)))
        raw["name"] = f"{raw['name']}-{size}"
        raw |= {field: changes.pop(field) for field in ("seeds", "cells", "grid") if field in changes}
        raw["overrides"] = {**(raw.get("overrides") or {}), **changes}
    return described, Sweep.of(raw, file.resolve().parent, overrides, out)


# --- the page

_SETTING = [
    *("nodes", "task", "partition", "topology", "algorithm", "codec", "optimizer", "batch_size", "compute"),
    *("network", "stop"),
]
"""The fields of an experiment that the page shows, if they are the same in all cells."""

Verdicts = list[tuple[str, Verdict, list[Finding]]]
"""The text of each claim, the verdict on it, and its conditions."""


def write_page(described: Reproduction, sweep: Sweep) -> Verdicts:
    """Write ``reproduction.md`` and the figure, as PDF and PNG, into the sweep's folder, from the finished
    runs. Returns the verdicts."""
    groups = groups_of(sweep)
    verdicts = [(claim.text, *find(claim, groups, described.unit)) for claim in described.claims]
    figures, plot = [], described.figure
    if runs := [run for group in groups for run in group.samples]:
        for kind in ("pdf", "png"):
            figures = write_figures(
                runs,
                [group for group in groups if group.runs],
                sweep.folder / "figures",
                metrics=[plot.metric],
                axes=[plot.axis],
                format=kind,
            )
    dumps = [planned.experiment.model_dump(mode="json", exclude_none=True) for planned in sweep.planned]
    shared = {
        name: dumps[0][name]
        for name in _SETTING
        if name in dumps[0] and all(dump.get(name) == dumps[0][name] for dump in dumps)
    }
    done = results(sweep).filter(pl.col("status") == "done").unique("run")
    pages = Environment(
        loader=PackageLoader("gossamer.reproduce", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = pages.get_template("page.md").render(
        described=described,
        sweep=sweep,
        setting=yaml.safe_dump(shared, sort_keys=False, default_flow_style=None, width=120),
        verdicts=verdicts,
        comparison=compared(sweep, unit=described.unit),
        figures=[file.name for file in figures],
        done=len(done),
        planned=len({planned.run for planned in sweep.planned}),
        wall=seconds_text(float(done["wall_s"].sum())),
        time=seconds_text(float(done["time_s"].sum())),
        sent=bytes_text(float(done["bytes_sent"].sum())),
    )
    write_text(sweep.folder / "reproduction.md", page)
    return verdicts
