"""What makes a run folder the record of one node: ``node.json`` in it."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gossamer.config.validation import bad_input
from gossamer.errors import BadInput
from gossamer.results.folder import RunFolder, write_json

FILE = "node.json"


class NodeRecord(BaseModel):
    """Whose record a folder is.

    Args:
        rank: the node.
        nodes: how many there are.
        incarnation: of its process; of two records of a rank, the one with the higher one is the newer.
        digest: of the experiment, in hexadecimal; records with the same one are parts of one run.
        start_unix_s: when the node went, by its machine's clock, seconds since 1970; None before. One that goes on from its
            checkpoint keeps it, but for time in which no node of the run lived (``gossamer node --down-since``).
        run: what tells the run from others of the same experiment (``gossamer node --run``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rank: int = Field(ge=0)
    nodes: int = Field(ge=1)
    incarnation: int = Field(ge=0)
    digest: str
    start_unix_s: float | None = None
    run: str = ""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> NodeRecord:
        if self.rank >= self.nodes:
            raise ValueError(f"rank: {self.rank} of {self.nodes} nodes")
        return self

    def started(self, time_s: float | None = None) -> NodeRecord:
        """The record of a node that goes now, if it did not before; or whose time goes on now, at some second."""
        if self.start_unix_s and time_s is None:
            return self
        return self.model_copy(update={"start_unix_s": time.time() - (time_s or 0.0)})

    def same_node(self, other: NodeRecord) -> bool:
        """Whether both are of one node of one run."""
        return all(getattr(self, name) == getattr(other, name) for name in ("rank", "nodes", "digest", "run"))

    def write(self, folder: RunFolder) -> None:
        """Put it into a run folder."""
        write_json(folder.path / FILE, self.model_dump())

    @classmethod
    def read(cls, folder: Path) -> NodeRecord:
        """Whose record a folder is.

        Raises:
            BadInput: if it is not a node's.
        """
        path = folder / FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; accepted: the record of a node") from None
        except ValidationError as error:
            raise bad_input(error, cls, str(path)) from None
