"""``gossamer demo`` and ``gossamer new``: a first run, and a first algorithm of one's own."""

from __future__ import annotations

import ast
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
"""An algorithm's first graph is the first of these that it accepts."""


def demo(out: Out = Path("runs"), report: Report = True, quiet: Quiet = False, as_json: Json = False) -> None:
    """Sixteen nodes learn handwritten digits; ends by naming the report page. (It is: gossamer run quickstart)."""
    run(Path("quickstart"), out=out, report=report, quiet=quiet, as_json=as_json)


def new(
    folder: Annotated[Path, argument("The folder to write.", "DIR")],
    algorithm: Annotated[
        str | None,
        option(
            "Begin with the source of this algorithm.", metavar="NAME", autocompletion=completion.algorithms
        ),
    ] = None,
) -> None:
    """Write an algorithm, an experiment with it, and a test of it, to begin with."""
    from gossamer.config.registry import find
    from gossamer.config.schema import json_schema

    files = {
        file.name: file.read_text(encoding="utf-8") for file in sorted(_TEMPLATE.iterdir()) if file.is_file()
    }
    experiment = files["experiment.yaml"].replace(
        "my-study", re.sub(r"[^\w.-]", "-", folder.resolve().name), 1
    )
    if algorithm is not None:
        cls = find("algorithm", algorithm, "--algorithm")
        files["algorithm.py"] = extracted(inspect.getsource(sys.modules[cls.__module__]), cls.__name__)
        experiment = _naming(cls, experiment)
    files |= {"experiment.yaml": experiment, "experiment.schema.json": json.dumps(json_schema(), indent=1)}
    for name in files:
        if (folder / name).exists():
            raise BadInput(f"{folder / name}: is there already; accepted: a folder without it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, what in {
        "algorithm.py": "an algorithm of your own",
        "experiment.yaml": "an experiment with it",
        "experiment.schema.json": "by which an editor of YAML completes and checks the experiment",
        "test_algorithm.py": "a test of it",
    }.items():
        typer.echo(f"{folder / name}: {what}")
    typer.echo(f"\nnext:\n  cd {shlex.quote(str(folder))}\n  gossamer run experiment.yaml")
    typer.echo("  pytest      (after pip install pytest)")


def _naming(cls: type[Component], experiment: str) -> str:
    """The experiment with the copy of an algorithm, all of its parameters, and a graph that it accepts."""
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


def extracted(source: str, name: str) -> str:
    """The text of a module with its docstring, one of its classes, and all of the module that the class needs. The decorator
    that gives a class its built-in name is left out."""
    tree, lines = ast.parse(source), source.splitlines()
    for each in tree.body:
        if isinstance(each, ast.ClassDef):
            each.decorator_list = [
                it for it in each.decorator_list if not ast.unparse(it).startswith("register(")
            ]
    defined = {said: each for each in tree.body for said in _defines(each)}
    needed, used = {name}, _names(defined[name])
    while more := (used & defined.keys()) - needed:
        needed |= more
        used |= {said for each in more for said in _names(defined[each])}
    imports, definitions, end = list[str](), list[str](), 0
    for each, following in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(each, ast.Import | ast.ImportFrom):
            future = isinstance(each, ast.ImportFrom) and each.module == "__future__"
            each.names = [it for it in each.names if future or (it.asname or it.name) in used]
            if each.names:
                imports += ["", ast.unparse(each)] if "" in lines[end : each.lineno] else [ast.unparse(each)]
                end = each.end_lineno or 0
        elif needed.intersection(_defines(each)):
            first = min(it.lineno for it in (each, *getattr(each, "decorator_list", ()))) - 1
            while lines[first - 1].startswith("#"):
                first -= 1
            last = following if isinstance(following, ast.Expr) else each  # the docstring of a constant
            definitions.append("\n".join(lines[first : last.end_lineno]))
    head = lines[: tree.body[0].end_lineno] if ast.get_docstring(tree) else []
    return "\n\n\n".join(["\n".join([*head, *imports]).lstrip(), *definitions]) + "\n"


def _defines(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module defines; none for an import."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
