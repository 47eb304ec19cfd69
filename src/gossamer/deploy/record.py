"""What makes a run folder the record of one node: ``node.json`` in it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gossamer.errors import BadInput
from gossamer.results.folder import RunFolder, write_json

FILE = "node.json"


@dataclass(frozen=True)
class NodeRecord:
    """Whose record a folder is.

    Args:
        rank: the node.
        nodes: how many there are.
        incarnation: of its process; of two records of a rank, the one with the higher one is the newer.
        digest: of the experiment, in hexadecimal; records with the same one are parts of one run.
        start_unix_s: when the node went, by its machine's clock, seconds since 1970; None before.
    """

    rank: int
    nodes: int
    incarnation: int
    digest: str
    start_unix_s: float | None = None

    def started(self) -> NodeRecord:
        """The record of a node that goes now."""
        return replace(self, start_unix_s=time.time())

    def write(self, folder: RunFolder) -> None:
        """Put it into a run folder."""
        write_json(folder.path / FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> NodeRecord:
        """Whose record a folder is.

        Raises:
            BadInput: if it is not a node's.
        """
        path = folder / FILE
        try:
            record = cls(**json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; accepted: the record of a node") from None
        except (ValueError, TypeError) as error:
            raise BadInput(f"{path}: {error}; accepted: what gossamer node has written") from None
        kinds = {"rank": int, "nodes": int, "incarnation": int, "digest": str}
        for name, kind in kinds.items():
            if type(getattr(record, name)) is not kind:
                raise BadInput(
                    f"{path}: {name}: got {getattr(record, name)!r}; accepted: what gossamer node has written"
                )
        if not 0 <= record.rank < record.nodes:
            raise BadInput(f"{path}: rank: got {record.rank}; accepted: 0 to {record.nodes - 1}")
        return record
