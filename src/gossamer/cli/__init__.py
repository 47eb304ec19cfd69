"""The command line: parse, call the API, print.

Modules that need torch are imported inside the commands, so that ``--help`` does not wait for it.
"""

from gossamer.cli.program import app, main

__all__ = ["app", "main"]
