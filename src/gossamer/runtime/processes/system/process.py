"""Processes and the system: ending together, shared files, and limits on open files.

It imports nothing large: the process that starts the others has imported nothing else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import tempfile
from typing import TYPE_CHECKING

from gossamer.errors import BadInput

if TYPE_CHECKING:
    from gossamer.runtime.setup import Setup

SPARE_DESCRIPTORS = 64
"""Open files that are neither channels nor connections."""
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent dies (Linux; elsewhere the closed channel tells).

    Args:
        parent: the parent's process id, so that a parent that is dead already is noticed.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def describe_exit(status: int) -> str:
    """A wait status in words: "killed by SIGKILL", "exit code 1"."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def shared_file() -> int:
    """The descriptor of a file without a name, in memory where the system can; children may inherit it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gossamer", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.set_inheritable(descriptor, True)
    return descriptor


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor from 3 up that is not to be kept (in a child, what its parent had open)."""
    low = 3
    for descriptor in sorted(keep):
        if descriptor >= low:
            os.closerange(low, descriptor)
            low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def raise_descriptor_limit(setup: Setup, channels: int = 0) -> None:
    """Let this process and its children open as many files as the system allows.

    Args:
        setup: what is run.
        channels: to nodes' processes, which this one holds.

    Raises:
        BadInput: if that is fewer than the channels, or than the connections of a node.
    """
    nodes, links = setup.experiment.nodes, _most_links(setup)
    needed = max(channels, links) + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BadInput(
            f"nodes: {nodes} processes with up to {links} connections each need {needed} open files in one process;"
            f" accepted: what fits into the hard limit, {hard} (ulimit -Hn), or a higher limit"
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _most_links(setup: Setup) -> int:
    """Connections that a node may come to have: one each way with every node that it ever talks to."""
    nodes, topology = setup.experiment.nodes, setup.topology
    if topology.sampled or not topology.static or setup.experiment.algorithm.reaches_all():
        return 2 * (nodes - 1)
    graph = topology.graph(0)
    return max(len(graph.neighbors(rank, "in")) + len(graph.neighbors(rank, "out")) for rank in range(nodes))
