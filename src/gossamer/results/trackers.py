"""Trackers: services to which a run reports its progress, from the process that started it. A tracker never
stops a run: if it raises, the failure is reported in one line, and the tracker is dropped."""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import PrivateAttr

from gossamer.config import Experiment
from gossamer.config.registry import Component, FilePath, register
from gossamer.errors import BadInput, cause
from gossamer.files import read_json
from gossamer.results.evaluations import Evaluations
from gossamer.results.formatting import flat
from gossamer.results.observer import Observer
from gossamer.results.reading import MAX_FIGURES_BYTES
from gossamer.results.run import Run
from gossamer.results.schema import SweepRecord

_MAX_PARAMETERS = 100  # in one request to MLflow
_LONGEST_TAG = 64  # limit of Weights & Biases
_PLACE = ("time_s", "wall_s", "network_bytes")
"""The columns that place an evaluation on other axes than the round by which trackers count."""
log = logging.getLogger(__name__)


class Tracker(Component):
    """Base class of components of kind ``tracker``. A subclass overrides the methods for the events that it
    needs. Every run gets a copy, which keeps its state in private attributes (``_client: Any = PrivateAttr(None)``)."""

    _has_state: ClassVar[bool] = True
    _state_goes_to: ClassVar[str] = "private attributes, such as _client: Any = PrivateAttr(None)"

    def check(self) -> None:
        """Called before any work starts. Raises BadInput if the tracker can't be used, e.g. because a package
        is missing."""

    def begin(self, experiment: Experiment, folder: Path) -> None:
        """The run starts or resumes; it is recorded in this folder."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A row was recorded; columns as in ``metrics.parquet``, where node -1 is the network."""

    def end(self, run: Run) -> None:
        """The run has ended cleanly; its status says whether it was stopped."""

    def failure(self, error: BaseException) -> None:
        """The run has failed."""


class Trackers(Observer):
    """The trackers of one run, without those that have failed, and the run's observer, which gets the same
    rows. BadInput for a tracker that can't be used."""

    def __init__(self, trackers: Sequence[Tracker], observer: Observer) -> None:
        for tracker in trackers:
            tracker.check()
        self._active, self._observer = [tracker.model_copy(deep=True) for tracker in trackers], observer

    def start(self, description: Mapping[str, Any]) -> None:
        self._observer.start(description)

    def progress(self, rounds: int, time_s: float) -> None:
        self._observer.progress(rounds, time_s)
        self.stopping = self._observer.stopping

    def say(self, text: str) -> None:
        self._observer.say(text)

    def row(self, row: Mapping[str, Any]) -> None:
        self._observer.row(row)
        self.tell("row", row)

    def tell(self, event: Literal["begin", "row", "end", "failure"], *arguments: Any) -> None:
        """Call this method of every tracker, and drop those that raise. A tracker that raises for a row is
        notified of its failure."""
        for tracker in list(self._active):
            try:
                getattr(tracker, event)(*arguments)
            except Exception as error:  # noqa: BLE001 - the tracker's own, of any kind; the run goes on
                self._active.remove(tracker)
                log.warning("tracker %r failed and is dropped: %s", tracker.name_of(), cause(error))
                if event == "row":
                    with suppress(Exception):
                        tracker.failure(error)


class Averaging(Tracker):
    """Base class of the built-in trackers. At each evaluation point, they report the means over the nodes and
    the network's own values, with the time at which the last node got there and the bytes sent by then."""

    package: ClassVar[str]  # also the name of gossamer's extra
    _evaluations: Evaluations = PrivateAttr(default_factory=Evaluations)

    def check(self) -> None:
        if find_spec(self.package) is None:
            raise BadInput(
                f"trackers: {self.name_of()!r} needs the package {self.package!r}; accepted: after"
                f" pip install 'gossamer[{self.package}]'"
            )

    def row(self, row: Mapping[str, Any]) -> None:
        if (values := self._evaluations.add(row)) is not None:
            means = {name: fmean(numbers) for name, numbers in values.items()}
            # The evaluation is complete when its last node is, and not at the mean of the nodes' times.
            place = {name: row[name] for name in _PLACE if row.get(name) is not None}
            self.report(means | place, row["round"])

    def report(self, values: Mapping[str, float], round: int) -> None:
        """Report the numeric columns of an evaluation point."""

    def end(self, run: Run) -> None:
        self.close(run.status)

    def failure(self, error: BaseException) -> None:
        self.close("failed")

    def close(self, status: str) -> None:
        """The run is done, stopped or failed."""


