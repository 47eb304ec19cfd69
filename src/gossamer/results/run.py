"""Reading recorded runs, even while they run or after they were killed."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from jaxtyping import Float
from torch import Tensor

from gossamer import files
from gossamer.config import Experiment
from gossamer.config.experiment import parse_mapping
from gossamer.errors import BadInput
from gossamer.messages.tags import Model
from gossamer.results import recorder
from gossamer.results.folder import read_environment, read_status
from gossamer.results.formatting import at_least, bytes_text, numerals
from gossamer.results.schema import RecordedExperiment, SweepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import nn

    from gossamer.results.steps import Steps

log = logging.getLogger(__name__)

SHOWN = {
    "mixed": "those of the last mixing, and not of the models at the ends of rounds",
    "instant": "those of the models at the instants of evaluation, also in the middle of rounds",
}
"""What the rows show, unless they show the models at the ends of rounds (``evaluation.of``)."""
_PRESENCE_EVENTS = ("lost", "left", "leave", "joined", "returned", "found")
_MAX_LISTED = 20


@dataclass(frozen=True)
class Run:
    """A recorded run. Its parts are read from disk on first use and then cached.

    Args:
        path: the folder ``<out>/<name>/<id>``.
        cell, labels: the name of its cell and the parts of the name, if it was read as part of a sweep.
        planned: the number of runs that the sweep plans for the cell.
    """

    path: Path
    cell: str | None = None
    labels: Mapping[str, Any] = field(default_factory=dict, compare=False)
    planned: int = field(default=0, compare=False)

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """The resolved experiment."""
        path = self.path / "experiment.yaml"
        text = files.read_text(path, files.MAX_YAML_BYTES, self.path, "an experiment")
        return dict(files.conforming(parse_mapping(text, str(path)), RecordedExperiment, str(path)))

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, machine, command and start; empty if missing."""
        return read_environment(self.path)

    @cached_property
    def setup(self) -> dict[str, Any]:
        """Nodes, data and graphs as set up, with all graphs recorded since."""
        return recorder.read_setup(self.path)

    @cached_property
    def metrics(self) -> pl.DataFrame:
        """A row per node and evaluation, sorted by (round, node); node -1 is the network. The columns are described in
        :mod:`gossamer.results.recorder`. ``metrics.to_pandas()`` is the same for pandas."""
        return recorder.read_metrics(self.path)

    @cached_property
    def curves(self) -> pl.DataFrame:
        """Every metric over the nodes at every evaluation point, by rounds; see :func:`gossamer.results.tidy.curves`."""
        from gossamer.results.tidy import curves

        return curves(self)

    def steps(self, metric: str) -> Steps | None:
        """The mean of a metric over the nodes as a step function of time and bytes, with the table ``steps(metric).table``;
        see :mod:`gossamer.results.steps`. None for a metric without a place on the time axis: one without values, or one that
        describes the network at equal rounds, which the nodes reached at different times."""
        from gossamer.results.steps import Steps, timed

        if metric not in self._steps:
            known = metric in self.metrics.columns and timed(self, metric)
            self._steps[metric] = Steps(self, metric) if known else None
        return self._steps[metric]

    @cached_property
    def _steps(self) -> dict[str, Steps | None]:
        return {}

    @cached_property
    def events(self) -> pl.DataFrame:
        """Joins, leaves, faults, dropped frames, sorted by time."""
        return recorder.read_events(self.path)

    @cached_property
    def timeline(self) -> pl.DataFrame:
        """The intervals in which nodes computed and sent, sorted by (node, start); empty unless the
        experiment records a timeline."""
        return recorder.read_timeline(self.path)

    @property
    def parameters(self) -> Float[Tensor, "nodes params"] | None:
        """The nodes' flat parameter vectors at the end of the run; None before it."""
        return self._models.get("parameters")

    @property
    def buffers(self) -> Float[Tensor, "nodes buffers"] | None:
        """The nodes' buffers at the end of the run; None before it, and for a model without buffers."""
        return self._models.get("buffers")

    @cached_property
    def _models(self) -> dict[str, Tensor]:
        path = self.path / "models.safetensors"
        known = recorder.check_files(self.path, path.name)
        return files.read_tensors(path, self.path) if known or path.exists() else {}

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
        from gossamer.results.tidy import ASYNCHRONY, final_summary, rounds_on_record

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

    @property
    def poisoned(self) -> list[int]:
        """Ranks of the nodes whose training data is poisoned."""
        return sorted({rank for ranks in self.setup.get("poisoned", []) for rank in ranks})

    @property
    def chosen(self) -> dict[str, list[int]]:
        """The ranks of the nodes that the experiment's selectors have chosen, by the field that chooses them, such as
        ``poison.0.at``. In records of older versions, poisons alone."""
        older = enumerate(self.setup.get("poisoned", []))
        return {**{f"poison.{number}.at": ranks for number, ranks in older}, **self.setup.get("chosen", {})}

    @property
    def uses_topology(self) -> bool:
        """Whether the algorithm uses the topology; taken for granted if it has not declared what it mixes with."""
        return bool((self.setup.get("mixing") or {}).get("uses_topology", True))

    @property
    def mixing_text(self) -> str:
        """The graph and the weights with which the algorithm mixes; empty for a record of an older version."""
        algorithm, topology = (component_name(self.experiment.get(key)) for key in ("algorithm", "topology"))
        if "mixing" not in self.setup:
            return ""
        if (mixing := self.setup["mixing"]) is None:
            return f"{algorithm} does not declare whether it uses this graph"
        if not mixing["uses_topology"]:
            return f"{algorithm} does not use the topology {topology}; it mixes along: {mixing['graph']}"
        return f"graph: {mixing['graph']} · weights: {mixing['weights']}"

    @property
    def evaluation_samples(self) -> dict[str, str]:
        """Evaluation set -> the number of samples on which models were evaluated, such as "1,000 of 10,000
        samples"; empty if it was not recorded."""
        recorded = self.setup.get("evaluation_samples", {})
        return {
            name: f"{used:,} samples" if used == size else f"{used:,} of {size:,} samples"
            for name, (used, size) in recorded.items()
        }

    @property
    def class_columns(self) -> dict[str, str]:
        """The columns with the accuracies of single classes, and the names of these classes."""
        return dict(self.setup.get("class_columns", {}))

    @property
    def status(self) -> str:
        """``done``, ``diverged``, ``failed``, ``stopped``, or ``running or killed`` without a status."""
        return str(self.figures.get("status", "running or killed"))

    @property
    def outcome(self) -> str:
        """The status, and the numbers of nodes that were lost or left and have not come back."""
        lost, left = len(self.lost), len(self.away) - len(self.lost)
        texts = [self.status]
        texts += [
            f"{count} node{'s' * (count > 1)} {how}"
            for count, how in ((lost, "lost"), (left, "left"))
            if count
        ]
        return ", ".join(texts)

    @property
    def lost(self) -> list[int]:
        """Ranks of the nodes that died and have not come back."""
        return self._last_seen("lost")

    @property
    def away(self) -> list[int]:
        """Ranks of the nodes that are away at the end: lost, or left."""
        return self._last_seen("lost", "left", "leave")

    def _last_seen(self, *events: str) -> list[int]:
        last = (
            self.events.filter(pl.col("event").is_in(_PRESENCE_EVENTS))
            .drop_nulls("node")
            .group_by("node")
            .last()
        )
        return last.filter(pl.col("event").is_in(events))["node"].sort().to_list()

    @property
    def error(self) -> str | None:
        """The reason why the run failed or, if it diverged, which model is not finite and since when."""
        return self.figures.get("error")

    @property
    def wall_s(self) -> float | None:
        """Real seconds from start to end, or to the last row of a run that did not end."""
        return self.figures.get("wall_s", self.metrics["wall_s"].max())

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The figures of ``status.json``, if recorded: ``totals``, the engine's counts of rounds, bytes and messages
        (:class:`~gossamer.results.schema.Totals`); ``profile``, the seconds spent in each part of a
        simulation; ``peak_vectors``, the largest number of parameter vectors in it; ``private_bytes`` of a node's
        process, mean and max."""
        return read_status(self.path)

    @property
    def nodes(self) -> int:
        """Number of nodes, from the setup or from the metrics."""
        stated = self.setup.get("nodes", self.experiment.get("nodes"))
        return self.metrics.filter(pl.col("node") >= 0)["node"].n_unique() if stated is None else int(stated)

    @property
    def name(self) -> str:
        """The experiment's name."""
        return str(self.experiment.get("name") or self.path.parent.name)

    @property
    def title(self) -> str:
        """The experiment's name, with the status of a run that is not done."""
        return self.name if self.status == "done" else f"{self.name} ({self.status})"

    @property
    def virtual(self) -> bool:
        """Whether ``time_s`` is virtual, because the run was simulated."""
        engine = self.experiment.get("engine", "simulate")
        return component_name(engine) == "simulate"

    @cached_property
    def shown(self) -> str:
        """Which models the rows show: ``evaluation.of``. Older versions, whose records lack this field, showed the model of
        the "instant". This differs from "round" only in rows of a grid or an end."""
        of = str((self.experiment.get("evaluation") or {}).get("of", recorder.MEASURED_BEFORE))
        elsewhere = pl.col("moment").str.contains("tick|end").any()
        return "round" if of == "instant" and not self.metrics.select(elsewhere).item() else of

    @property
    def every_s(self) -> float | None:
        """The step of the time grid for evaluations; None without a grid."""
        return (self.experiment.get("evaluation") or {}).get("every_s")

    @property
    def id(self) -> str:
        """The folder's name."""
        return self.path.name


def component_name(spec: Any) -> str:
    """The name of a component in a recorded experiment."""
    return str(spec.get("name") if isinstance(spec, dict) else spec)


def model_of(models: Mapping[str, Tensor], rank: int | None, field: str = "rank") -> Model:
    """The model of a rank in "parameters" [nodes, P] and "buffers" [nodes, B] of a run or, for None, the mean
    of all finite models (those of lost nodes are NaN). BadInput, with ``field`` as its name, for a rank out
    of range."""
    parameters = models["parameters"]
    both = parameters, models.get("buffers", parameters[:, :0])
    if rank is None:
        known = parameters.isfinite().all(dim=1)
        if not known.any():
            raise BadInput(f"{field}: null, of a run without finite models; accepted: a rank")
        return Model(*(recorder.average(list(part[known])).float() for part in both))
    if not isinstance(rank, int) or not 0 <= rank < len(parameters):
        raise BadInput(f"{field}: {rank!r}; accepted: 0 to {len(parameters) - 1}")
    return Model(*(part[rank] for part in both))


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
    entries = files.read_json(path, SweepRecord, folder, recorder.MAX_FIGURES_BYTES)["runs"]
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
