"""The same work by other simulators and by gossamer, in turns, each in its own process:

    python benchmarks/peers.py [--gossipy PYTHON] [--gossipy-checkout FOLDER] [--fluke PYTHON] [--flower PYTHON]
                               [--json FILE] [--only WORD] [--threads COUNT]

Each PYTHON is the interpreter of an environment with that peer, and with the same torch as here: gossipy-dfl and
torchvision, fluke-fl, or flwr[simulation], from PyPI. A checkout of gossipy has what its release lacks.

100 nodes with 160 random images of 28x28 each, SGD in batches of 16: an epoch of ten steps per round, or one step; a random
5-regular graph, no evaluation. peer_runs.py describes the rounds of each peer; some send less than gossamer, which sends
every model to five neighbours. It prints medians from the second round on, and the median of the ratios of gossamer's
training steps per second to those of each peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from figures import Row, report
from peer_runs import BATCH, NODES, SAMPLES
from run import REPEATS, Progress, experiment, seconds_of, synthetic

CASES = [("mlp", 10), ("logistic", 10), ("mlp", 1), ("logistic", 1)]
NAMES = {"mlp": "MLP 784-100-10", "logistic": "logistic 784-10"}
# Rounds with an epoch each, so that every case takes seconds; with one step each, three times as many.
ROUNDS = {
    "gossamer": 40,
    "gossamer, one core": 25,
    "gossipy": 10,
    "gossipy, checkout": 10,
    "fluke": 10,
    "flower": 4,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for peer in ("gossipy", "fluke", "flower"):
        parser.add_argument(f"--{peer}", metavar="PYTHON", help=f"interpreter of the environment with {peer}")
    parser.add_argument("--gossipy-checkout", type=Path, metavar="FOLDER", help="its repository")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads in each peer's process")
    arguments = parser.parse_args()
    pythons = {
        "gossamer": sys.executable,
        "gossamer, one core": sys.executable,
        "gossipy": arguments.gossipy,
        "gossipy, checkout": arguments.gossipy if arguments.gossipy_checkout else None,
        "fluke": arguments.fluke,
        "flower": arguments.flower,
    }
    pythons = {name: python for name, python in pythons.items() if python}
    report(rows(pythons, arguments.gossipy_checkout, arguments.only, arguments.threads), arguments.json)


def rows(pythons: dict[str, str], checkout: Path | None, only: str, threads: int) -> Iterator[Row]:
    for model, steps in CASES:
        case = f"{NAMES[model]}, {steps} step{'s' * (steps > 1)}"
        if only not in case:
            continue
        rates: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
        for _ in range(REPEATS):
            for name, python in pythons.items():
                rates[name].append(measured(name, python, checkout, model, steps, threads))
        ours = [rate["steps"] for rate in rates["gossamer"]]
        for name, peer in rates.items():
            theirs = [rate["steps"] for rate in peer]
            ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
            yield {
                "row": f"{case}, {name}",
                "node_rounds_per_s": statistics.median(rate["node_rounds"] for rate in peer),
                "steps_per_s": statistics.median(theirs),
                "ratio": statistics.median(ratios),
                "from": min(ratios),
                "to": max(ratios),
            }


def measured(
    name: str, python: str, checkout: Path | None, model: str, steps: int, threads: int
) -> dict[str, float]:
    """Node-rounds and training steps per second of one run.

    Raises:
        SystemExit: when it fails.
    """
    function, _, variant = name.partition(", ")
    rounds = ROUNDS[name] * (3 if steps == 1 else 1)
    environment = dict(os.environ)
    if function == "gossamer":
        code = f"import peers; peers.gossamer({model!r}, {steps}, {rounds}, {1 if variant else None})"
    else:
        code = f"import peer_runs; peer_runs.{function}({model!r}, {steps}, {rounds})"
        # Otherwise, Flower's simulation sends usage reports.
        environment |= {"OMP_NUM_THREADS": str(threads), "FLWR_TELEMETRY_ENABLED": "0"}
        environment["PYTHONPATH"] = str(checkout.resolve()) if variant and checkout else ""
    process = subprocess.run(
        [python, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True
    )
    if process.returncode:
        raise SystemExit(f"{name}: exit code {process.returncode}\n{process.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return answer


def gossamer(model: str, steps: int, rounds: int, workers: int | None) -> None:
    """D-PSGD: every node trains, sends its model to all neighbours, and takes the mean with theirs. All cores are used if
    no number of workers is given."""
    settings = experiment(
        synthetic(model, 1, 28, NODES * SAMPLES),
        NODES,
        BATCH,
        rounds,
        algorithm={"name": "d-psgd", "local_steps": steps},
        engine={"workers": workers},
    )
    progress = Progress()
    seconds_of(settings, progress)
    rate = 1 / progress.node_round_s(NODES)
    print(json.dumps({"node_rounds": rate, "steps": rate * steps}))


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"took {time.perf_counter() - started:.0f} s")