@register("tracker", "tensorboard")
class TensorBoard(Averaging):
    """Scalars for TensorBoard, by round, in ``folder`` (the runs of a sweep are below the sweep's name), or
    in ``tensorboard`` in the run's folder."""

    package: ClassVar[str] = "tensorboard"
    folder: FilePath | None = None
    _writer: Any = PrivateAttr(None)

    def begin(self, experiment: Experiment, folder: Path) -> None:
        from tensorboard.summary import Writer

        name, _ = _sweep(folder) or ("", "")
        shared = self.folder and self.folder / name / folder.parent.name / folder.name
        self._writer = Writer(str(shared or folder / "tensorboard"))

    def report(self, values: Mapping[str, float], round: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()


@register("tracker", "mlflow")
class MLflow(Averaging):
    """A run of MLflow: the experiment's settings as parameters, metrics by round. ``uri`` is the tracking
    server, by default that of MLflow's own settings. ``project`` is MLflow's experiment, by default the name
    of the experiment or the sweep. The runs of a sweep have the tags ``sweep`` and ``cell``."""

    package: ClassVar[str] = "mlflow"
    uri: str | None = None
    project: str | None = None
    _client: Any = PrivateAttr(None)
    _run: str = PrivateAttr("")

    def begin(self, experiment: Experiment, folder: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        tags = dict(zip(("sweep", "cell"), _sweep(folder) or (), strict=False))
        name = self.project or tags.get("sweep", experiment.name)
        self._client = MlflowClient(tracking_uri=self.uri)
        with suppress(Exception):  # it exists, or another run creates it
            self._client.create_experiment(name)
        project = self._client.get_experiment_by_name(name).experiment_id
        self._run = self._client.create_run(project, tags=tags, run_name=folder.name).info.run_id
        settings = flat(experiment.model_dump(mode="json"))
        parameters = [Param(key, str(value)) for key, value in settings.items()]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[first : first + _MAX_PARAMETERS])

    def report(self, values: Mapping[str, float], round: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=round)

    def close(self, status: str) -> None:
        ended = {"done": "FINISHED", "failed": "FAILED", "diverged": "FAILED"}
        self._client.set_terminated(self._run, ended.get(status, "KILLED"))


@register("tracker", "wandb")
class WandB(Averaging):
    """A run of Weights & Biases in a ``project`` (by default the name of the experiment or the sweep) of an
    ``entity`` (user or team). Rows are sent at once, or kept in the run's folder for ``wandb sync``. The runs
    of a sweep form a group with its name, and have their cell as a tag."""

    package: ClassVar[str] = "wandb"
    project: str | None = None
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    _run: Any = PrivateAttr(None)

    def check(self) -> None:
        super().check()
        if self.mode == "online" and not _has_wandb_key():
            accepted = "after wandb login, with WANDB_API_KEY in the environment, or mode: offline"
            raise BadInput(f"trackers: 'wandb' finds no key of Weights & Biases; accepted: {accepted}")

    def begin(self, experiment: Experiment, folder: Path) -> None:
        import wandb

        group, *cell = _sweep(folder) or (None,)
        self._run = wandb.init(
            project=self.project or group or experiment.name,
            group=group,
            tags=[name[:_LONGEST_TAG] for name in cell],
            entity=self.entity,
            name=folder.name,
            dir=str(folder),
            mode=self.mode,
            config=experiment.model_dump(mode="json"),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )

    def report(self, values: Mapping[str, float], round: int) -> None:
        self._run.log({**values, "round": round})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "done" else 1)


def _has_wandb_key() -> bool:
    """Whether wandb has a key for its server, in its settings (which include the environment) or in the file .netrc."""
    import wandb

    settings = wandb.setup().settings
    if settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else []
    for file in (*named, Path.home() / ".netrc", Path.home() / "_netrc"):
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(file.expanduser()).authenticators(urlsplit(settings.base_url).netloc) is not None:
                return True
    return False


def _sweep(folder: Path) -> tuple[str, str] | None:
    """The names of the sweep to which a run's folder belongs, and of its cell (the first of several equal
    ones); None for a run outside a sweep."""
    path = folder.parent.parent / "sweep.json"
    if not path.is_file():
        return None
    runs = read_json(path, SweepRecord, path.parent, MAX_FIGURES_BYTES)["runs"]
    cells = [entry["cell"] for entry in runs if entry.get("run") == folder.parent.name]
    return (path.parent.name, cells[0]) if cells else None
