"""An experiment's network as commands for the kernel's traffic control (tc), for one node of it.

Its uplink is a class of HTB; in it each peer has a class, as fast as the path to it, and netem there delays and
loses what is for that peer. A downlink limits each of its senders, but not all of them together.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from pathlib import Path

from gossamer.config import Experiment
from gossamer.errors import BadInput
from gossamer.runtime.processes.security.peers import Peers

_UNLIMITED_BIT = 10e9
_QUEUE_PACKETS = 10_000
"""Packets that are under way on a path, so that netem's delay drops none."""


def write_tc(experiment: Experiment, peers: Peers, folder: Path, device: str = "eth0") -> list[Path]:
    """Write a file of commands for each node of a peers file, ``node-<rank>.tc``.

    Args:
        experiment: whose network it is, as it is at the start.
        peers: where the nodes are.
        folder: where the files go; made where it is missing.
        device: the network device of their machines.

    Raises:
        BadInput: for nodes that are not at an IPv4 address each, and for another number of nodes than the experiment has.
    """
    if len(peers) != experiment.nodes:
        raise BadInput(f"nodes: {experiment.nodes}, but the peers file has {len(peers)}; accepted: as many")
    hosts = [host for host, _ in peers.addresses]
    for rank, host in enumerate(hosts):
        if not _is_ipv4(host) or hosts.count(host) > 1:
            raise BadInput(
                f"node {rank}: at {host}; accepted: an IPv4 address of its own, by which the kernel tells nodes apart (where"
                " several are on one machine, gossamer node --shape)"
            )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rank in range(experiment.nodes):
        lines = tc_commands(experiment, rank, hosts, device)
        written.append(folder / f"node-{rank}.tc")
        written[-1].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return written


def _is_ipv4(host: str) -> bool:
    try:
        return bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False


def tc_commands(experiment: Experiment, rank: int, hosts: Sequence[str], device: str = "eth0") -> list[str]:
    """What ``tc -batch`` is to read, a line each.

    Args:
        experiment: whose network it is, as it is at the start.
        rank: the node.
        hosts: IPv4 addresses of all nodes.
        device: the node's network device.
    """
    nodes = experiment.nodes
    conditions = experiment.network.conditions(nodes, experiment.seed)
    uplink = float(conditions.rates[rank])
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:1 htb {_rate(uplink)} quantum 60000",
    ]
    for to in range(nodes):
        if to == rank:
            continue
        path = conditions.path(rank, to)
        limits = [] if path is None else [path.rate, *(float(conditions.rates[link]) for link in path.links)]
        rate = min([uplink, *limits])
        share = min(rate, (uplink if math.isfinite(uplink) else _UNLIMITED_BIT / 8) / nodes)
        place = f"1:{to + 2:x}"
        if path is None:
            quality = "loss 100%"
        else:
            quality = f"delay {1e6 * path.latency_s:.0f}us"
            quality += f" {1e6 * path.jitter_s:.0f}us distribution normal" if path.jitter_s else ""
            quality += f" loss {100 * path.loss:.6g}%" if path.loss else ""
        lines += [
            f"class add dev {device} parent 1:1 classid {place} htb {_rate(share)} {_rate(rate, 'ceil')} quantum 1514",
            f"qdisc add dev {device} parent {place} netem limit {_QUEUE_PACKETS} {quality}",
            f"filter add dev {device} parent 1: protocol ip u32 match ip dst {hosts[to]}/32 flowid {place}",
        ]
    return lines


def _rate(bytes_per_second: float, word: str = "rate") -> str:
    bits = min(8 * bytes_per_second, _UNLIMITED_BIT)
    return f"{word} {max(bits, 8):.0f}bit"
