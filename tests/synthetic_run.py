"""Runs with plausible numbers, written as an engine writes them, as input for reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import polars as pl
import torch
import yaml

from gossamer.randomness import generator
from gossamer.results.closing import compact
from gossamer.results.folder import RunFolder, environment, write_json
from gossamer.results.run import Run
from gossamer.results.tidy import curves

PARAMETERS = 50
CLASSES = 10


def synthetic(
    out: Path,
    *,
    name: str = "quickstart",
    nodes: int = 16,
    rounds: Sequence[int] = tuple(range(0, 101, 10)),
    seed: int = 1,
    rate: float = 0.04,
    bytes_a_round: int = 80_000,
    tested: bool = True,
    labelled: bool = True,
    changing: bool = False,
    directed: bool = False,
    asynchronous: bool = False,
    lost: Sequence[int] = (),
    poisoned: Sequence[int] = (),
    status: str | None = "done",
    error: str | None = None,
    compacted: bool = True,
    named: Sequence[str] = (),
    experiment: dict[str, Any] | None = None,
) -> Run:
    """A run whose accuracy rises as 1 - exp(-rate r), faster on some nodes, and whose bytes grow linearly.

    Nodes in ``lost`` have no rows from the middle on. With ``poisoned`` nodes there is an evaluation set ``ood``, on which
    they are as accurate as on ``test``, and all others half as accurate. ``asynchronous``: nodes have their own pace on a common
    time grid. ``named``: further metrics, all equal to the accuracy.
    """
    rng = generator(seed, "synthetic")
    config = {
        "name": name,
        "seed": seed,
        "nodes": nodes,
        "task": {"name": "digits"},
        "partition": {"name": "dirichlet", "alpha": 0.3},
        "topology": {"name": "random-regular", "degree": 4},
        "algorithm": {"name": "d-psgd", "local_steps": 5},
        "evaluation": {"every_s": 5.0} if asynchronous else {"every_rounds": 10},
        "engine": {"name": "simulate"},
        **({"poison": [{"name": "patch", "set_name": "ood"}]} if poisoned else {}),
        **(experiment or {}),
    }
    folder = RunFolder.create(
        out,
        name,
        experiment=yaml.safe_dump(config, sort_keys=False),
        environment=environment(["gossamer", "run"]),
    )
    counts = rng.multinomial(100, rng.dirichlet([0.3] * CLASSES, size=nodes)) if labelled else None
    write_json(
        folder.path / "setup.json",
        {
            "nodes": nodes,
            "directed": directed,
            "parameters": PARAMETERS,
            "samples": [100] * nodes if counts is None else counts.sum(axis=1).tolist(),
            "labels": None if counts is None else counts.tolist(),
            "classes": [f"digit {label}" for label in range(CLASSES)] if labelled else None,
            "graphs": {"0": _graph(nodes, seed)},
            "poisoned": [list(poisoned)],
        },
    )
    if changing:
        with folder.segment("graphs") as graphs:
            for r in rounds[1:]:
                graphs.append({"round": r, "edges": _graph(nodes, seed + r)})
    skill = rng.normal(1.0, 0.15, size=nodes).clip(0.5, 1.5)
    with folder.segment("metrics") as metrics, folder.segment("events") as events:
        for index, r in enumerate(rounds):
            for node in range(nodes):
                if node in lost and index >= len(rounds) // 2:
                    continue
                pace = round(r * skill[node]) if asynchronous else r
                progress = 1 - np.exp(-rate * pace * skill[node])
                row: dict[str, Any] = {
                    "node": node,
                    "round": pace,
                    "step": 5 * pace,
                    "moment": f"tick {index}" if asynchronous else "round",
                    "time_s": index * 5.0 if asynchronous else 0.061 * r,
                    "wall_s": 0.2 + 0.013 * r + 0.0001 * node,
                    "train_loss": 2.3 - 2.1 * progress + 0.05 * rng.random(),
                    "bytes_sent": bytes_a_round * pace,
                    "bytes_received": bytes_a_round * pace,
                    "messages_sent": 4 * pace,
                    "messages_lost": 0,
                }
                if tested:
                    row["test_loss"] = 2.3 - 1.9 * progress + 0.08 * rng.random()
                    row["test_accuracy"] = np.float32(0.1 + 0.82 * progress + 0.02 * rng.normal()).clip(0, 1)
                    row |= dict.fromkeys(named, row["test_accuracy"])
                    if poisoned:
                        row["ood_loss"] = row["test_loss"]
                        row["ood_accuracy"] = row["test_accuracy"] / (1 if node in poisoned else 2)
                metrics.append(row)
            distance = 3.0 * r / (20 + r) * np.exp(-0.02 * r)
            network = {
                "node": -1,
                "round": r,
                "step": 5 * r,
                "moment": f"tick {index}" if asynchronous else "round",
                "time_s": index * 5.0 if asynchronous else 0.061 * r,
            }
            average = {"test_accuracy": float(0.1 + 0.86 * (1 - np.exp(-1.2 * rate * r)))} if tested else {}
            metrics.append({**network, "wall_s": 0.2 + 0.013 * r, "consensus_distance": distance, **average})
        for node in lost:
            events.append({"time_s": 2.9, "node": node, "event": "lost", "detail": "no heartbeat for 5 s"})
    if status is not None:
        if status == "done":
            folder.write_models(torch.zeros(nodes, PARAMETERS))
        if compacted:
            compact(folder)
        folder.write_status(status, error=error, wall_s=0.2 + 0.013 * rounds[-1])  # type: ignore[arg-type]
    return Run(folder.path)


def _graph(nodes: int, seed: int) -> list[list[int]]:
    if nodes < 6:
        return [[i, i + 1] for i in range(nodes - 1)]
    return [list(edge) for edge in nx.random_regular_graph(4, nodes, seed=seed).edges]


def timed(
    out: Path,
    points: Sequence[tuple[float, Sequence[float | None]]],
    *,
    seed: int = 1,
    metric: str = "test_accuracy",
    lost: Sequence[int] = (),
    status: str = "done",
    **settings: Any,
) -> Run:
    """A run on a time grid with given values.

    Args:
        out: the folder of all runs.
        points: seconds, and the metric of each node (None: no row). Each node sends 100 bytes per second.
        seed: the seed of the experiment.
        metric: the name of the metric.
        lost: nodes lost after one second.
        status: how the run ended.
        settings: further fields of the experiment.
    """
    config: dict[str, Any] = {
        "name": "timed",
        "seed": seed,
        "nodes": len(points[0][1]),
        "evaluation": {"every_s": 1.0},
        **settings,
    }
    every_s = config["evaluation"].get("every_s")
    folder = RunFolder.create(out, "timed", experiment=yaml.safe_dump(config), environment={})
    with folder.segment("metrics") as metrics, folder.segment("events") as events:
        for number, (time_s, values) in enumerate(points):
            for node, value in enumerate(values):
                if value is not None:
                    row: dict[str, Any] = {
                        "node": node,
                        "round": number,
                        "time_s": time_s,
                        "bytes_sent": round(100 * time_s),
                    }
                    row["moment"] = f"tick {round(time_s / every_s)}" if every_s else "round"
                    metrics.append({**row, metric: value})
        for node in lost:
            events.append({"time_s": 1.0, "node": node, "event": "lost", "detail": "killed"})
    compact(folder)
    folder.write_status(status)  # type: ignore[arg-type]
    return Run(folder.path)


def summary(run: Run, metric: str, *, network: bool = False) -> pl.DataFrame:
    """The curve of one metric."""
    return curves(run, [metric], network=network)
