"""The documentation site: ``make docs`` builds it. The pages stay readable without it."""

import os
import re
from pathlib import Path

from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

import gossamer

DOCS = Path(__file__).parent
REPOSITORY = "https://github.com/gossamer-learning/gossamer/tree/main/"

project = "gossamer"
version = gossamer.__version__
html_title = f"gossamer {version}"
html_theme = "furo"
html_show_copyright = html_show_sphinx = html_show_sourcelink = False
extensions = ["myst_nb", "sphinx.ext.autodoc"]
nb_execution_mode = "off"  # the tests run the notebooks
myst_heading_anchors = 3
highlight_language = "text"
autodoc_default_options = {"members": True, "member-order": "bysource", "exclude-members": "model_config"}
autodoc_typehints_format = "short"


def place_links(text: str, folder: Path, page: Path) -> str:
    """The text of a file in a folder, for a page of the site: a link to a folder leads to its index, and one out of docs/
    to the repository."""

    def place(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if not target.exists():
            return link[0]  # the build warns of it
        if target.is_relative_to(DOCS):
            target /= "index.md" if target.is_dir() else ""
            return "](" + os.path.relpath(target, page.parent)
        return f"]({REPOSITORY}{target.relative_to(DOCS.parent)}"

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)", place, text)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""

    def read(_: Sphinx, page: str, text: list[str]) -> None:
        text[0] = place_links(text[0], (DOCS / page).parent, DOCS / page)

    def included(_: Sphinx, path: Path, page: str, text: list[str]) -> None:
        text[0] = place_links(text[0], (DOCS / path).parent, DOCS / page)

    def docstring(_: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
        lines[:] = GoogleDocstring(lines).lines()

    def signature(_: Sphinx, what: str, name: str, value: object, *rest: object) -> tuple[str, None] | None:
        """Fields of pydantic models are described elsewhere; with all that validates them they fill a page."""
        return ("", None) if isinstance(value, type) and issubclass(value, BaseModel) else None

    app.connect("source-read", read)
    app.connect("include-read", included)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
