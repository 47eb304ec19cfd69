"""The hosts file: machines that nodes can be started on.

::

    ssh: ssh -o ConnectTimeout=20       how a command gets to a host: called with the host's name and the command
    hosts:
    - name: alice                       what ssh is told
      address: 10.0.0.1                 where other nodes find its nodes; default: the name
      slots: 2                          how many nodes it may have
      port: 29600                       of its first node; the next ones count on from there
      command: venv/bin/gossamer        how gossamer is called there; relative to the home folder, as workdir
      workdir: gossamer-runs
      data_root: /data                  the experiment's, there
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gossamer.config.mappings import read_mapping
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput
from gossamer.runtime.processes.security.peers import parse_address

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=3"
"""It asks nothing, and gives up hosts that don't answer."""


class Host(BaseModel):
    """One machine; see the module's example.

    Args:
        name: what ssh is told.
        address: where other nodes find its nodes; null is the name.
        slots: how many nodes it may have.
        port: of its first node.
        command: how gossamer is called there, as a shell would read it.
        workdir: where what the nodes need and record lies, until it is collected.
        data_root: the experiment's ``data_root`` there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, pattern=r"^[^-\s]\S*$")
    address: str | None = None
    slots: int = Field(default=1, ge=1, strict=True)
    port: int = Field(default=29_600, ge=1, le=65_535, strict=True)
    command: str = "gossamer"
    workdir: str = Field(default="gossamer-runs", min_length=1)
    data_root: str | None = None

    @model_validator(mode="after")
    def _can_be_dialled(self) -> Host:
        parse_address(self.endpoint(self.slots - 1))
        return self

    def endpoint(self, slot: int) -> str:
        """The address of one of its nodes, "host:port"."""
        host = self.address or self.name.rpartition("@")[2]
        return f"[{host}]:{self.port + slot}" if ":" in host else f"{host}:{self.port + slot}"


class Hosts(BaseModel):
    """A whole file.

    Args:
        ssh: the command that takes a host's name and a command, and carries it out there.
        hosts: in the order in which they are filled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ssh: str = SSH
    hosts: tuple[Host, ...]

    @field_validator("ssh")
    @classmethod
    def _is_command(cls, value: str) -> str:
        if not shlex.split(value):
            raise ValueError("a command, such as ssh -o BatchMode=yes")
        return value

    @classmethod
    def load(cls, path: str | Path) -> Hosts:
        """Read a hosts file.

        Raises:
            BadInput: for a missing file, and anything in it that can't be used.
        """
        try:
            found = cls.model_validate(
                read_mapping(path, "a YAML hosts file", "a mapping with the list 'hosts'")
            )
        except ValidationError as error:
            raise bad_input(error, cls, str(path)) from None
        if not found.hosts:
            raise BadInput(f"{path}: hosts: none; accepted: at least one")
        twice = [name for name, count in Counter(host.name for host in found.hosts).items() if count > 1]
        if twice:
            raise BadInput(f"{path}: hosts: {twice[0]} stands there twice; accepted: once, with more slots")
        return found

    def place(self, nodes: int) -> list[tuple[Host, int]]:
        """The host of each rank, and its place there: hosts are filled one after the other.

        Raises:
            BadInput: where there are fewer slots than nodes.
        """
        slots = list(self._slots())
        if len(slots) < nodes:
            raise BadInput(f"hosts: {len(slots)} slots for {nodes} nodes; accepted: at least {nodes}")
        return slots[:nodes]

    def _slots(self) -> Iterator[tuple[Host, int]]:
        for host in self.hosts:
            yield from ((host, slot) for slot in range(host.slots))
