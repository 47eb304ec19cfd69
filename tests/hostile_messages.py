"""One honest message of each kind that a member of a run sends, and its hostile variants, as plain values on the wire."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from gossamer.messages.tags import COUNTERS, Traffic
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.protocol import NodeReport, Values

TRAFFIC = Traffic(**dict.fromkeys(COUNTERS, 3))
VALUES = Values(2, 4, 1.5, 1.75, 0.25, 0.5, 0.125, 0.25, 0.5, None, None)

COMPUTER: protocol.Computer = {
    "python": "3.11.2",
    "platform": "Linux",
    "machine": {"host": "alice", "architecture": "x86_64", "cpus": 2, "gpus": 0},
    "numerics": {"processor": "Xeon", "kernels": "AVX2", "mkl": None, "settings": {"MKL": "AUTO"}},
    "packages": {"numpy": "2.4.6"},
}
OF_NODES: list[protocol.FromProcess] = [
    protocol.Ready("127.0.0.1", 4001),
    protocol.Progress(2, 1.5, TRAFFIC, ["tag 2 from ranks [1]"]),
    protocol.Row(
        2, VALUES, TRAFFIC, {"test_loss": 0.5, "words": "one\ntwo", "list": [1, [2.0]]}, None, [0, 1]
    ),
    protocol.Row(("tick", 3), VALUES, TRAFFIC, {}, bytearray(12)),
    protocol.Row("end", VALUES, TRAFFIC, {}, None),
    protocol.Done(2),
    protocol.FinalModel(2, bytearray(12), 4096),
    protocol.Failed("node 0 failed in round 2: it can't", 2, "Traceback"),
    protocol.Crashing(0),
    protocol.Event("slow", "3 of 4 computations took longer"),
    protocol.CurrentRound(1, 2),
    protocol.Unreachable(1, "silent for 4 s"),
    protocol.Reached(1),
    protocol.Marked(1, {1: 5}),
    protocol.Saved(1, 2, 1.5, None),
    protocol.Saved(None, 2, 1.5),
    protocol.Exited("exit code 0"),
]
OF_WORKERS: list[protocol.FromWorker] = [
    *(NodeReport(0, 0, message, {}) for message in OF_NODES),
    protocol.Preparing("compiles kernels"),
    protocol.Prepared(),
    protocol.Prepared(COMPUTER, ["data/a.csv"]),
    protocol.Differs(["module labs"]),
    protocol.Refused(["task: unknown"]),
    protocol.Leaving(),
    protocol.Acknowledge(3),
]
OF_STRANGERS = [protocol.JoinRequest("0.1.0", "name", 2, 0, b"nonce", b"proof")]

DEEP = b"\x91" * 100_000 + b"\xc0"
"""A hundred thousand lists, one inside the other."""
HOSTILE: dict[type, list[Any]] = {
    int: [-1, 2**63, 2**64 - 1, 1.5, "1", None, b"", [], {}],
    float: [-1.0, math.nan, math.inf, 1e300, "1.0", b"", [], {}],
    str: ["x" * 10**5, 1, 1.5, b"text", [], {}],
    bytes: [1, 1.5, [], {}],
    list: [1, 1.5, b"", {}, [[]] * 10, ["x"] * 10**4, [b""], [-1]],
    dict: [1, 1.5, b"", [], {-1: 1}, {b"": b""}, {"x": {b"": 1}}],
    bool: [1.5, "true", [], {}],
    type(None): [b"" * 3, -1, "x" * 10**5, {}],
}
"""By the type of an honest value: what may not stand in its place."""


def plain(message: Any) -> Any:
    """A message as lists and values, which can be changed."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value in nested lists and mappings, with its place. (The first entry of a list may be the kind of the
    message.)"""
    yield path, value
    if isinstance(value, list | dict):
        for k, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, k))


def replaced(value: Any, path: tuple[Any, ...], item: Any) -> Any:
    """A copy of nested lists and mappings with another item at one place."""
    if not path:
        return item
    copy: Any = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], item)
    return copy
