"""The documentation site builds without warnings, documents all public names, and loads nothing from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer

ROOT = Path(__file__).parent.parent
LOADED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href|srcset)=["'](?:https?:)?//[^>]*"""
)


@pytest.mark.timeout(300)
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "docs"]
    built = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    api = pages["api.html"]
    assert [name for name in gossamer.__all__ if f'id="gossamer.{name}"' not in api] == []
    notebooks = [f"tutorials/{path.stem}.html" for path in (ROOT / "docs" / "tutorials").glob("*.ipynb")]
    assert {"index.html", "api.html", *notebooks} <= pages.keys()
    assert {name: links for name, page in pages.items() if (links := LOADED.findall(page))} == {}
    assert "krum" in (tmp_path / "searchindex.js").read_text()
