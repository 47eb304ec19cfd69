"""The command line: parse, call the API, print. One file for each command, or for a few that belong together.

Nothing here imports torch before a command needs it: help must not wait for it.
"""

from gossamer.cli.program import app, main

__all__ = ["app", "main"]
