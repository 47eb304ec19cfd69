"""Runs as users get them: reading them, and what a run offers in a notebook."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections import Counter
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from gossamer import files
from gossamer.config import Experiment
from gossamer.errors import BadInput
from gossamer.results import reading
from gossamer.results.formatting import at_least, bytes_text, numerals
from gossamer.results.run_data import RunData, model_of
from gossamer.results.schema import SweepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import nn

    from gossamer.results.steps import Steps

log = logging.getLogger(__name__)

_MAX_LISTED = 20


class Run(RunData):
    """A recorded run. Its parts are read from disk on first use and then cached.

    Args:
        path: the folder ``<out>/<name>/<id>``.
        cell, labels: the name of its cell and the parts of the name, if it was read as part of a sweep.
        planned: the number of runs that the sweep plans for the cell.
    """

    @property
    def curves(self) -> pl.DataFrame:
        """Every metric over the nodes at every evaluation point, by rounds; see :func:`gossamer.results.tidy.curves`."""
        from gossamer.results.tidy import curves_of

        return curves_of(self)

    def steps(self, metric: str) -> Steps | None:
        """The mean of a metric over the nodes as a step function of time and bytes, with the table ``steps(metric).table``;
        see :mod:`gossamer.results.steps`. None for a metric without a place on the time axis: one without values, or one that
        describes the network at equal rounds, which the nodes reached at different times."""
        from gossamer.results.steps import steps_of

        return steps_of(self, metric)

    def module(self, rank: int | None = None) -> nn.Module:
        """A node's final model as a module in evaluation mode; None is the mean of the nodes' models. The
        task is loaded again to get the code, frozen parameters and constants, which are not part of the flat
        vectors. BadInput for a run without models, or a rank out of range."""
        from gossamer.learning.parameters import FlatModule, bare_module, with_maker
        from gossamer.tasks import load_task

        if self.parameters is None:
            raise BadInput(f"{self.path}: {self.status}, without models; accepted: a run that has ended")
        model = model_of(self._models, rank)
        experiment = Experiment.load(self.path / "experiment.yaml")
        task = load_task(experiment.task, experiment.data_root, experiment.seed)
        flat = FlatModule(bare_module(with_maker(task, experiment.seed)[0].model).eval())
        flat.load(model)
        for parameter in flat.module.parameters():
            parameter.data = (
                parameter.data.clone()
            )  # views of one vector can't be saved with safetensors' save_model
        return flat.module

    def plot(
        self, metric: str | None = None, ax: Axes | None = None, *, x: str = "round", label: str | None = None
    ) -> Axes:
        """Draw the mean of a metric over the nodes, with a band of one standard deviation, and return the
        axes.

        Args:
            metric: a column of :attr:`metrics`; None is the first of test accuracy, other test metrics, and losses.
            ax: the axes to draw into, such as those returned by the plot of another run; None creates a new
                pyplot figure.
            x: "round", "time_s", "wall_s" or "bytes".
            label: the line's name in the legend; None is the run's title.
        """
        from gossamer.results.plots import plot_run

        axes: Axes = plot_run(self, metric, ax, x, label or self.title)
        return axes

    @property
    def summary(self) -> dict[str, str]:
        """The results as text: name -> text, such as "test accuracy" -> "0.9306, std 0.0121 over 16 nodes"."""
        from gossamer.results.finals import final_summary
        from gossamer.results.tidy import ASYNCHRONY, rounds_on_record

        result, lines = final_summary(self), {}
        if self.status == "stopped":
            of = f" of {rounds}" if (rounds := self.experiment["stop"]["rounds"]) else ""
            lines["STOPPED"] = f"at round {result.rounds or 0}{of}; the figures are those recorded until then"
        elif self.outcome != "done":
            lines["status"] = self.outcome + (f": {self.error}" if self.error else "")
        for name, final in result.metrics.items():
            if name not in ASYNCHRONY and name not in self.class_columns:
                mean, std = numerals(final.mean, final.std)
                spread = f"std {std}" if final.count > 1 else ""
                texts = [mean, " ".join(filter(None, (spread, final.over))), final.before(result.rounds)]
                lines[name.replace("_", " ")] = ", ".join(filter(None, texts))
        on_record, rounds = rounds_on_record(self)
        if self.every_s is not None and on_record < rounds:
            lines["evaluated"] = f"{on_record:,} of {rounds:,} rounds on record"
        lines["virtual time" if self.virtual else "time"] = f"{result.time_s or 0:.4g} s"
        lines["wall time"] = f"{result.wall_s or 0:.1f} s"
        lines["sent"] = at_least(bytes_text(result.bytes_sent), exact=result.exact)
        if (private := self.figures.get("private_bytes")) is not None:
            mean_mib, max_mib = private["mean"] / 2**20, private["max"] / 2**20
            lines["private memory"] = f"{mean_mib:.1f} MiB per node, {max_mib:.1f} at most"
        lines["run"] = str(self.path)
        if self.status == "stopped":
            saved = any(self.path.glob("checkpoints/*/manifest.json"))
            without = "impossible without checkpoints (checkpoint.every_rounds saves some)"
            lines["to continue"] = f"gossamer resume {self.path}" if saved else without
        return lines

    def _repr_html_(self) -> str:
        """The summary and the chart of the main metric, for a notebook."""
        from gossamer.results.plots import curve_figure
        from gossamer.results.tidy import main_metric

        left = 'style="text-align: left"'
        rows = "".join(
            f"<tr><td {left}>{escape(name)}</td><td {left}>{escape(text)}</td></tr>"
            for name, text in self.summary.items()
        )
        table = f"<b>{escape(self.title)}</b>: {self.nodes} nodes<table>{rows}</table>"
        if (metric := main_metric(self)) is None:
            return table
        try:
            curve_figure([self], metric).savefig(picture := BytesIO(), format="png", dpi=72)
        except BadInput:  # without matplotlib
            return table
        data = b64encode(picture.getvalue()).decode()
        return f'{table}<img alt="{escape(metric)}" src="data:image/png;base64,{data}">'


def load_run(path: str | Path) -> Run:
    """Read a run, even while it runs or after it was killed.

    Args:
        path: its folder ``<out>/<name>/<id>``, or ``<out>/<name>`` or ``<out>`` if that holds one run.

    Raises:
        BadInput: for a path without a run, or with several runs, which the message lists. Use
            ``load_runs(path)[-1]`` for the newest run of a name.
    """
    path = Path(path)
    folders = sorted(_folders(path), key=lambda folder: folder.name)
    if len(folders) == 1:
        return Run(folders[0])
    if folders:
        names = ", ".join(str(folder.relative_to(path)) for folder in folders[-_MAX_LISTED:])
        raise BadInput(f"{path}: {len(folders)} runs; accepted: one of them, such as {names}")
    problem = "not a run: no experiment.yaml in it" if path.is_dir() else "no such folder"
    raise BadInput(f"{path}: {problem}; accepted: a run's folder <out>/<name>/<id>, or a folder of runs")


def load_runs(path: str | Path, *, unfinished: bool = False) -> list[Run]:
    """Read every run in a folder, which may be that of a run, of a sweep (only its finished runs are read),
    or of runs and sweeps. Runs of a name are sorted by their start.

    Args:
        path: the folder.
        unfinished: whether to read also the runs of a sweep that diverged, failed, were stopped or killed.

    Raises:
        BadInput: for a path without a run."""
    path = Path(path)
    if (path / "sweep.json").is_file():
        return _swept(path, unfinished=unfinished)
    sweeps = sorted(file.parent for file in path.glob("*/sweep.json"))
    runs = [Run(folder) for folder in sorted(_folders(path)) if not {*folder.parents} & {*sweeps}]
    swept = [run for sweep in sweeps for run in _swept(sweep, unfinished=unfinished, required=False)]
    return runs + swept or [load_run(path)]


def _folders(path: Path) -> list[Path]:
    """The folders of runs: this one, or those in it."""
    if (path / "experiment.yaml").is_file():
        return [path]
    return [file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/experiment.yaml")]


def _swept(folder: Path, *, unfinished: bool, required: bool = True) -> list[Run]:
    """The runs of a sweep, from its ``sweep.json``. BadInput if there are none, when ``required``."""
    path = folder / "sweep.json"
    entries = files.read_json(path, SweepRecord, folder, reading.MAX_FIGURES_BYTES)["runs"]
    done = sum(entry["status"] == "done" for entry in entries)
    planned = Counter(entry["cell"] for entry in entries)
    read = [entry for entry in entries if entry["folder"] and (unfinished or entry["status"] == "done")]
    runs = []
    for entry in read:
        run, cell = folder / str(entry["folder"]), entry["cell"]
        files.checked(run / "experiment.yaml", root=folder, accepted="a run")
        runs.append(Run(run, cell, dict(entry.get("labels") or {}), planned[cell]))
    if required and not runs:
        raise BadInput(f"{folder}: no run of the sweep is done; accepted: a sweep with runs that are")
    if done < len(entries) and not unfinished:
        log.info("%s: %d of %d runs are done; the others are left out", folder, done, len(entries))
    return runs
