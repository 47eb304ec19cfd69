"""What an engine is: made from an experiment, run once."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.outcome import Outcome
from gossamer.runtime.recording import Observer


@runtime_checkable
class Engine(Protocol):
    """Carries an experiment out. Making one loads and checks everything, so that bad input is found before
    work starts."""

    description: dict[str, Any]
    """What the record keeps of the start; see ``Setup.description``."""

    def run(self, folder: RunFolder, observer: Observer, cut: Cut | None = None) -> Outcome:
        """Run to the end, recording into a folder; from a checkpoint on, to which its record is rewound, if one is given."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *_: object) -> None:
        """End all that works for it; a second time does nothing."""
