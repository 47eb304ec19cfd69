"""``make bench-processes``: the cost of the engine ``processes``, compared with the limits of the machine.

    python benchmarks/processes.py [--data-root FOLDER] [--nodes N,N,...] [--json FILE]

D-PSGD with GN-LeNet on CIFAR-10, three local steps of 16 samples per round, a random 5-regular graph (a
complete one with fewer than six nodes). The data comes from the data root (or the environment variable
GOSSAMER_DATA_ROOT); without one, random images of the same shape are used, which cost the same.

It prints for each size:

start-up      seconds from the command ``gossamer run`` until all nodes have begun (imports, data, forks)
node-rounds   per second, over the last three quarters of the rounds
cpu           milliseconds of CPU time of all nodes and their supervisor, per node-round
bare          training steps per second of as many bare processes as cores (``channels_last``, an allocator
              that keeps freed memory), and a step's CPU time, measured before and after the run; and the run's
              own steps as a share of them, by the clock and by CPU time (which a busy machine disturbs less)
private       MiB of a node that no other process shares: mean and maximum over nodes, while they run (sampled
              before the measured rounds) and at the end of each node
bytes         that a node sends in a round, divided by the minimum: degree times parameters times four
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from apart import answer
from figures import Row, report
from gossamer import Experiment, run
from gossamer.cores import cores
from gossamer.process_memory import private_bytes
from gossamer.results.observer import Observer
from machine import plain_steps

NODES = (8, 16, 32, 48)
DEGREE = 5
LOCAL_STEPS = 3
BATCH = 16
NODE_ROUNDS = 320
"""The approximate number of node-rounds in a quarter of a run."""
MIB = 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = os.environ.get("GOSSAMER_DATA_ROOT")
    parser.add_argument("--data-root", type=Path, default=root, help="a folder with hub/uoft-cs/cifar10/...")
    parser.add_argument("--nodes", default=",".join(map(str, NODES)), help="numbers of nodes")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    data_root = None if arguments.data_root is None else str(arguments.data_root.resolve())
    print("data:", "random images of CIFAR-10's shape (no data root)" if data_root is None else "CIFAR-10")
    sizes = map(int, arguments.nodes.split(","))
    report((measure_with_bare(nodes, data_root) for nodes in sizes), arguments.json)


def measure_with_bare(nodes: int, data_root: str | None) -> Row:
    """Measure one size, and the bare machine before and after it."""
    before = bare()
    engine = {"name": "processes"}
    row = {"start_up_s": start_up(experiment(nodes, 4, data_root, engine=engine))}
    row |= in_process(nodes, data_root)
    rate, cpu_ms = (statistics.mean(both) for both in zip(before, bare(), strict=True))
    row["bare_steps_per_s"], row["bare_cpu_ms_a_step"] = rate, cpu_ms
    row["ratio_to_bare"] = row["node_rounds_per_s"] * LOCAL_STEPS / rate
    row["ratio_to_bare_by_cpu"] = LOCAL_STEPS * cpu_ms / row["cpu_ms_a_node_round"]
    return row


def bare() -> tuple[float, float]:
    """GN-LeNet steps per second of one bare process per core, and milliseconds of CPU time per step."""
    return plain_steps(cores(), 300, BATCH, tuned=True)


def experiment(
    nodes: int, rounds: int, data_root: str | None = None, *, samples: int = 50_000, **changes: Any
) -> Experiment:
    """The experiment: rows of all nodes after each quarter of the rounds, one node evaluated on few samples."""
    synthetic = {"name": "stubs:images", "model": "gn-lenet", "channels": 3, "size": 32, "samples": samples}
    sparse = nodes > DEGREE + 1
    return Experiment.of(
        {
            "name": "bench-processes",
            "nodes": nodes,
            "task": synthetic if data_root is None else {"name": "cifar10", "model": "gn-lenet"},
            "data_root": data_root,
            "topology": {"name": "random-regular", "degree": DEGREE} if sparse else {"name": "complete"},
            "algorithm": {"name": "d-psgd", "local_steps": LOCAL_STEPS},
            "optimizer": {"name": "sgd", "lr": 0.01},
            "batch_size": BATCH,
            "evaluation": {"every_rounds": rounds // 4, "nodes": [0], "samples": 100},
            "stop": {"rounds": rounds},
            "engine": {"name": "processes"},
            **changes,
        }
    )


class Watcher(Observer):
    """Watches what a run records, and samples the memory and CPU time of its nodes.

    Args:
        memory_at: node-rounds after which it samples memory, before the measured rounds.
        cpu_at: node-rounds between which it counts CPU time.
    """

    def __init__(self, memory_at: int, cpu_at: tuple[int, int]) -> None:
        self._memory_at, self._cpu_at = memory_at, list(cpu_at)
        self.cpu: list[tuple[int, float]] = []
        """Node-rounds and seconds of CPU time so far."""
        self.parameters = 0
        self.private: list[int] = []
        self.rows: dict[int, list[Row]] = {}

    def start(self, description: Mapping[str, Any]) -> None:
        self.parameters = description["parameters"]

    def progress(self, rounds: int, time_s: float) -> None:
        if rounds >= self._memory_at and not self.private:
            nodes = [node for server in psutil.Process().children() for node in server.children()]
            self.private = [private_bytes(node.pid) or 0 for node in nodes]
        if self._cpu_at and rounds >= self._cpu_at[0]:
            self._cpu_at.pop(0)
            times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
            self.cpu.append((rounds, sum(time.user + time.system for time in times)))

    def row(self, row: Mapping[str, Any]) -> None:
        if row["node"] >= 0:
            self.rows.setdefault(row["round"], []).append(dict(row))

    def cpu_ms(self) -> float:
        """Milliseconds of CPU time per node-round, or NaN if the run was too short."""
        if len(self.cpu) < 2 or self.cpu[0][0] == self.cpu[1][0]:
            return float("nan")
        (first, before), (last, after) = self.cpu
        return 1e3 * (after - before) / (last - first)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)


def start_up(settings: Experiment) -> float:
    """Seconds from the command until all nodes begin, according to the first recorded row."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.yaml"
        settings.save(file)
        gossamer = Path(sys.executable).with_name("gossamer")
        started = time.monotonic()
        command = subprocess.Popen(
            [gossamer, "run", file, "--out", folder, "--quiet", "--no-report"], cwd=Path(__file__).parent
        )
        try:
            while (row := first_row(Path(folder))) is None:
                if command.poll() is not None:
                    raise SystemExit(f"gossamer run: exit code {command.returncode}")
                time.sleep(0.02)
            seconds: float = time.monotonic() - row["wall_s"] - started
        finally:
            command.wait()
    return seconds


