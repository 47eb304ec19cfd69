"""``gossamer demo`` and ``gossamer new``: a first run, and a first algorithm of one's own."""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from gossamer.cli import completion
from gossamer.cli.options import Json, Out, Quiet, Report, argument, option
from gossamer.cli.run import run
from gossamer.errors import BadInput

if TYPE_CHECKING:
    from gossamer.config.registry import Component

_TEMPLATE = Path(__file__).parent / "template"
_GRAPHS = ("{name: random-regular, degree: 4}", "star")
"""A new algorithm's experiment uses the first of these graphs that it accepts."""


def demo(out: Out = Path("runs"), report: Report = True, quiet: Quiet = False, as_json: Json = False) -> None:
    """Train sixteen nodes on handwritten digits, and print the path of the report. Same as: gossamer run
    quickstart --set engine.trainer=sequential."""
    # A first run takes less time than the compilation of the kernels that "auto" chooses.
    overrides = ["engine.trainer=sequential"]
    run(Path("quickstart"), overrides, out=out, report=report, quiet=quiet, as_json=as_json)
    if not (quiet or as_json):
        typer.echo(f"{'next':20} gossamer new my-study  (an algorithm of your own, an experiment and a test)")


def new(
    folder: Annotated[Path, argument("The folder to write.", "DIR")],
    algorithm: Annotated[
        str | None,
        option(
            "Start from the source of this algorithm.", metavar="NAME", autocompletion=completion.algorithms
        ),
    ] = None,
) -> None:
    """Write a new algorithm, an experiment with it, and a test of it."""
    from gossamer.config import as_name
    from gossamer.config.registry import find
    from gossamer.config.schema import json_schema

    files = {
        file.name: file.read_text(encoding="utf-8") for file in sorted(_TEMPLATE.iterdir()) if file.is_file()
    }
    experiment = files["experiment.yaml"].replace("my-study", as_name(folder.resolve().name), 1)
    if algorithm is not None:
        cls = find("algorithm", algorithm, "--algorithm")
        source = inspect.getsource(sys.modules[cls.__module__])
        files["algorithm.py"] = re.sub(r"(?m)^@register\(.*\)\n", "", source)  # the names are taken
        experiment = _with_algorithm(cls, experiment)
    files |= {"experiment.yaml": experiment, "experiment.schema.json": json.dumps(json_schema(), indent=1)}
    for name in files:
        if (folder / name).exists():
            raise BadInput(f"{folder / name}: already exists; accepted: a folder without it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    typer.echo("\n".join(str(folder / name) for name in files))
    typer.echo(f"\nnext:\n  cd {shlex.quote(str(folder))}\n  gossamer run experiment.yaml")
    typer.echo("  python -m pytest      (after pip install pytest)")


def _with_algorithm(cls: type[Component], experiment: str) -> str:
    """The experiment file for the copy of an algorithm, with all of its parameters and a graph that it
    accepts."""
    from gossamer.config import Experiment
    from gossamer.runtime.setup import prepare

    for graph in _GRAPHS:
        experiment = re.sub("(?m)^topology: .*$", f"topology: {graph}", experiment)
        with suppress(BadInput):
            prepare(Experiment.parse(experiment, [f"algorithm={cls.name_of()}"]))
            break
    steps = {"local_steps": 5} if "local_steps" in cls.model_fields else {}
    entry = {**cls(**steps).spec(), "name": f"algorithm:{cls.__name__}"}
    text = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    return re.sub("(?m)^algorithm: .*$", lambda _: f"algorithm: {text}", experiment)
