"""What a command says of a run that it has carried out."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gossamer.errors import BadInput

if TYPE_CHECKING:
    from gossamer.results.run import Run
    from gossamer.results.tidy import Final


def write_page(done: Run) -> Path | None:
    """The page of a run, in its folder; None, and a line that says why, where it can't be written."""
    from gossamer.results.report import write_report

    try:
        return write_report([done], done.path / "report.html")
    except BadInput as error:  # the run is done, whatever is missing for the page
        typer.echo(f"no report: {error}", err=True)
        return None


def as_data(done: Run, page: Path | None) -> dict[str, Any]:
    """A run for programs."""
    from gossamer.results.tidy import final_summary

    return {"run": done.path, "report": page, **asdict(final_summary(done))}


def print_summary(done: Run, page: Path | None, round_: int) -> None:
    """A run for people; ``round_`` is the last one that was seen of it."""
    from gossamer.progress import megabytes
    from gossamer.results.checkpoints import newest
    from gossamer.results.tidy import ASYNCHRONY, final_summary

    summary = final_summary(done)
    lines = {}
    if done.status == "stopped":
        of = f" of {rounds}" if (rounds := done.experiment["stop"]["rounds"]) else ""
        at = max(round_, summary.rounds or 0)
        lines["STOPPED"] = f"at round {at}{of}, before the end; what follows is what was recorded until then"
    if done.lost:
        lines["status"] = done.outcome
    lines |= {
        name.replace("_", " "): _spread(final)
        for name, final in summary.metrics.items()
        if name not in ASYNCHRONY
    }
    clock = "virtual time" if done.experiment["engine"]["name"] == "simulate" else "time"
    lines |= {
        clock: f"{summary.time_s or 0:.4g} s",
        "wall time": f"{summary.wall_s or 0:.1f} s",
        "sent": megabytes(summary.bytes_sent or 0),
    }
    if done.private_bytes is not None:
        mean, most = (done.private_bytes[name] / 2**20 for name in ("mean", "max"))
        lines["private memory"] = f"{mean:.1f} MiB a node, {most:.1f} at most"
    lines["run"] = str(done.path)
    if page is not None:
        lines["report"] = str(page)
    if done.status == "stopped" and newest(done.path / "checkpoints") is not None:
        lines["to go on"] = f"gossamer resume {done.path}"
    for name, text in lines.items():
        typer.echo(f"{name:20} {text}")


def print_profile(done: Run) -> None:
    """Where the time of a run went, and the peak of memory."""
    wall_s = done.wall_s or 0.0
    parts = done.profile
    if parts:
        parts["events"] = wall_s - sum(parts.values())
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        typer.echo(f"{name:20} {seconds:.2f} s ({100 * seconds / max(wall_s, 1e-9):.0f} %)")
    if done.peak_vectors is not None:
        share = done.peak_vectors / done.nodes
        typer.echo(f"{'vectors at the peak':20} {done.peak_vectors} ({share:.1f} a node)")
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    # Linux counts in KiB, macOS in bytes.
    typer.echo(f"{'peak memory':20} {peak / (2**20 if sys.platform != 'darwin' else 2**30):.2f} GiB")


def _spread(final: Final) -> str:
    from gossamer.progress import numerals

    mean, std = numerals(final.mean, final.std)
    return f"{mean}, std {std} over {final.count} nodes" if final.count > 1 else mean
