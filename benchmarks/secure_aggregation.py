"""The cost of secure aggregation: ``python benchmarks/secure_aggregation.py``.

16 nodes, GN-LeNet on random images, ten steps of 8 per round, a static 5-regular graph; runs of each variant
alternate with runs of plain D-PSGD. For both engines, it prints the median ratios of time, CPU time and
bytes. The time of ``processes`` excludes start-up; its CPU time includes it."""

from __future__ import annotations

import resource
import statistics
import tempfile
from typing import Any

from gossamer import run
from run import experiment, synthetic

NODES, ROUNDS, REPEATS = 16, 12, 3
VARIANTS: dict[str, dict[str, Any]] = {
    "skip, no masks": {"masked": False},
    "skip": {},
    "recover": {"drop_outs": "recover"},
}


def measured(secure: dict[str, Any] | None, engine: str) -> tuple[float, float, int]:
    """Seconds, CPU seconds and bytes of one run."""
    settings = experiment(
        synthetic("gn-lenet", 3, 32, 6400),
        NODES,
        8,
        ROUNDS,
        algorithm={"name": "d-psgd", "local_steps": 10},
        secure_aggregation=secure,
        evaluation={"every_rounds": ROUNDS, "samples": 10},
        engine={"name": engine, "trainer": "sequential"},
    )
    with tempfile.TemporaryDirectory() as folder:
        before = processor_seconds()
        result = run(settings, folder)
        last = result.metrics.filter(result.metrics["round"] == ROUNDS)
        seconds = last["time_s"].max() if engine == "processes" else result.wall_s
        assert isinstance(seconds, float)
        return seconds, processor_seconds() - before, int(last["bytes_sent"].sum())


def processor_seconds() -> float:
    """CPU seconds of this process and of the processes that it has waited for."""
    usages = [resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Measure and print."""
    print(f"{'':12} {'':16} {'time':>6} {'cpu':>6} {'bytes':>8}")
    for engine in ("simulate", "processes"):
        measured(None, engine)  # a warm-up for work that is done once per process
        for name, secure in VARIANTS.items():
            pairs = [(measured(None, engine), measured(secure, engine)) for _ in range(REPEATS)]
            ratios = [statistics.median(masked[i] / plain[i] for plain, masked in pairs) for i in range(3)]
            print(f"{engine:12} {name:16} {ratios[0]:6.3f} {ratios[1]:6.3f} {ratios[2]:8.5f}", flush=True)


if __name__ == "__main__":
    main()
