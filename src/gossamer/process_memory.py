"""The memory that this process may still use, and the memory that a process uses."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Bytes of memory available on this machine and in its control group; None if unknown."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(available, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return available


def private_bytes(pid: int | None = None) -> int | None:
    """Bytes of memory that a process (None: this one) shares with no other; None if unknown (not Linux)."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    # "Private_Dirty:     12345 kB"
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
