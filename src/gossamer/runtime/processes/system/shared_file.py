"""A file that a process shares with those that it starts."""

from __future__ import annotations

import os
import tempfile


def shared_file() -> int:
    """A file without a name, in memory where the system can; gives its descriptor, which children may
    inherit."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gossamer", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.set_inheritable(descriptor, True)
    return descriptor
