"""Long runs, to find out whether memory or descriptors grow with time.

    python benchmarks/soak.py [--nodes N] [--minutes M] [--every-s S] [--json FILE]
    python benchmarks/soak.py --rounds N [--nodes N] [--only WORD] [--json FILE] [--figure FILE]

The first command runs many processes that come and go; the second one simulates N rounds of each kind of experiment, each
in a process of its own, and draws its memory over the rounds (``simulated.py``). Of the first one:

Gossip learning over a peer sampler (cyclon), on digits, a round every two seconds; each node crashes every
three minutes on average, and comes back ten seconds later, from its initial model. Every ``--every-s``
seconds it prints, for processes that are at least a minute old:

private       MiB that no other process shares: median and maximum over nodes; and the supervisor's
descriptors   open files and sockets of a process: median and maximum over nodes; and the supervisor's
processes     nodes that are present

A young process uses less, so at the end it prints the growth per minute of the oldest processes, by least
squares over the samples after their first minute."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gossamer import Experiment, Run, run
from gossamer.process_memory import private_bytes
from machine import describe
from simulated import measure

MIB = 2**20
SETTLED_S = 60.0
"""The age at which the sampling of a process begins; until then its memory still grows."""


def experiment(nodes: int, minutes: float) -> Experiment:
    """The experiment of the long run."""
    return Experiment.of(
        {
            "name": "soak",
            "nodes": nodes,
            "task": {"name": "digits", "model": {"name": "mlp", "hidden": [32]}},
            "topology": {"name": "cyclon", "view": 8, "shuffle": 4, "every_s": 2.0},
            "algorithm": {"name": "gossip-learning", "period_s": 2.0},
            "faults": [{"name": "churn", "mean_up_s": 180.0, "mean_down_s": 10.0, "restart_from": "initial"}],
            "gather": {"lost_peer": "skip"},
            "evaluation": {"every_rounds": None, "every_s": 60.0, "samples": 100},
            "engine": {"name": "processes"},
            "stop": {"time_s": 60.0 * minutes},
        }
    )


@dataclass(frozen=True)
class Sample:
    """One process at one instant.

    Args:
        pid: the process id.
        node: whether it is a node rather than the supervisor.
        age_s: seconds since the process started.
        at_s: seconds since the first sample.
        private: bytes of memory that no other process shares.
        descriptors: its open files and sockets.
    """

    pid: int
    node: bool
    age_s: float
    at_s: float
    private: int
    descriptors: int


class Sampler(threading.Thread):
    """Samples the processes of a run from time to time, and prints the samples."""

    def __init__(self, every_s: float) -> None:
        super().__init__(daemon=True)
        self._every_s = every_s
        self._over = threading.Event()
        self.samples: list[Sample] = []

    def run(self) -> None:
        print(f"{'s':>5} {'processes':>9} {'private MiB':>22} {'descriptors':>20}   supervisor")
        start = time.monotonic()
        while not self._over.wait(self._every_s):
            samples = list(self._sample(time.monotonic() - start))
            self.samples += samples
            _print(samples)

    def end(self) -> None:
        """End the sampling."""
        self._over.set()
        self.join()

    def _sample(self, at_s: float) -> Iterator[Sample]:
        # The launcher's child is the supervisor, whose children are the nodes.
        for supervisor in psutil.Process().children():
            for process in (supervisor, *supervisor.children()):
                try:
                    age_s = time.time() - process.create_time()
                    descriptors, private = process.num_fds(), private_bytes(process.pid)
                except psutil.Error:
                    continue  # the process has just ended
                if private is not None:
                    yield Sample(process.pid, process is not supervisor, age_s, at_s, private, descriptors)


def _print(samples: list[Sample]) -> None:
    settled = [sample for sample in samples if sample.node and sample.age_s >= SETTLED_S]
    supervisor = next((sample for sample in samples if not sample.node), None)
    if not settled or supervisor is None:
        return
    private = [sample.private / MIB for sample in settled]
    descriptors = [sample.descriptors for sample in settled]
    print(
        f"{settled[0].at_s:5.0f} {sum(sample.node for sample in samples):9}"
        f" {statistics.median(private):12.1f} {max(private):9.1f}"
        f" {statistics.median(descriptors):12.0f} {max(descriptors):7}"
        f"   {supervisor.private / MIB:.1f} MiB, {supervisor.descriptors}",
        flush=True,
    )


def growth(samples: list[Sample], count: int = 8) -> list[dict[str, float]]:
    """Growth of the oldest processes after their first minute, in MiB and descriptors per minute."""
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.age_s >= SETTLED_S:
            lives.setdefault(sample.pid, []).append(sample)
    longest = sorted((life for life in lives.values() if len(life) > 2), key=lambda life: -life[-1].age_s)[
        :count
    ]
    rows = []
    for life in longest:
        minutes = np.array([sample.age_s / 60 for sample in life])
        rows.append(
            {
                "node": float(life[0].node),
                "minutes": float(minutes[-1]),
                "mib": float(life[-1].private / MIB),
                "mib_a_minute": float(np.polyfit(minutes, [s.private / MIB for s in life], 1)[0]),
                "descriptors_a_minute": float(np.polyfit(minutes, [s.descriptors for s in life], 1)[0]),
            }
        )
    return rows


def main() -> None:
    """Run, sample and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, help="default: 64, or 16 with --rounds")
    parser.add_argument("--rounds", type=int, help="simulate so many rounds of each kind of experiment")
    parser.add_argument("--only", default="", help="with --rounds: kinds whose name has this word")
    parser.add_argument("--figure", type=Path, help="with --rounds: draw memory over rounds into this file")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=30.0)
    parser.add_argument("--json", type=Path, help="write all samples into this file")
    arguments = parser.parse_args()
    if arguments.rounds is not None:
        measure(arguments.rounds, arguments.nodes or 16, arguments.only, arguments.json, arguments.figure)
        return
    sampler = Sampler(arguments.every_s)
    with tempfile.TemporaryDirectory() as folder:
        sampler.start()
        try:
            result = run(experiment(arguments.nodes or 64, arguments.minutes), Path(folder))
        finally:
            sampler.end()
        summary = _summary(result)
    rows = growth(sampler.samples)
    for row in rows:
        kind = "node" if row["node"] else "supervisor"
        print(
            f"{kind} of {row['minutes']:.1f} minutes: {row['mib']:.1f} MiB, {row['mib_a_minute']:+.3f} MiB and"
            f" {row['descriptors_a_minute']:+.2f} descriptors per minute"
        )
    for name, value in summary.items():
        print(f"{name}: {value}")
    if arguments.json is not None:
        samples = [asdict(sample) for sample in sampler.samples]
        text = {"machine": describe(), "growth": rows, "samples": samples, **summary}
        arguments.json.write_text(json.dumps(text, indent=1), encoding="utf-8")


def _summary(result: Run) -> dict[str, Any]:
    events = result.events["event"].value_counts(sort=True)
    last = result.metrics.filter(node=-1) if "node" in result.metrics.columns else result.metrics
    return {
        "status": result.status,
        "events": dict(zip(events["event"].to_list(), events["count"].to_list(), strict=True)),
        "network rows": len(last),
        "accuracy": result.metrics["test_accuracy"].drop_nulls().tail(len(result.metrics) // 4).mean(),
    }


if __name__ == "__main__":
    main()
