"""The page of a reproduction: claim, setting, result, verdict and cost, in Markdown, with its figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
import yaml

from gossamer.reproduce.claims import Finding, Verdict, find
from gossamer.reproduce.reproduction import Reproduction
from gossamer.results.folder import write_text
from gossamer.results.formatting import Table, bytes_text, seconds_text
from gossamer.results.plots import write_figures
from gossamer.sweep.sweep import Sweep
from gossamer.sweep.table import compared, groups_of, results

_SETTING = [
    "nodes",
    "task",
    "partition",
    "topology",
    "algorithm",
    "codec",
    "optimizer",
    "batch_size",
    "compute",
]
_SETTING += ["network", "stop"]
"""The fields of an experiment that the page shows, as far as all cells have them in common."""

Verdicts = list[tuple[str, Verdict, list[Finding]]]
"""The text of each claim, the verdict on it, and its conditions."""


def write_page(described: Reproduction, sweep: Sweep) -> Verdicts:
    """Write ``reproduction.md`` and the figure, as PDF and PNG, into the sweep's folder, from the runs that are done; gives
    the verdicts."""
    groups = groups_of(sweep)
    verdicts = [(claim.text, *find(claim, groups)) for claim in described.claims]
    runs = [run for group in groups for run in group.samples]
    figures = []
    if runs:
        drawn: Any = {"metrics": [described.figure.metric], "axes": [described.figure.axis]}
        for kind in ("pdf", "png"):
            figures += write_figures(runs, groups, sweep.folder / "figures", format=kind, **drawn)
    shown = [f"![{described.title}](figures/{file.name})" for file in figures if file.suffix == ".png"]
    page = "\n\n".join(
        [*_head(described, sweep), *_verdicts(verdicts), *_results(sweep), *shown, _cost(sweep)]
    )
    write_text(sweep.folder / "reproduction.md", page + "\n")
    return verdicts


def _head(described: Reproduction, sweep: Sweep) -> Iterator[str]:
    yield f"# {described.title}"
    yield described.paper
    yield f"**Published setting.** {described.published}"
    dumps = [each.experiment.model_dump(mode="json", exclude_none=True) for each in sweep.planned]
    shared = {
        name: dumps[0][name]
        for name in _SETTING
        if all(dump.get(name) == dumps[0].get(name, 0) for dump in dumps)
    }
    settings = yaml.safe_dump(shared, sort_keys=False, default_flow_style=None, width=120)
    yield f"**This setting**, with the seeds {', '.join(map(str, sweep.seeds))}:\n\n```yaml\n{settings}```"
    if described.departures:
        yield "**Departures:**\n\n" + "\n".join(f"- {each}" for each in described.departures)


def _verdicts(verdicts: Verdicts) -> Iterator[str]:
    for text, verdict, found in verdicts:
        lines = [f"- {each}: {each.verdict}" for each in found]
        yield f"**Claimed:** {text}\n\n**Verdict:** {verdict}.\n\n" + "\n".join(lines)


def _results(sweep: Sweep) -> Iterator[str]:
    comparison = compared(sweep)
    yield from map(markdown, comparison.tables())
    yield comparison.note


def markdown(table: Table) -> str:
    """A table in Markdown, below its title."""
    title, head, lines = table
    rows: list[Sequence[str]] = [head, ["---"] * len(head), *lines]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cost(sweep: Sweep) -> str:
    done = results(sweep).filter(pl.col("status") == "done").unique("run")
    wall, time, sent = (float(done[name].sum()) for name in ("wall_s", "time_s", "bytes_sent"))
    planned = len({each.run for each in sweep.planned})
    return (
        f"**Cost:** {len(done)} of {planned} runs, {seconds_text(wall)} of wall time, {seconds_text(time)} of the nodes'"
        f" clock, {bytes_text(sent)} sent."
    )
