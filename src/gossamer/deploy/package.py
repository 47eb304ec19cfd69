"""What a container installs gossamer from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gossamer
from gossamer.errors import BadInput

FOLDER = "package"
"""Beside the Dockerfile, what it installs."""
_KINDS = (".whl", ".tar.gz", ".zip")
_BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "src")


@dataclass(frozen=True)
class Package:
    """What pip is told, and what has to be there for it.

    Args:
        requirement: what pip is told to install; a path that begins with :data:`FOLDER` is one in ``files``.
        files: by their paths in the folder of the Dockerfile, where they are to be copied from.
    """

    requirement: str
    files: Mapping[str, Path]

    @classmethod
    def of(cls, archive: str | Path | None = None) -> Package:
        """The package that is told, or else the one that is in use: its source tree, if it runs from one, else its version.

        Args:
            archive: a wheel, or an archive of the sources.

        Raises:
            BadInput: for an archive that pip would not take.
        """
        if archive is not None:
            path = Path(archive)
            if not path.is_file() or not path.name.endswith(_KINDS):
                raise BadInput(f"--wheel {path}: accepted: a wheel (.whl), or sources (.tar.gz, .zip)")
            return cls(f"{FOLDER}/{path.name}", {f"{FOLDER}/{path.name}": path})
        root = Path(gossamer.__file__).resolve().parents[2]
        if not (root / "pyproject.toml").is_file():
            return cls(f"gossamer=={gossamer.__version__}", {})
        return cls(FOLDER, {f"{FOLDER}/{file.relative_to(root)}": file for file in _sources(root)})


def _sources(root: Path) -> list[Path]:
    """The files that a source tree is built from."""
    found = [
        file
        for name in _BUILT_FROM
        for file in ([root / name] if (root / name).is_file() else (root / name).rglob("*"))
        if file.is_file() and not _made(file.relative_to(root))
    ]
    return sorted(found)


def _made(path: Path) -> bool:
    """Whether a file was made from others."""
    return any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
