"""An algorithm that writes into a vector of its model fails at once, and the error names the line, under both engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ALGORITHM = """
from gossamer import Algorithm, Node

class Careless(Algorithm):
    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            {first}
            {second}
            peers = await node.neighbors(r)
            node.broadcast(peers, node.model, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))
"""
FIRST, SECOND, NEXT = 8, 9, 11  # line numbers; NEXT is the next call that reads the model
EXPERIMENT = """
nodes: 3
task: {name: least-squares, features: 4, samples: 40}
topology: complete
algorithm: "careless:Careless"
batch_size: full
evaluation: {every_rounds: null}
stop: {rounds: 2}
"""


@pytest.mark.parametrize(
    ("engine", "first", "second", "line"),
    [
        ("processes", "node.parameters -= 0.5", "pass", FIRST),
        ("simulate", "node.parameters -= 0.5", "pass", FIRST),
        ("simulate", "node.parameters.mul_(0.5)", "pass", NEXT),
        ("simulate", "p = node.parameters", "p.add_(1)", NEXT),
        (
            "simulate",
            "p = node.model.parameters[:2]",
            "p[0] = 1.0; node.parameters = node.parameters + 1",
            SECOND,
        ),
    ],
)
def test_in_place_write_error_names_the_line(
    tmp_path: Path, engine: str, first: str, second: str, line: int
) -> None:
    # (In a separate process: the type checks of the tests add frames between an algorithm and the node.)
    (tmp_path / "careless.py").write_text(ALGORITHM.format(first=first, second=second))
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    program = [sys.executable, "-m", "gossamer", "run", "experiment.yaml", "--engine", engine]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    output = " ".join((done.stdout + done.stderr).split())
    assert "its parameters were modified in place" in output
    assert f"(careless.py, line {line})" in output
