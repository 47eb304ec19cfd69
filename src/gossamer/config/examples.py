"""The experiment files included in gossamer, by name: ``quickstart``, ``cifar10/d-psgd``,
``sweeps/quickstart``, ..."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from gossamer.errors import BadInput, suggest

_FOLDER = Path(__file__).parents[1] / "experiments"


def names(folder: str = "", *, sweeps: bool = False) -> list[str]:
    """The names of the experiments, or of the sweeps, in a folder."""
    root = _FOLDER / folder
    files = sorted(root.rglob("*.yaml"))
    return [str(file.relative_to(root).with_suffix("")) for file in files if _is_sweep(file) == sweeps]


def located(path: str | Path, folder: str = "", *, sweeps: bool = False) -> Path:
    """The file at a path, or the example of that name in a folder. A file at the path takes precedence.
    BadInput, which lists the experiments or the sweeps, for an unknown name."""
    path = Path(path)
    if path.suffix or path.is_absolute() or path.is_file():
        return path
    example = (_FOLDER / folder / path).with_suffix(".yaml")
    if not example.is_file():
        known = names(folder, sweeps=sweeps)
        raise BadInput(
            f"{path}: no file and no example of this name{suggest(str(path), known)}; accepted: a YAML file, or"
            f" {', '.join(known)}"
        )
    return example


def summary(name: str) -> str:
    """The first sentence of an example's leading comment, without the final period."""
    lines = (_FOLDER / name).with_suffix(".yaml").read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("# "), lines)
    text = " ".join(line[2:] for line in comment)
    return re.split(r"(?<! et al)\. ", text)[0].rstrip(".:")


def _is_sweep(file: Path) -> bool:
    return re.search(r"^base:", file.read_text(encoding="utf-8"), re.MULTILINE) is not None
