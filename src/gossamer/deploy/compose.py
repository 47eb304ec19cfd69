"""A folder for Docker Compose: one container is one node, and its link is shaped where containers may do so."""

from __future__ import annotations

import ipaddress
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

import yaml

from gossamer.config import Experiment
from gossamer.deploy.bundle import EXPERIMENT, KEYS, PEERS, Bundle
from gossamer.deploy.package import FOLDER, Package
from gossamer.deploy.shaping import tc_commands
from gossamer.errors import BadInput
from gossamer.runtime.processes.security.keys import make_keys
from gossamer.runtime.processes.security.peers import Peer, Peers

PORT = 29_600
SHARED = "experiment"
"""The folder of what all containers may read; keys are elsewhere."""
SUBNET = "172.28.0.0/16"
_FIRST_HOST = 10
"""Of the subnet's addresses the first node's; Docker takes the first ones for itself."""

_DOCKERFILE = """\
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends iproute2 && rm -rf /var/lib/apt/lists/*
{copy}# What pip is told to install: a folder or file (./...), a version, or git+https://...
ARG GOSSAMER={requirement}
RUN pip install --no-cache-dir "$GOSSAMER"
COPY entry.sh /usr/local/bin/entry.sh
ENTRYPOINT ["sh", "/usr/local/bin/entry.sh"]
"""

_ENTRY = """\
#!/bin/sh
# What a node's container does: shape its link, take its key, be the node. RANK is the first argument; RUN, where it is
# set, tells this run from others of the same folder.
set -eu
rank=$1
here=${EXPERIMENT_FOLDER:-/experiment}
if [ -f "$here/links/node-$rank.tc" ]; then
    tc -force -batch "$here/links/node-$rank.tc" ||
        echo "the link is not shaped, or not in all: tc may not (cap_add: NET_ADMIN), or the kernel can't" >&2
fi
# A key must be its user's alone, whoever owns the file outside.
keys=$(mktemp -d)
(umask 077 && cp "${KEY_FOLDER:-/keys}/node-$rank.pem" "$keys/")
umask 022
cd "$here"
exec gossamer node experiment.yaml --rank "$rank" --peers peers.yaml --keys "$keys" --out "${RECORDS:-/records}" \\
    --run "${RUN:-}"
"""


def write_compose(
    experiment: Experiment,
    folder: str | Path,
    *,
    subnet: str = SUBNET,
    more: Iterable[str | Path] = (),
    wheel: str | Path | None = None,
) -> list[Path]:
    """Make the folder; ``docker compose up`` in it runs the experiment, into ``records``, which are to be collected.

    Args:
        experiment: what is run.
        folder: where to; must not be there.
        subnet: of the containers, IPv4.
        more: further files and folders for the nodes' working directory.
        wheel: what the containers install, see :meth:`gossamer.deploy.package.Package.of`.

    Returns:
        What was written, but for the keys and what is installed.

    Raises:
        BadInput: for a folder that is there, a subnet that is too small, or a wheel that is none.
    """
    place = Path(folder)
    if place.exists():
        raise BadInput(f"--out {place}: there already; accepted: a new folder")
    hosts = _hosts(subnet, experiment.nodes)
    package, bundle = Package.of(wheel), Bundle(experiment, more)
    if _limits(experiment):
        for rank in range(experiment.nodes):
            lines = tc_commands(experiment, rank, hosts)
            bundle.put(f"links/node-{rank}.tc", "".join(f"{line}\n" for line in lines).encode())
    bundle.write(place / SHARED)
    certificates = make_keys(place / KEYS, range(experiment.nodes))
    rows = [Peer.of(rank, f"{hosts[rank]}:{PORT}", der) for rank, der in certificates.items()]
    Peers(rows).save(place / SHARED / PEERS)
    texts = {
        "Dockerfile": _dockerfile(package),
        "entry.sh": _ENTRY,
        "compose.yaml": compose_yaml(experiment, hosts, subnet),
    }
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")
    for name, file in package.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place / name)
    (place / "records").mkdir()
    return [*(place / name for name in texts), place / SHARED / EXPERIMENT, place / SHARED / PEERS]


def _dockerfile(package: Package) -> str:
    if not package.files:
        return _DOCKERFILE.format(copy="", requirement=package.requirement)
    copy = f"WORKDIR /tmp\nCOPY {FOLDER} {FOLDER}\n"
    return _DOCKERFILE.format(copy=copy, requirement=f"./{package.requirement}")


def compose_yaml(experiment: Experiment, hosts: list[str], subnet: str = SUBNET) -> str:
    """The Compose file: a service for each node, and a ``RUN`` for all of them where none is set."""
    run = secrets.token_hex(16)
    services = {
        f"node-{rank}": {
            "image": "gossamer",
            "build": ".",
            "command": [str(rank)],
            "environment": {"RUN": f"${{RUN:-{run}}}"},
            "cap_add": ["NET_ADMIN"],
            "networks": {"links": {"ipv4_address": host}},
            "volumes": [
                f"./{SHARED}:/experiment:ro",
                f"./{KEYS}/node-{rank}.pem:/keys/node-{rank}.pem:ro",
                "./records:/records",
            ],
            "stop_grace_period": "60s",
        }
        for rank, host in enumerate(hosts)
    }
    networks = {"links": {"ipam": {"config": [{"subnet": subnet}]}}}
    said = {"name": experiment.name.lower().replace(".", "-"), "services": services, "networks": networks}
    return str(yaml.safe_dump(said, sort_keys=False))


def _hosts(subnet: str, nodes: int) -> list[str]:
    try:
        network = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        raise BadInput(f"--subnet: got {subnet!r} ({error}); accepted: such as {SUBNET}") from None
    if network.num_addresses < nodes + _FIRST_HOST + 1:
        raise BadInput(f"--subnet: {subnet} has no room for {nodes} nodes; accepted: a larger one")
    return [str(network[_FIRST_HOST + rank]) for rank in range(nodes)]


def _limits(experiment: Experiment) -> bool:
    """Whether the network does anything to a message."""
    conditions = experiment.network.conditions(experiment.nodes, experiment.seed)
    return conditions.common_latency() != 0 or bool((conditions.rates < float("inf")).any())
