"""``python benchmarks/checkpoints.py``: the cost of checkpoints, as a ratio within one run.

    python benchmarks/checkpoints.py [--models NAME,...] [--nodes N] [--every ROUNDS] [--repeats N]

D-PSGD on a random 5-regular graph, three local steps of 16 samples per round, under both engines: with GN-LeNet
on random images of CIFAR-10's shape (90 thousand parameters), and with a small multi-layer perceptron, whose
rounds are so short that checkpoints dominate. Runs alternate with and without checkpoints
(``every_rounds: ROUNDS``). Seconds are of the second half of the rounds; the ratio is of the medians."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

from gossamer import Experiment, run
from machine import describe

MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gn-lenet": (
        {"name": "stubs:images", "model": "gn-lenet", "channels": 3, "size": 32, "samples": 5_000},
        20,
    ),
    "mlp": ({"name": "digits", "model": {"name": "mlp", "hidden": [64]}}, 200),
}
"""Task and number of rounds, by model."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--every", type=int, default=5, help="checkpoint.every_rounds")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for model in arguments.models.split(","):
        for engine in ("simulate", "processes"):
            seconds: dict[int | None, list[float]] = {None: [], arguments.every: []}
            for _ in range(arguments.repeats):
                for every, taken in seconds.items():
                    taken.append(second_half_s(experiment(model, engine, arguments.nodes, every)))
            plain, saved = (statistics.median(taken) for taken in seconds.values())
            rounds = MODELS[model][1] / 2
            print(
                f"{model:9} {engine:10} without {1e3 * plain / rounds:.3g} ms per round, with"
                f" {1e3 * saved / rounds:.3g} ms: ratio {saved / plain:.3f}",
                flush=True,
            )
    print("  ".join(f"{key}: {value}" for key, value in describe().items()))


def experiment(model: str, engine: str, nodes: int, every_rounds: int | None) -> Experiment:
    """The experiment, which evaluates one node in the middle and at the end."""
    task, rounds = MODELS[model]
    return Experiment.of(
        {
            "name": "bench-checkpoints",
            "nodes": nodes,
            "task": task,
            "topology": {"name": "random-regular", "degree": 5},
            "algorithm": {"name": "d-psgd", "local_steps": 3},
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
            "evaluation": {"every_rounds": rounds // 2, "nodes": [0], "samples": 100},
            "checkpoint": {"every_rounds": every_rounds},
            "stop": {"rounds": rounds},
            "engine": {"name": engine, "trainer": "sequential"},
        }
    )


def second_half_s(settings: Experiment) -> float:
    """Real seconds from the middle of a run to its end."""
    with tempfile.TemporaryDirectory() as out:
        rows = run(settings, out).metrics.filter(node=0)
    halves = dict(zip(rows["round"], rows["wall_s"], strict=True))
    rounds = settings.stop.rounds
    assert rounds is not None
    return float(halves[rounds] - halves[rounds // 2])


if __name__ == "__main__":
    main()
