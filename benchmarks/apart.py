"""Measurements in separate processes, which share nothing but the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def answer(code: str) -> Any:
    """Run code in a process that can import the benchmarks. Returns its last printed line, parsed as JSON."""
    [result] = answers(code, 1)
    return result


def answers(code: str, count: int) -> list[Any]:
    """The answers of several processes that run the same code at once.

    Raises:
        SystemExit: when one of them fails.
    """
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    outputs = [process.communicate()[0] for process in running]
    for process in running:
        if process.returncode:
            raise SystemExit(f"{code}: exit code {process.returncode}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]
