"""Commands on other machines, through whatever carries them there."""

from __future__ import annotations

import asyncio
import shlex
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from gossamer.errors import GossamerError

_TIMEOUT_S = 120.0
"""Seconds that a command may take that prepares or tidies up."""


class RemoteError(GossamerError):
    """A host can't be reached, or does not do what it is asked to."""


class Remote:
    """One host.

    Args:
        ssh: the command that takes a host's name and a command, in words.
        name: the host's.
    """

    def __init__(self, ssh: Sequence[str], name: str) -> None:
        self._ssh, self.name = tuple(ssh), name

    async def do(self, command: str, given: bytes = b"", *, timeout_s: float = _TIMEOUT_S) -> bytes:
        """Carry a shell command out, and give what it printed.

        Args:
            command: as the host's shell reads it.
            given: its standard input.
            timeout_s: seconds after which it is given up.

        Raises:
            RemoteError: if it fails, or takes too long.
        """
        process = await self.start(command)
        try:
            async with asyncio.timeout(timeout_s):
                printed, said = await process.communicate(given)
        except BaseException as error:
            process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise RemoteError(f"host {self.name}: did not answer within {timeout_s:g} s") from None
            raise
        if process.returncode:
            text = said.decode(errors="replace").strip().splitlines()
            why = text[-1] if text else f"exit code {process.returncode}"
            raise RemoteError(f"host {self.name}: {why}")
        return printed

    async def start(self, command: str) -> Process:
        """Start a shell command; the caller reads what it prints, and ends it.

        Raises:
            RemoteError: if the command that carries it there can't be started.
        """
        try:
            return await asyncio.create_subprocess_exec(
                *self._ssh,
                self.name,
                command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,  # Ctrl-C at the terminal is this process's to handle
                limit=1 << 20,
            )
        except OSError as error:
            raise RemoteError(f"{shlex.join(self._ssh)}: {error.strerror}") from None
