"""Runs golden experiments and hashes their results.

``python golden_hashes.py ENGINE OUT`` runs all of them, to be called in the environment of :func:`environment`, and
writes ``OUT/hashes.json``. Facts don't depend on the rounding of floating-point kernels; numbers and models are bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from golden_experiments import BASE, EXPERIMENTS, FAILING, FILES, RESUMED, SYNCHRONOUS

RECORDED = Path(__file__).with_name("recorded")
"""A file for each kind of machine, named after the bits that it computes (``probe``)."""

COUNTED = (
    *(
        "node",
        "round",
        "step",
        "moment",
        "bytes_sent",
        "bytes_received",
        "messages_sent",
        "messages_received",
    ),
    *("messages_cancelled", "messages_lost", "messages_late", "messages_superseded", "messages_taken"),
)
TIMED = (
    *("time_s", "staleness_s", "staleness_max_s", "idle_share", "uplink_share", "downlink_share"),
    *("start_s", "end_s"),
)
"""Sums of virtual times, rounded to nanoseconds, so that the last bit of a logarithm doesn't matter."""
REAL = ("wall_s",)
NEWER = ("messages_refused", "messages_unsent", "network_bytes")
"""Columns missing from the record; no message of these experiments is refused."""
EVENTS = ("time_s", "node", "event")
INTERVALS = ("node", "kind", "start_s", "end_s", "to", "bytes")
ORDER = ("node", "round", "time_s", "moment")


def environment() -> dict[str, str]:
    """This environment, with libraries restricted to baseline x86-64 instructions and one thread."""
    return {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Prescott",
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    }


