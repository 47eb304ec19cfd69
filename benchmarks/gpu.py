"""Runs on a GPU: microseconds per node-round, with mixing, next to the plain loop on the GPU (one ``nn.Module`` and one
``torch.optim.SGD`` per node); and mixing alone, next to a copy of the matrix.

python benchmarks/gpu.py [--json FILE] [--only WORD]"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from baselines import loop
from figures import Row, report
from gossamer.runtime.setup import prepare
from run import experiment, mixing_of, seconds_of, synthetic

REPEATS = 3
MLP = {"name": "mlp", "hidden": [128]}
# Name, model, channels, size, nodes, batch size, rounds, rounds of the loop (0: not measured).
CASES: list[tuple[str, Any, int, int, int, int, int, int]] = [
    ("MLP, 100 nodes", MLP, 1, 28, 100, 16, 50, 5),
    ("MLP, 1,000 nodes", MLP, 1, 28, 1000, 16, 20, 1),
    ("logistic, 10,000 nodes", "logistic", 1, 28, 10_000, 16, 5, 0),
    ("LeNet-5, 1,000 nodes", "lenet5", 1, 28, 1000, 16, 10, 0),
    ("GN-LeNet, 64 nodes", "gn-lenet", 3, 32, 64, 8, 20, 5),
    ("GN-LeNet, 1,000 nodes", "gn-lenet", 3, 32, 1000, 8, 5, 0),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "gpu": {"device": "cuda"},
    "not_recorded": {"device": "cuda", "cuda_graphs": False},
    "one_by_one": {"device": "cuda", "trainer": "sequential"},
}
MAX_ONE_BY_ONE = 100  # nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--only", default="", help="rows whose name has this word")
    arguments = parser.parse_args()
    report(rows(arguments.only), arguments.json)


def rows(only: str) -> Iterator[Row]:
    """Each variant in turn, three times, after a short run that loads and compiles."""
    for name, model, channels, size, nodes, batch, rounds, loop_rounds in CASES:
        if only not in name:
            continue
        task = synthetic(model, channels, size, 32 * nodes)

        def seconds(engine: dict[str, Any], rounds: int = rounds, case: Any = (task, nodes, batch)) -> float:
            return seconds_of(experiment(*case, rounds, engine=engine)) / (case[1] * rounds)

        variants: dict[str, Callable[[], float]] = {}
        for variant, engine in VARIANTS.items():
            if variant != "one_by_one" or nodes <= MAX_ONE_BY_ONE:
                seconds(engine, 2)
                variants[variant] = lambda engine=engine: seconds(engine)  # type: ignore[misc]
        if loop_rounds:
            plain = loop(
                prepare(experiment(task, nodes, batch, 1)), loop_rounds, mixing=True, threads=1, device="cuda"
            )
            variants["loop"] = lambda: plain() / (nodes * loop_rounds)  # noqa: B023 - called at once
        times = {variant: [measure() for _ in range(REPEATS)] for variant, measure in variants.items()}
        yield {"row": name, **{f"{key}_us": statistics.median(runs) * 1e6 for key, runs in times.items()}}
    for nodes, length in ((1024, 89_834), (100, 101_770), (4096, 7850)):
        name = f"mixing alone, {nodes} x {length}, degree 5"
        if only in name:
            yield {"row": name, **mixing_of(nodes, length, 1, "cuda")}


if __name__ == "__main__":
    main()