def first_row(folder: Path) -> Row | None:
    """The first recorded row of a run, as soon as there is one."""
    for segment in folder.glob("*/*/segments/metrics-*.jsonl"):
        line, end, _ = segment.read_text().partition("\n")
        if end:
            row: Row = json.loads(line)
            return row
    return None


def measure(settings: Experiment) -> Row:
    """Run an experiment from :func:`experiment`."""
    nodes, rounds, every = settings.nodes, settings.stop.rounds, settings.evaluation.every_rounds
    assert rounds is not None
    assert every is not None
    watcher = Watcher(nodes * every // 2, (nodes * every, nodes * (rounds - 1)))
    with tempfile.TemporaryDirectory() as folder:
        at_end = run(settings, folder, observer=watcher).figures["private_bytes"]
    wall_s = {round: statistics.mean(row["wall_s"] for row in rows) for round, rows in watcher.rows.items()}
    sent = sum(row["bytes_sent"] for row in watcher.rows[rounds])
    degree = min(DEGREE, nodes - 1)
    assert at_end is not None
    return {
        "nodes": nodes,
        "rounds": rounds,
        "node_rounds_per_s": nodes * (rounds - every) / (wall_s[rounds] - wall_s[every]),
        "cpu_ms_a_node_round": watcher.cpu_ms(),
        "private_MiB_mean": statistics.mean(watcher.private) / MIB,
        "private_MiB_max": max(watcher.private) / MIB,
        "private_MiB_mean_at_end": at_end["mean"] / MIB,
        "private_MiB_max_at_end": at_end["max"] / MIB,
        "bytes_a_node_round": sent / (nodes * rounds),
        "bytes_over_minimum": sent / (nodes * rounds * degree * watcher.parameters * 4),
    }


def in_process(nodes: int, data_root: str | None) -> Row:
    """Measure one size in a separate process."""
    rounds = 4 * max(NODE_ROUNDS // nodes, 2)
    row: Row = answer(f"import processes; processes.print_row({nodes}, {rounds}, {data_root!r})")
    return row


def print_row(nodes: int, rounds: int, data_root: str | None) -> None:
    """Measure one size and print the row; runs in a separate process."""
    engine = {"name": "processes"}
    print(json.dumps(measure(experiment(nodes, rounds, data_root, engine=engine))))


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    began = time.perf_counter()
    main()
    print(f"took {time.perf_counter() - began:.0f} s")
