"""The cost of a run by its number of nodes: measured, fitted, and predicted for the next size.

    python benchmarks/scale.py [--sizes 1000,10000,100000] [--next 200000] [--rounds 10] [--json FILE]

Each size of ``experiments/scale/100000.yaml`` runs in its own process. The parts of its cost are

- memory, a + b n: the peak, where a is the memory of a process without nodes;
- seconds of a node-round, c + d log10 n: queues, mailboxes and rows leave one cache after the other as n grows;
- bytes of a node-round, which do not depend on n.

The fit minimises the squared relative errors. ``--next`` is measured too; 0 skips it.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import gossamer
from apart import answer
from figures import Row, report
from gossamer import Experiment
from run import Progress

FILE = Path(__file__).parent.parent / "experiments" / "scale" / "100000.yaml"
PARTS: dict[str, Callable[[float], float]] = {
    "peak_GiB": lambda nodes: nodes,
    "us_a_node_round": np.log10,
    "bytes_a_node_round": lambda nodes: 0.0,
}
"""The parts of the cost, each with the function of the number of nodes in which it is linear."""


def main() -> None:
    """Measure, fit and predict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1000,10000,100000", help="numbers of nodes to fit")
    parser.add_argument("--next", type=int, default=200_000, help="number of nodes to predict")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    report(rows(sizes, arguments.next, arguments.rounds), arguments.json)


def rows(sizes: Sequence[int], following: int, rounds: int) -> list[Row]:
    """A row for each size, the fit, and the next size as predicted and as measured."""
    rows = [measured(nodes, rounds) for nodes in sizes]
    fits = {part: fitted(sizes, [row[part] for row in rows], shape) for part, shape in PARTS.items()}
    if following:
        predicted = {part: fit(following) for part, fit in fits.items()}
        rows.append({"row": f"{following} nodes, predicted", **predicted})
        actual = measured(following, rounds)
        ratios = {f"{part}_of_predicted": actual[part] / predicted[part] for part in PARTS}
        rows += [actual, {"row": f"{following} nodes, measured over predicted", **ratios}]
    return rows


def measured(nodes: int, rounds: int) -> Row:
    """Measure one size in a separate process."""
    cost = answer(f"import scale; scale.print_cost({nodes}, {rounds})")
    print(cost, flush=True)
    return {"row": f"{nodes} nodes", **cost}


def print_cost(nodes: int, rounds: int) -> None:
    """Run one size in this process, and print its cost. Time counts from the end of the first round, which
    allocates all memory."""
    overrides = {
        "nodes": nodes,
        "task.owners": nodes,
        "stop.rounds": rounds,
        "evaluation.every_rounds": rounds,
    }
    settings = Experiment.load(FILE, [f"{name}={value}" for name, value in overrides.items()])
    progress = Progress()
    with tempfile.TemporaryDirectory() as folder:
        result = gossamer.run(settings, folder, observer=progress)
        sent = result.metrics.filter(result.metrics["round"] == rounds)["bytes_sent"].mean()
    cost = {
        "peak_GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "us_a_node_round": progress.node_round_s(nodes) * 1e6,
        "bytes_a_node_round": float(sent) / rounds,
    }
    print(json.dumps({**cost, "wall_s": result.wall_s}))


def fitted(
    sizes: Sequence[int], values: Sequence[float], shape: Callable[[float], float]
) -> Callable[[float], float]:
    """value = a + b shape(nodes), by least squares of relative errors."""
    features = np.array([[1.0, shape(nodes)] for nodes in sizes]) / np.array(values)[:, None]
    (a, b), *_ = np.linalg.lstsq(features, np.ones(len(sizes)), rcond=None)
    return lambda nodes: float(a + b * shape(nodes))


if __name__ == "__main__":
    main()
