"""Runs from notebooks and scripts: in a running event loop, with a live display, with classes of ``__main__``."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from gossamer import BadInput, Experiment, Run, run
from gossamer.config.registry import find
from gossamer.progress import Bar
from gossamer.results.observer import Observer
from gossamer.runtime.recording import NETWORK

MINE = """
from gossamer import Algorithm


class Mine(Algorithm):
    async def run(self, node):
        async for r in node.rounds():
            await node.train()
            peers = await node.neighbors(r)
            node.broadcast(peers, node.model, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))
"""
FIELDS = {
    "nodes": 3,
    "task": {"name": "least-squares", "features": 3},
    "stop": {"rounds": 4},
    "engine": {"name": "simulate", "trainer": "sequential"},
}


def test_run_inside_event_loop_has_same_bits(tmp_path: Path) -> None:
    experiment = Experiment(algorithm="d-psgd", **FIELDS)  # type: ignore[arg-type]

    async def inside() -> Run:
        task = asyncio.current_task()
        done = run(experiment, tmp_path)
        await asyncio.sleep(0)  # the loop goes on
        assert asyncio.current_task() is task
        return done

    nested, alone = asyncio.run(inside()).parameters, run(experiment, tmp_path).parameters
    assert nested is not None
    assert nested.equal(alone)  # type: ignore[arg-type]


def test_interrupted_run_leaves_outer_loop_usable(tmp_path: Path) -> None:
    class Impatient(Observer):
        def row(self, row: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    async def inside() -> None:
        with pytest.raises(KeyboardInterrupt):
            run(Experiment(algorithm="d-psgd", **FIELDS), tmp_path, observer=Impatient())  # type: ignore[arg-type]
        await asyncio.sleep(0)

    asyncio.run(inside())


def executed(folder: Path, *cells: str) -> list[Any]:
    """The outputs of each cell in a fresh kernel."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    where = {"metadata": {"path": folder}}
    NotebookClient(book, kernel_name="python3", allow_errors=True, resources=where).execute()
    return [cell.outputs for cell in book.cells]


def test_notebook_shows_progress_and_results(tmp_path: Path) -> None:
    outputs = executed(
        tmp_path,
        MINE,
        f"from gossamer import Experiment, run\nmine = Experiment(algorithm=Mine, **{FIELDS})",
        "done = run(mine)\ndone",
        "ax = done.plot('train_loss')",
        "print(done.metrics.height, done.module().training)",
        "run(mine.override(engine='processes'))",
        "import asyncio\nawait asyncio.sleep(0)\n_ = run(mine)",
    )
    assert outputs[:2] == [[], []]
    *lines, result = outputs[2]
    assert "<td style" in result.data["text/html"]
    assert any("round 4/4" in line.text for line in lines)
    assert "image/png" in outputs[3][0].data
    assert outputs[4][0].text.split()[-1] == "False"
    assert outputs[5][-1].ename == "BadInput"
    assert outputs[5][-1].evalue == (
        "algorithm '__main__:Mine': other processes can't import it;"
        " accepted: a class in a module (begin the cell with %%writefile mine.py, then: from mine import Mine)"
    )
    assert {output.output_type for output in outputs[6]} == {"stream"}


def test_bar_shows_progress_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar(Experiment(name="a", algorithm="d-psgd", **FIELDS))  # type: ignore[arg-type]
    bar.start({"nodes": 3, "parameters": 3, "outcome_ranks": [0, 1, 2]})
    assert capsys.readouterr().err.endswith("\r3 nodes, 3 parameters each")
    row = {"round": 2, "moment": "round", "time_s": 1.0, "wall_s": 1.0, "consensus_distance": 0.0}
    bar.row({**row, "node": 0, "network_bytes": 500, "test_loss": 0.25})
    bar.row({**row, "node": NETWORK})
    bar.progress(6, 1.0)
    whole = f"{'█' * 10}{'░' * 10}  round 2/4  virtual time 1 s  1 s left  test loss 0.2500 at round 2"
    line = whole[:79]  # as much as fits into the terminal
    assert capsys.readouterr().err.endswith(f"\r{line}")
    bar.say("and more")
    assert capsys.readouterr().err.endswith(f"\rand more\n\r{' ' * 79}\r{line}")


SCRIPT = f"""{MINE}
from gossamer import Experiment, run

def main():
    experiment = Experiment(algorithm=Mine, **{FIELDS})
    simulated = run(experiment)
    real = run(experiment.override(engine={{"name": "processes", "trainer": "sequential"}}))
    assert real.parameters.equal(simulated.parameters)
    print(real.experiment["algorithm"]["name"])

"""


def test_script_classes_run_under_both_engines(tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(SCRIPT + 'if __name__ == "__main__":\n    main()\n')
    command = [sys.executable, "study.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["study:Mine"]


def test_unguarded_script_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unguarded.py").write_text(SCRIPT + "main()\n")
    with pytest.raises(
        BadInput, match=r"run: called while 'unguarded' is being imported; .* \(unguarded.py, line \d+\)"
    ):
        find("algorithm", "unguarded:Mine")
