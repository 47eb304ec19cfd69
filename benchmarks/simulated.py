"""Memory of a simulating process over many rounds, for each kind of experiment that keeps something from round to round."""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gossamer import Experiment, run
from gossamer.results.observer import Observer
from machine import describe

MIB = 2**20
POINTS = 20
"""Samples of the memory of a run, at equal distances in rounds."""
CHANGING = {"name": "random-regular", "degree": 4, "every_rounds": 1}
CHURN = {"name": "churn", "mean_up_s": 100.0, "mean_down_s": 3.0}

KINDS: dict[str, dict[str, Any]] = {
    "a fixed graph": {},
    "a new graph in each round": {"topology": CHANGING},
    "random links": {"topology": {"name": "random-links", "base": "complete", "probability": 0.3}},
    "gossip-learning, a peer sampler": {
        "algorithm": "gossip-learning",
        "topology": {"name": "cyclon", "view": 6, "shuffle": 3},
    },
    "ad-psgd": {"algorithm": "ad-psgd", "topology": {"name": "hypercube"}},
    "divshare": {"algorithm": {"name": "divshare", "fraction": 0.2, "recipients": 3}},
    "swift": {"algorithm": "swift"},
    "gossip-learning, a new graph in each round": {"algorithm": "gossip-learning", "topology": CHANGING},
    "top-k with its memory": {"codec": {"name": "top-k", "fraction": 0.1}, "gather": {"missing": "own"}},
    "choco-sgd": {"algorithm": "choco-sgd", "codec": {"name": "top-k", "fraction": 0.1}},
    "churn": {"faults": [CHURN], "gather": {"lost_peer": "skip"}},
    "churn, newcomers from a neighbour": {
        "faults": [{**CHURN, "restart_from": "neighbor"}],
        "gather": {"lost_peer": "skip"},
    },
}


def experiment(kind: Mapping[str, Any], nodes: int, rounds: int) -> Experiment:
    """A run of one kind."""
    return Experiment.of(
        {
            "nodes": nodes,
            "task": {"name": "digits", "model": "logistic"},
            "topology": {"name": "random-regular", "degree": 4},
            "algorithm": "d-psgd",
            "batch_size": 4,
            "network": {"name": "uniform", "latency_s": 0.01},
            "compute": {"name": "constant", "seconds_per_step": 0.05},
            "evaluation": {"every_rounds": max(rounds // 100, 1), "samples": 20},
            "engine": {"name": "simulate", "workers": 1},
            "stop": {"rounds": rounds},
            **kind,
        }
    )


class _Sampler(Observer):
    def __init__(self, total: int, pipe: Connection) -> None:
        self._total, self._pipe, self._due = total, pipe, 0.0
        self._process = psutil.Process()

    def progress(self, rounds: int, time_s: float) -> None:
        if rounds >= self._due:
            self._pipe.send((rounds, self._process.memory_info().rss / MIB))
            self._due = rounds + self._total / POINTS


def _simulate(name: str, nodes: int, rounds: int, pipe: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        status = run(
            experiment(KINDS[name], nodes, rounds), folder, observer=_Sampler(nodes * rounds, pipe)
        ).status
    pipe.send((status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def measure(rounds: int, nodes: int, only: str, json_file: Path | None, figure: Path | None) -> None:
    """Simulate, print and draw."""
    curves: dict[str, list[tuple[float, float]]] = {}
    print(f"{'':44} {'at a half':>10} {'at the end':>10} {'MiB per 1,000 rounds':>21}   status, peak")
    for name in (name for name in KINDS if only in name):
        here, there = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=_simulate, args=(name, nodes, rounds, there)
        )
        process.start()
        there.close()
        samples = []
        try:
            while True:
                samples.append(here.recv())
        except EOFError:
            process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{name}: failed, see above")
        *curve, (status, peak) = samples
        curves[name] = [(done / nodes, memory) for done, memory in curve]
        half = [point for point in curves[name] if point[0] >= rounds / 2]
        growth = 1000 * np.polyfit(*np.array(half).T, 1)[0]
        print(
            f"{name:44} {half[0][1]:10.1f} {half[-1][1]:10.1f} {growth:+21.2f}   {status}, {peak:.0f} MiB",
            flush=True,
        )
    if json_file is not None:
        text = {"machine": describe(), "nodes": nodes, "rounds": rounds, "curves": curves}
        json_file.write_text(json.dumps(text, indent=1), encoding="utf-8")
    if figure is not None:
        _draw(curves, figure)


def _draw(curves: Mapping[str, list[tuple[float, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8, 5), layout="constrained")
    axes = drawing.subplots()
    for name, curve in curves.items():
        axes.plot(*np.array(curve).T, label=name)
    axes.set(xlabel="round", ylabel="resident memory / MiB")
    axes.legend(fontsize="small")
    drawing.savefig(path)