def measured(
    engine: str, out: Path, names: Iterable[str] = (), changes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Hashes from a separate process: ``probe``, ``torch`` and ``experiments``.

    Args:
        engine: ``simulate`` or ``processes``.
        out: a folder for the runs.
        names: names of the experiments; by default all of the engine.
        changes: changes to the environment.
    """
    command = [sys.executable, "-W", "error", __file__, engine, str(out), *names]
    done = subprocess.run(
        command, env={**environment(), **(changes or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}\n{done.stderr}")
    return dict(json.loads((out / "hashes.json").read_text()))


def digest(value: Any) -> str:
    """Hash of bytes, or of anything that JSON can hold."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def probe() -> str:
    """Hash of typical training computations on fixed inputs; another processor may round differently."""
    import numpy as np
    import torch
    from torch.nn import functional

    def numbers(*shape: int) -> torch.Tensor:
        count = int(np.prod(shape))
        return (torch.arange(count) * 7919 % 1009 - 504).to(torch.float32).reshape(shape) / 97

    torch.set_num_threads(1)
    images, kernels = numbers(3, 2, 9, 9), numbers(4, 2, 3, 3).requires_grad_()
    convolved = functional.conv2d(images, kernels, padding=1)
    (slope,) = torch.autograd.grad(convolved.square().mean(), [kernels])
    wide = numbers(8, 65)
    results = [
        numbers(33, 65) @ numbers(65, 17),
        torch.bmm(numbers(4, 8, 65), numbers(4, 65, 10)),
        convolved.detach(),
        slope,
        functional.max_pool2d(images, 2),
        functional.group_norm(numbers(3, 4, 5, 5), 2),
        functional.batch_norm(wide, None, None, training=True),
        functional.log_softmax(wide, 1),
        wide.exp(),
        wide.abs().add(1).log(),
        wide.abs().sqrt(),
        wide.sum(0),
        wide.mean(),
        torch.linalg.vector_norm(wide),
        wide.clone().add_(wide, alpha=0.3).addcmul_(wide, wide, value=0.7).addcdiv_(wide, wide.abs() + 1),
        torch.lerp(wide, wide.flip(0), 0.3),
        torch.from_numpy(np.exp(wide.double().numpy())),
        torch.from_numpy(np.log1p(wide.abs().double().numpy())),
        torch.from_numpy(np.random.default_rng(1).dirichlet([0.3] * 5, 7)),
        torch.from_numpy(np.random.default_rng(2).standard_normal((9, 5)).astype("float32")),
    ]
    return digest(b"".join(tensor.contiguous().numpy().tobytes() for tensor in results))


def play(name: str, engine: str, out: Path) -> Any:
    """Run one experiment."""
    import gossamer

    base, rounds = RESUMED.get(name, (name, None))
    settings = {**BASE, "name": name, **EXPERIMENTS[base]}
    if engine == "processes":
        settings |= {"engine": {"name": engine, "trainer": "sequential"}}
    if rounds is not None:
        settings |= {"stop": {"rounds": rounds}}
    try:
        run = gossamer.run(gossamer.Experiment.of(settings, out), out / "runs")
    except gossamer.RunFailed as error:
        if name not in FAILING or error.folder is None:
            raise
        run = gossamer.load_run(error.folder)
    if rounds is None:
        return run
    return gossamer.resume(run.path, [f"stop.rounds={EXPERIMENTS[base]['stop']['rounds']}"])


def hashes(run: Any) -> dict[str, Any]:
    """The compared values of a run.

    Hashes: ``facts``, the counts and times in the metrics and the run's status; ``events``, also the timeline, the
    samples and the graphs; ``numbers``, all other metrics; ``models``, parameters and buffers. Further values: the bytes
    of a message, where all have one size, and final means.
    """
    from safetensors.torch import load_file

    metrics = run.metrics.sort(ORDER)
    judged = sorted(set(metrics.columns) - {*COUNTED, *TIMED, *REAL, *NEWER})
    nodes = metrics.filter(metrics["node"] >= 0)
    messages, sent = nodes["messages_sent"].to_list(), nodes["bytes_sent"].to_list()
    sizes = {divmod(total, count) for total, count in zip(sent, messages, strict=True) if count}
    size, rest = sizes.pop() if len(sizes) == 1 else (None, 0)
    file = run.path / "models.safetensors"
    models = load_file(file) if file.exists() else {}
    last = metrics.filter(metrics["test_loss"].is_not_null())
    last = last.group_by("node", maintain_order=True).last()
    setup = run.setup
    return {
        "facts": digest([run.status, run.away, table(metrics, [*COUNTED, *TIMED])]),
        "events": digest(
            [
                table(run.events.sort(EVENTS), EVENTS),
                table(run.timeline.sort(INTERVALS), INTERVALS),
                setup["samples"],
                setup["labels"],
                sorted(setup["graphs"].items()),
            ]
        ),
        "numbers": digest(table(metrics, ["node", "round", *judged])),
        "models": digest(b"".join(key.encode() + models[key].numpy().tobytes() for key in sorted(models))),
        "message_bytes": None if rest else size,
        "final": {
            metric: last[metric].mean()
            for metric in ("test_loss", "test_accuracy")
            if metric in last.columns and len(last)
        },
    }


def table(frame: Any, columns: Iterable[str]) -> list[list[Any]]:
    """The columns that the table has, as lists."""
    return [
        [cell(name, value) for value in frame[name].to_list()] for name in columns if name in frame.columns
    ]


def cell(name: str, value: Any) -> Any:
    """A value that JSON holds without loss; times in nanoseconds."""
    if name in TIMED:
        return None if value is None else round(value * 1e9)
    return value.hex() if isinstance(value, float) else value


def used(experiment: Mapping[str, Any]) -> set[tuple[str, str]]:
    """(kind, name) of all components that a resolved experiment names."""
    kinds = {"faults": "fault", "wrappers": "wrapper"}

    def walk(kind: str, value: Any) -> Iterable[tuple[str, str]]:
        if isinstance(value, list):
            if kind == "codec":  # the short form of a chain
                yield kind, "chain"
            for item in value:
                yield from walk(kind, item)
        elif isinstance(value, dict):
            if isinstance(value.get("name"), str):
                yield kind, value["name"]
            for field, inner in value.items():
                if field == "layers":
                    yield from walk(kind, list(inner.values()))
                else:  # a network's base is a network, a sampler's bootstrap a topology
                    inner_kind = "temperature" if (kind, field) == ("weights", "schedule") else field
                    yield from walk(kind if field in ("base", "bootstrap") else inner_kind, inner)

    return {pair for field, value in experiment.items() for pair in walk(kinds.get(field, field), value)}


def main(engine: str, folder: str, *names: str) -> None:
    """Run experiments and write their hashes."""
    import torch

    sys.path.append(str(Path(__file__).parents[1]))
    from forked import FORKER, use

    use(FORKER.popen)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for file, text in FILES.items():
        (out / file).write_text(text)
    experiments: dict[str, Any] = {}
    names_used: set[tuple[str, str]] = set()
    for name in names or (SYNCHRONOUS if engine == "processes" else [*EXPERIMENTS, *RESUMED]):
        try:
            run = play(name, engine, out)
            experiments[name] = hashes(run)
            names_used |= used(run.experiment)
        except Exception:  # noqa: BLE001 - the others are still compared
            experiments[name] = {"error": traceback.format_exc()}
    kinds = sorted({kind for kind, _ in names_used})
    result = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "probe": probe(),
        "used": {kind: sorted(name for other, name in names_used if other == kind) for kind in kinds},
        "experiments": experiments,
    }
    (out / "hashes.json").write_text(json.dumps(result, indent=1))
    FORKER.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
