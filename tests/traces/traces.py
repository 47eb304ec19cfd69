"""Traces of small experiments (:mod:`observed`). ``python tests/traces/traces.py`` records them, and says where they differ
from those on record; with a folder, it only writes them there."""

from __future__ import annotations

import gzip
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "golden"), str(Path(__file__).parent)]

import golden_hashes
from golden_experiments import BASE, EXPERIMENTS, FILES, GRID, RESUMED, SLOW_LINKS, UNEVEN
from observed import observing

import gossamer

RECORDED = Path(__file__).with_name("recorded")

OF_GOLDEN = (
    *(
        "d-psgd",
        "d-psgd-overlap",
        "d-psgd-changing-graph",
        "fedavg-uniform",
        "all-reduce",
        "relay-sum",
        "sgp-overlap",
    ),
    *(
        "topology-aware",
        "gossiped-centrality",
        "choco-sgd-stc",
        "powergossip",
        "deepsqueeze-sign",
        "everything",
    ),
    *(
        "ad-psgd",
        "ad-psgd-wait-free",
        "ad-psgd-artifact",
        "swift",
        "swift-fresh",
        "divshare",
        "divshare-keep",
    ),
    *(
        "gossip-learning",
        "gossip-learning-sampled",
        "divshare-sampled",
        "random-k-common-quantize",
        "jwins-qsgd",
    ),
    *(
        "loss",
        "crash",
        "leave-and-join",
        "churn",
        "churn-from-a-file",
        "partition",
        "secure",
        "attacked",
        "failed",
    ),
    *("saved-resumed", "saved-asynchronous-resumed"),
)
"""Golden experiments whose traces are kept."""

OWN: dict[str, dict[str, Any]] = {
    "questions": {"algorithm": "trace_scripts:Questions", "compute": UNEVEN, "network": SLOW_LINKS},
    "tasks": {"algorithm": "trace_scripts:Tasks", "compute": UNEVEN},
    "partly": {"algorithm": "trace_scripts:Partly", "topology": "complete", "network": SLOW_LINKS},
    "malformed": {
        "algorithm": "trace_scripts:Malformed",
        "gather": {"lost_peer": "skip", "malformed": "drop"},
        "stop": {"rounds": 8},
    },
    "malformed-fails": {"algorithm": "trace_scripts:Malformed", "gather": {"malformed": "fail"}},
    "stuck": {"algorithm": "trace_scripts:Stuck"},
    "spinning": {"algorithm": "trace_scripts:Spinning"},
    "encoding-takes-time": {
        "algorithm": "ad-psgd",
        "codec": "float16",
        "compute": {"name": "constant", "seconds_per_step": 0.01, "steps_per_encoding": 0.3},
    },
    "wrapped-codec": {
        "codec": {"name": "top-k", "fraction": 0.3},
        "gather": {"missing": "renormalize", "timeout_s": 0.03},
        "wrappers": [{"name": "golden_parts:Inverted", "attackers": []}],
    },
    "stops-by-bytes": {
        "algorithm": "swift",
        "compute": UNEVEN,
        "network": SLOW_LINKS,
        "stop": {"bytes": 80_000},
    },
    "stops-by-time-on-a-grid": {"compute": UNEVEN, "evaluation": GRID, "stop": {"time_s": 0.07}},
}

_PLACE = re.compile(r" \(observed\.py, line \d+\)")


def trace(name: str, folder: Path) -> str:
    """The trace of an experiment, and what its record says of order: events, rows and the error."""
    base, rounds = RESUMED.get(name, (name, None))
    settings = {**BASE, "name": name, **(OWN[name] if name in OWN else EXPERIMENTS[base])}
    settings["evaluation"] = {"of": "instant", **settings["evaluation"]}
    settings["wrappers"] = [*settings.get("wrappers", ()), {"name": "observed:Arrivals"}]
    if rounds is not None:
        settings["stop"] = {"rounds": rounds}
    with observing() as lines:
        try:
            run = gossamer.run(gossamer.Experiment.of(settings, folder), folder / "runs")
            if rounds is not None:
                lines.append("resumed")
                run = gossamer.resume(run.path, [f"stop.rounds={EXPERIMENTS[base]['stop']['rounds']}"])
        except gossamer.RunFailed as error:
            run = gossamer.load_run(error.folder or folder)
        traced = _with_the_end_sorted(lines)
    traced.append(f"{run.status} {run.error or ''}".rstrip())
    for row in run.events.sort("time_s", "node", "event", maintain_order=True).to_dicts():
        time_ns = round((row["time_s"] or 0) * 1e9)
        traced.append(f"{time_ns} {row['node']} event {row['event']} {row['detail'] or ''}".rstrip())
    for row in run.metrics.sort(golden_hashes.ORDER, maintain_order=True).to_dicts():
        counts = [row[column] for column in golden_hashes.COUNTED if column in row]
        traced.append(f"{round(row['time_s'] * 1e9)} row {counts}")
    return _PLACE.sub("", "\n".join(traced)) + "\n"


def _with_the_end_sorted(lines: Sequence[str]) -> list[str]:
    """The tasks that the end of a run cancels are cancelled in no particular order."""
    last = len(lines)
    while last and lines[last - 1].endswith("CancelledError"):
        last -= 1
    return [*lines[:last], *sorted(lines[last:])]


def recorded(name: str) -> str:
    """A trace on record."""
    return gzip.decompress((RECORDED / f"{name}.txt.gz").read_bytes()).decode()


def traces(folder: Path) -> dict[str, str]:
    """The traces of all experiments."""
    for file, text in FILES.items():
        (folder / file).write_text(text)
    return {name: trace(name, folder) for name in (*OF_GOLDEN, *OWN)}


def first_difference(before: str, now: str, around: int = 5) -> str:
    """Where two traces first differ, with some lines before and after; empty if they are equal."""
    if before == now:
        return ""
    old, new = before.splitlines(), now.splitlines()
    place = next(
        (k for k, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]),
        min(len(old), len(new)),
    )
    shown = [f"  {line}" for line in old[max(place - around, 0) : place]]
    shown += [f"- {line}" for line in old[place : place + around]]
    shown += [f"+ {line}" for line in new[place : place + around]]
    return "\n".join([f"line {place + 1} of {len(old)}:", *shown])


def main(folder: str | None = None) -> None:
    """Write the traces into a folder; without one, record them and say what has changed."""
    with tempfile.TemporaryDirectory() as runs:
        now = traces(Path(runs))
    if folder is not None:
        for name, text in now.items():
            (Path(folder) / f"{name}.txt").write_text(text)
        return
    RECORDED.mkdir(exist_ok=True)
    for name, text in now.items():
        file = RECORDED / f"{name}.txt.gz"
        if not file.exists() or recorded(name) != text:
            print(f"{name}: {first_difference(recorded(name), text) if file.exists() else 'new'}")
            file.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
