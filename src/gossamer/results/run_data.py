"""The data of a recorded run, read from its folder, even while it runs or after it was killed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
from jaxtyping import Float
from torch import Tensor

from gossamer import files
from gossamer.config.experiment import parse_mapping
from gossamer.errors import BadInput
from gossamer.messages.tags import Model
from gossamer.results import reading
from gossamer.results.consensus import average
from gossamer.results.folder import read_environment, read_status
from gossamer.results.schema import RecordedExperiment

SHOWN = {
    "mixed": "those of the last mixing, and not of the models at the ends of rounds",
    "instant": "those of the models at the instants of evaluation, also in the middle of rounds",
}
"""By ``evaluation.of``, the models that rows show if these are not the ones at the ends of rounds."""
_PRESENCE_EVENTS = ("lost", "left", "leave", "joined", "returned", "found")


@dataclass(frozen=True)
class RunData:
    """The data of a recorded run (:class:`gossamer.Run`). Its parts are read from disk on first use and then cached.

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
        return reading.read_setup(self.path)

    @cached_property
    def metrics(self) -> pl.DataFrame:
        """A row per node and evaluation, sorted by (round, node); node -1 is the network. The columns are described in
        :mod:`gossamer.results.reading`. ``metrics.to_pandas()`` is the same for pandas."""
        return reading.read_metrics(self.path)

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """Values that were computed from the data, by name, so that each is computed once."""
        return {}

    @cached_property
    def events(self) -> pl.DataFrame:
        """Joins, leaves, faults, dropped frames, sorted by time."""
        return reading.read_events(self.path)

    @cached_property
    def timeline(self) -> pl.DataFrame:
        """The intervals in which nodes computed and sent, sorted by (node, start); empty unless the
        experiment records a timeline."""
        return reading.read_timeline(self.path)

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
        known = reading.check_files(self.path, path.name)
        return files.read_tensors(path, self.path) if known or path.exists() else {}

    @property
    def poisoned(self) -> list[int]:
        """Ranks of the nodes whose training data is poisoned."""
        return sorted({rank for ranks in self.setup.get("poisoned", []) for rank in ranks})

    @property
    def chosen(self) -> dict[str, list[int]]:
        """The ranks of the nodes that the experiment's selectors have chosen, by the field that chooses them, such as
        ``poison.0.at``. Records of older versions have only those of poisons."""
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
        of = str((self.experiment.get("evaluation") or {}).get("of", reading.MEASURED_BEFORE))
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
        return Model(*(average(list(part[known])).float() for part in both))
    if not isinstance(rank, int) or not 0 <= rank < len(parameters):
        raise BadInput(f"{field}: {rank!r}; accepted: 0 to {len(parameters) - 1}")
    return Model(*(part[rank] for part in both))
