"""What a node needs on its machine: the resolved experiment, the files that it names, the peers file and the node's key."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gossamer.config import Experiment
from gossamer.errors import BadInput
from gossamer.runtime.processes.standalone.agreement import files

EXPERIMENT = "experiment.yaml"
PEERS = "peers.yaml"
KEYS = "keys"


class Bundle:
    """Files of a folder to be, by their paths in it.

    Args:
        experiment: the resolved experiment. Files that it names come with it, and it then names them relative to
            itself; its ``data_root`` does not, since data lies elsewhere on other machines.
        more: further files or folders, such as modules with classes of the experiment; they come under their names.

    Raises:
        BadInput: for one of them that is not there.
    """

    def __init__(self, experiment: Experiment, more: Iterable[str | Path] = ()) -> None:
        said = experiment.model_dump(mode="json", exclude={"data_root"})
        places = {
            str(path): f"files/{number}-{path.name}" for number, path in enumerate(dict.fromkeys(files(said)))
        }
        self._content: dict[str, bytes | Path] = {
            EXPERIMENT: yaml.safe_dump(_renamed(said, places), sort_keys=False, allow_unicode=True).encode()
        }
        for path, place in places.items():
            self._content[place] = Path(path)
        for each in map(Path, more):
            if not each.exists():
                raise BadInput(f"--with {each}: not there; accepted: files and folders")
            inside = [each] if each.is_file() else sorted(file for file in each.rglob("*") if file.is_file())
            for file in inside:
                self._content[str(file.relative_to(each.parent))] = file

    def put(self, place: str, content: bytes | Path) -> None:
        """Add a file: its content, or where it is to be read."""
        self._content[place] = content

    def write(self, folder: Path) -> None:
        """Make the folder."""
        for place, content in self._content.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.read_bytes())

    def tar(self, secret: Mapping[str, bytes | Path] | None = None) -> bytes:
        """All of it as a tar archive; with what only its owner may read."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for folder in sorted({str(Path(place).parent) for place in secret or {}}):
                info = tarfile.TarInfo(folder)
                info.type, info.mode = tarfile.DIRTYPE, 0o700
                archive.addfile(info)
            for contents, mode in ((self._content, 0o644), (secret or {}, 0o600)):
                for place, content in contents.items():
                    data = content if isinstance(content, bytes) else content.read_bytes()
                    info = tarfile.TarInfo(place)
                    info.size, info.mode = len(data), mode
                    archive.addfile(info, io.BytesIO(data))
        return packed.getvalue()


def _renamed(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, places) for item in value]
    return places.get(value, value) if isinstance(value, str) else value
