"""The mode of the matrix kernels, on which the bits of a run depend.

Intel's MKL, with which torch multiplies matrices, may change the order of additions with the memory
alignment; on some processors it does. Conditional numerical reproducibility prevents this: if ``MKL_CBWR`` is
set in the environment before MKL is first used, the bits of a product depend only on its operands, the number
of threads, the mode and the processor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "MKL_CBWR"
DEFAULT = "AUTO"
"""The fastest kernels of the processor whose bits do not depend on alignment."""

_OFF, _ALL = 1, -1
"""MKL's numbers for "bits may depend on alignment", and for "the mode with all of its options"."""
_SETTINGS = (
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)

_torch_imported_first = False


def set_default_mode() -> None:
    """Set the modes of MKL and cuBLAS for this process and its child processes, unless the user has chosen
    them."""
    global _torch_imported_first
    if VARIABLE not in os.environ:
        _torch_imported_first = "torch" in sys.modules
        os.environ[VARIABLE] = DEFAULT
    # With its default workspaces, cuBLAS may not reproduce its bits on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def mode() -> str | None:
    """MKL's mode in this process, such as "AUTO", or "off" if bits may depend on alignment; None if torch has
    no MKL."""
    import ctypes
    from pathlib import Path

    import torch

    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        get_mode = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_cbwr_get
    except (OSError, AttributeError):  # not found: MKL has read the variable, unless it was used before
        return "off" if _torch_imported_first else os.environ.get(VARIABLE) or "off"
    return "off" if get_mode(_ALL) == _OFF else os.environ.get(VARIABLE, DEFAULT)


def warning() -> str | None:
    """One line if the bits of this process may depend on memory alignment; None otherwise."""
    if mode() != "off":
        return None
    return (
        "bits may depend on memory alignment, and so differ between two runs on this machine: import gossamer before the"
        f" first computation with torch, or set {VARIABLE}={DEFAULT} in the environment"
    )


@contextmanager
def repeatable(device: str) -> Iterator[None]:
    """Make torch deterministic on a GPU, in full float32 precision, and restore its settings afterwards. A nondeterministic
    operation gives a warning. (:func:`set_default_mode` sets the workspace of cuBLAS.) Nothing changes for a CPU."""
    import torch

    if device == "cpu":
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    memory: Any = torch.utils.deterministic
    before = matmul.allow_tf32, memory.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        try:
            matmul.allow_tf32 = False
            memory.fill_uninitialized_memory = False  # nothing reads uninitialized memory
            torch.set_deterministic_debug_mode("warn")
            yield
        finally:
            matmul.allow_tf32, memory.fill_uninitialized_memory = before[:2]
            torch.set_deterministic_debug_mode(before[2])


def describe(*, computes_here: bool = True) -> dict[str, Any]:
    """The processor and the modes of its kernels, for the record of a run that computes in this process or in
    its child processes."""
    import torch

    return {
        "processor": _processor(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "mkl": mode() if computes_here else os.environ.get(VARIABLE) or "off",
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def summary(described: dict[str, Any]) -> str:
    """The findings of :func:`describe` in one line."""
    parts = [described["processor"], f"{described['kernels']} kernels"]
    if described["mkl"] is not None:
        parts.append(f"{VARIABLE}={described['mkl']}")
    return ", ".join(parts + [f"{name}={value}" for name, value in described["settings"].items()])


def _processor() -> str:
    import platform
    from pathlib import Path

    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
