"""The page of a reproduction: claim, setting, result, verdict and cost, in Markdown (``page.md``), with its figure."""

from __future__ import annotations

import polars as pl
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from gossamer.reproduce.claims import Finding, Verdict, find
from gossamer.reproduce.reproduction import Reproduction
from gossamer.results.folder import write_text
from gossamer.results.formatting import bytes_text, seconds_text
from gossamer.results.plots import write_figures
from gossamer.sweep.sweep import Sweep
from gossamer.sweep.table import compared, groups_of, results

_SETTING = [
    *("nodes", "task", "partition", "topology", "algorithm", "codec", "optimizer", "batch_size", "compute"),
    *("network", "stop"),
]
"""The fields of an experiment that the page shows, as far as all cells have them in common."""

Verdicts = list[tuple[str, Verdict, list[Finding]]]
"""The text of each claim, the verdict on it, and its conditions."""


def write_page(described: Reproduction, sweep: Sweep) -> Verdicts:
    """Write ``reproduction.md`` and the figure, as PDF and PNG, into the sweep's folder, from the runs that are done; gives
    the verdicts."""
    groups = groups_of(sweep)
    verdicts = [(claim.text, *find(claim, groups)) for claim in described.claims]
    figures, asked = [], described.figure
    if runs := [run for group in groups for run in group.samples]:
        for kind in ("pdf", "png"):
            figures = write_figures(
                runs, groups, sweep.folder / "figures", metrics=[asked.metric], axes=[asked.axis], format=kind
            )
    dumps = [each.experiment.model_dump(mode="json", exclude_none=True) for each in sweep.planned]
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
        comparison=compared(sweep),
        figures=[file.name for file in figures],
        done=len(done),
        planned=len({each.run for each in sweep.planned}),
        wall=seconds_text(float(done["wall_s"].sum())),
        time=seconds_text(float(done["time_s"].sum())),
        sent=bytes_text(float(done["bytes_sent"].sum())),
    )
    write_text(sweep.folder / "reproduction.md", page)
    return verdicts
