"""``gossamer topology``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.options import File, Json, Overrides
from gossamer.errors import BadInput

if TYPE_CHECKING:
    from gossamer.config import Experiment
    from gossamer.topology import TopologySchedule

_WITHOUT_TOPOLOGY = frozenset(
    ("all-reduce", "centralized", "epidemic-local", "epidemic-oracle", "fedavg", "local")
)
"""The algorithms that ask nothing of the experiment's topology."""
_LOOKED_AT = 1000
"""In so many rounds a change of the graph is looked for."""


def topology(
    file: File,
    overrides: Overrides = None,
    round_: Annotated[int, typer.Option("--round", help="Which round's graph.", min=0)] = 0,
    png: Annotated[Path | None, typer.Option(help="Draw the graph into this PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure an experiment's graph and mixing matrix: spectral gap, diameter, effective neighbours."""
    from gossamer.config import Experiment

    experiment = Experiment.load(file, overrides or ())
    from gossamer.topology import TopologySchedule, describe

    schedule = TopologySchedule(experiment.topology, experiment.nodes, experiment.seed)
    schedule.check()
    if schedule.sampled and round_ > 0:
        raise BadInput(
            f"--round: {round_} of {experiment.topology.name_of()}, whose nodes find their neighbours themselves; accepted:"
            " 0, what they start with"
        )
    measures = describe(schedule, round_)
    if png is not None:
        from gossamer.results.plots import draw_graph

        graph = schedule.graph(round_)
        draw_graph(graph.nodes, list(graph.edges()), png, directed=graph.directed, seed=experiment.seed)
    if as_json:
        typer.echo(json.dumps(measures))
        return
    for name, value in measures.items():
        typer.echo(f"{name.replace('_', ' '):24} {'–' if value is None else f'{value:.6g}'}")
    for note in _notes(experiment, schedule, round_):
        typer.echo(f"{'note':24} {note}")
    if png is not None:
        typer.echo(f"{'picture':24} {png}")


def _notes(experiment: Experiment, schedule: TopologySchedule, round_: int) -> Iterator[str]:
    """What the figures of a topology do not say."""
    name = experiment.algorithm.name_of()
    if name in _WITHOUT_TOPOLOGY:
        yield f"{name} does not use the topology: the figures say nothing about this experiment's run"
    if schedule.sampled:
        yield (
            "the figures are of the views that the nodes start with; later ones depend on who hears from whom and when, and"
            " are recorded with the run"
        )
    graph, rounds = schedule.graph(round_), min(experiment.stop.rounds or _LOOKED_AT, _LOOKED_AT)
    if any(schedule.graph(r) is not graph for r in range(rounds)):
        yield f"the graph changes during the run: the figures are of round {round_} alone"
