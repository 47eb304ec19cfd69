"""Which files a process has open, and how many it may open."""

from __future__ import annotations

import os
import resource

from gossamer.errors import BadInput
from gossamer.runtime.setup import Setup

SPARE_DESCRIPTORS = 64
"""Open files that are neither channels nor connections."""


def raise_descriptor_limit(setup: Setup, channels: int = 0) -> None:
    """Let this process and those that it forks open as many files as the system allows.

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
    """Connections that a node may come to have: one each way with whomever it ever talks to, for none is closed before
    the run's end."""
    nodes, topology = setup.experiment.nodes, setup.topology
    if topology.sampled or not topology.static or setup.experiment.algorithm.reaches_all():
        return 2 * (nodes - 1)
    graph = topology.graph(0)
    return max(len(graph.neighbors(rank, "in")) + len(graph.neighbors(rank, "out")) for rank in range(nodes))


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor from 3 up that is not to be kept (in a child, what its parent had open)."""
    low = 3
    for descriptor in sorted(keep):
        if descriptor >= low:
            os.closerange(low, descriptor)
            low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
