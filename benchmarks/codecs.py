"""The cost of codecs: ``python benchmarks/codecs.py [--only WORD]``.

64 nodes, GN-LeNet on random images, three steps of 16 per round. Runs with each codec alternate with runs
without one. It prints the median ratios of wall time and of CPU time, and the bytes of a round as a share of
those without a codec. ``LIMITS`` has the largest acceptable ratios of wall time on two quiet cores."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

from gossamer import run
from run import experiment, synthetic

NODES, ROUNDS, REPEATS = 64, 6, 3
CODECS: dict[str, Any] = {
    "identity": "identity",
    "top-k": {"name": "top-k", "fraction": 0.1},
    "random-k": {"name": "random-k", "fraction": 0.1},
    "quantize 8": "quantize",
    "quantize 4, blocks of 1,024": {"name": "quantize", "bits": 4, "block": 1024},
    "float16": "float16",
    "jwins": "jwins",
    "top-k, quantize, entropy": [{"name": "top-k", "fraction": 0.1}, "quantize", "entropy"],
}

LIMITS = {"top-k": 1.10, "quantize 8": 1.10, "jwins": 1.30}


def measured(codec: Any) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and bytes of one run."""
    settings = experiment(
        synthetic("gn-lenet", 3, 32, 6400),
        NODES,
        16,
        ROUNDS,
        algorithm={"name": "d-psgd", "local_steps": 3},
        codec=codec,
        evaluation={"every_rounds": ROUNDS, "samples": 10},
    )
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        result = run(settings, folder)
        cpu_s = time.process_time() - start
        assert result.wall_s is not None
        last = result.metrics.filter(result.metrics["node"] >= 0, result.metrics["round"] == ROUNDS)
        return result.wall_s, cpu_s, int(last["bytes_sent"].sum())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="codecs whose name has this word")
    only = parser.parse_args().only
    print(f"{'codec':32} {'wall':>6} {'cpu':>6} {'bytes':>7} {'limit':>6}")
    for name, codec in CODECS.items():
        if only not in name:
            continue
        pairs = [(measured(None), measured(codec)) for _ in range(REPEATS)]
        ratios = [statistics.median(coded[i] / plain[i] for plain, coded in pairs) for i in range(3)]
        limit = f"{LIMITS[name]:6.2f}" if name in LIMITS else ""
        print(f"{name:32} {ratios[0]:6.3f} {ratios[1]:6.3f} {ratios[2]:7.4f} {limit}", flush=True)


if __name__ == "__main__":
    main()
