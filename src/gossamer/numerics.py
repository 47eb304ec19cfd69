"""The mode of the matrix kernels, on which the bits of a run depend.

Intel's MKL, with which torch multiplies matrices, may add in another order at another memory alignment; on some processors
it does. Conditional numerical reproducibility rules that out: with ``MKL_CBWR`` in the environment before MKL is first used,
the bits of a product depend on its operands, the mode and the processor alone.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

VARIABLE = "MKL_CBWR"
DEFAULT = "AUTO"
"""The fastest kernels of the processor whose bits do not depend on alignment."""

_torch_came_first = False


def set_default_mode() -> None:
    """Set MKL's mode for this process and those that it starts, unless the user has chosen one."""
    global _torch_came_first
    if VARIABLE not in os.environ:
        _torch_came_first = "torch" in sys.modules
        os.environ[VARIABLE] = DEFAULT


def warning() -> str | None:
    """One line where the mode was set too late to be sure that it holds; None otherwise."""
    if not _torch_came_first:
        return None
    return (
        "torch was imported before gossamer: the bits of this run may depend on the machine; import gossamer first, or set"
        f" {VARIABLE}={DEFAULT} in the environment"
    )


def describe() -> dict[str, Any]:
    """The processor, and all settings on which bits depend, for the record of a run."""
    import torch

    return {
        "processor": _processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "mode": os.environ.get(VARIABLE, ""),
        "mode_is_certain": not _torch_came_first,
        "settings": {
            name: os.environ[name]
            for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
            if name in os.environ
        },
    }


def summary(described: dict[str, Any]) -> str:
    """What :func:`describe` found, in one line."""
    parts = [described["processor"], f"{described['vectors']} kernels", f"{VARIABLE}={described['mode']}"]
    parts += [f"{name}={value}" for name, value in described["settings"].items()]
    if not described["mode_is_certain"]:
        parts.append("set after torch was imported")
    return ", ".join(parts)


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
