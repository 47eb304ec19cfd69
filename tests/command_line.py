"""The program as a user calls it; the fixture ``cli`` is in conftest.py."""

from __future__ import annotations

from collections.abc import Callable

Cli = Callable[..., tuple[int, str, str]]
"""Runs gossamer with the given arguments; returns exit code, stdout and stderr."""

SMALL = """
name: small
nodes: 4
task: {name: least-squares, samples: 64, features: 5}
topology: {name: ring}
algorithm: {name: d-psgd}
optimizer: {name: sgd, lr: 0.1}
batch_size: full
evaluation: {every_rounds: 2}
stop: {rounds: 4}
engine: {name: simulate, trainer: sequential}
"""
