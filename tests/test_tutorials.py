"""The notebooks of docs/tutorials run as printed, and are committed with reproducible outputs.

``python tests/test_tutorials.py`` (``make tutorials``) runs them all and writes their outputs."""

from __future__ import annotations

import base64
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "tutorials").glob("*.ipynb"))
MAX_BYTES = 120_000
DIFFERENT = re.compile(r"same bits[^\n]*False")
CHANGING = (
    (re.compile(r"\d{8}-\d{6}-\d{6}-[0-9a-f]{4}"), "ID"),  # of a run
    (re.compile(r"(wall time</td><td[^>]*>)[\d.]+ s"), r"\1…"),
)


def executed(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of a fresh kernel in an empty folder; raises the error of a cell."""
    book = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": folder}}
    NotebookClient(
        book, timeout=300, kernel_name="python3", record_timing=False, resources=resources
    ).execute()
    return book


def small(picture: str) -> str:
    """A PNG in 64 colours."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(64)
    image.save(file := io.BytesIO(), format="png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def settled(book: Any) -> Any:
    """The notebook without parts that differ between executions, and with small pictures."""
    book.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(book.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type != "code":
            continue
        # Runs print their progress to standard error.
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for data in (output.data for output in cell.outputs if "data" in output):
            for pattern, text in CHANGING:
                for kind in data.keys() & {"text/plain", "text/html"}:
                    data[kind] = pattern.sub(text, data[kind])
            if "image/png" in data:
                data["image/png"] = small(data["image/png"])
            if "text/html" in data:
                embedded = r"(?<=data:image/png;base64,)[\w+/=]+"
                data["text/html"] = re.sub(embedded, lambda match: small(match[0]), data["text/html"])
    return book


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    assert not DIFFERENT.search(nbformat.writes(executed(path, tmp_path)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_outputs_are_small_and_machine_independent(path: Path) -> None:
    text = path.read_text()
    assert len(text) < MAX_BYTES
    assert not re.findall(r"(?:/home/|/root/|/tmp/|/work/|site-packages)[^\s\"]*", text)
    code = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    assert not DIFFERENT.search(text)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)


def test_all_notebooks_are_found() -> None:
    assert len(NOTEBOOKS) == 6


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as empty:
            nbformat.write(settled(executed(notebook, Path(empty))), notebook)
        print(notebook.name, notebook.stat().st_size)
