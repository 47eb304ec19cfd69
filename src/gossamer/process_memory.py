"""The memory that this process may still use, and the memory that a process uses."""

from __future__ import annotations

from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
"""The control group of a container, if it has one (cgroup v2)."""


def available_bytes() -> int | None:
    """Bytes of memory available on this machine, in its control group and below the limit of this process's address space
    (``ulimit -v``); None if unknown."""
    available, addresses = _unused_bytes(), _unused_addresses()
    return available if available is None or addresses is None else min(available, addresses)


def _unused_addresses() -> int | None:
    """Bytes that this process may still map; None without a limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return max(limit - pages * resource.getpagesize(), 0)


def _unused_bytes() -> int | None:
    """Bytes of memory available on this machine and in its control group; None if unknown."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return None
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return available
    # Files that were read are kept in memory, and count, until it is needed for something else.
    cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return max(min(available, limit - used + cached), 0)


def private_bytes(pid: int | None = None) -> int | None:
    """Bytes of memory that a process (None: this one) shares with no other; None if unknown (not Linux)."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    # "Private_Dirty:     12345 kB"
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
