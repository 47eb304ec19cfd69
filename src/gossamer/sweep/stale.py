"""Finished runs of a sweep that would be others now, although their experiments are the same: their own code or data has
changed, or an older version measured them at instants."""

from __future__ import annotations

import logging
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.errors import BadInput
from gossamer.fingerprint import Present, changed_versions, packages
from gossamer.results.folder import environment, latest, read_environment, versions
from gossamer.results.formatting import some
from gossamer.results.run import Run
from gossamer.sweep.cells import Planned
from gossamer.sweep.table import RunState

log = logging.getLogger(__name__)


@dataclass
class Findings:
    """The result of a comparison of finished runs with the present. Each text maps to the runs to which it applies.

    Attributes:
        changed: changes that would lead to other results now. A run with such an entry is stale.
        other_versions: versions that differ.
        not_at_hand: data that can't be compared on this machine.
        unknown: runs without a fingerprint."""

    changed: dict[str, list[Planned]] = field(default_factory=dict)
    other_versions: dict[str, list[Planned]] = field(default_factory=dict)
    not_at_hand: dict[str, list[Planned]] = field(default_factory=dict)
    unknown: list[Planned] = field(default_factory=list)

    def of(self, planned: Planned) -> list[str]:
        """The changes since a run."""
        return [text for text, runs in self.changed.items() if planned in runs]

    def refuse(self, folder: Path, chosen: Container[str]) -> None:
        """BadInput if some of the chosen runs are stale."""
        of_chosen = {
            text: [planned for planned in runs if planned.run in chosen]
            for text, runs in self.changed.items()
        }
        if any(of_chosen.values()):
            raise BadInput(
                f"{folder}: finished runs are stale, since this has changed: {_texts(of_chosen)}; accepted: --again (finished"
                " runs start again; --only chooses cells), or --keep (they count as they are)"
            )

    def notes(self) -> list[str]:
        """Sentences about the finished runs, the stale ones included."""
        texts = [f"stale, since this has changed: {_texts(self.changed)}"] if self.changed else []
        texts += [f"finished with {text}: {_runs(runs)}" for text, runs in self.other_versions.items()]
        if self.not_at_hand:
            runs = {planned.run: planned for some_runs in self.not_at_hand.values() for planned in some_runs}
            texts.append(
                f"not at hand here: {some(list(self.not_at_hand))}; of {_runs(list(runs.values()))} only the code was"
                " compared with the present"
            )
        if self.unknown:
            texts.append(
                f"without a fingerprint: {_runs(self.unknown)}; they count, though their code and data may have changed"
            )
        return texts


def _texts(changed: Mapping[str, list[Planned]]) -> str:
    return "; ".join(f"{text} ({_runs(runs)})" for text, runs in changed.items() if runs)


def _runs(runs: list[Planned]) -> str:
    named = some([f"{planned.title}" for planned in runs], 4)
    return f"{len(runs)} runs: {named}" if len(runs) > 1 else named


def look(finished: Mapping[str, tuple[Planned, RunState]]) -> Findings:
    """Compare finished runs with the present, without loading any data."""
    found, present, here = Findings(), Present(), environment(sys.argv)
    for planned, state in finished.values():
        try:
            _compare(planned, state, found, present, here)
        except BadInput as error:  # a damaged record, which is no reason to do nothing
            log.error("%s", error)
            found.unknown.append(planned)
    return found


def _compare(
    planned: Planned, state: RunState, found: Findings, present: Present, here: Mapping[str, Any]
) -> None:
    assert state.folder is not None, "it is done"
    experiment, recorded = planned.experiment, latest(read_environment(state.folder))
    now = {**here, "fingerprint": {"packages": packages(experiment)}}
    for text in changed_versions(versions(recorded), versions(now)):
        found.other_versions.setdefault(text, []).append(planned)
    changed: list[str] = []
    if (before := recorded.get("fingerprint")) is not None:
        changed, absent = present.changed_data(before["data"], experiment)
        changed += [f"module {name}" for name in present.changed_code(before["code"], experiment)]
        for text in absent:
            found.not_at_hand.setdefault(text, []).append(planned)
    elif _measured_at_instants(Run(state.folder)):
        changed = ["measured at instants, not at the ends of rounds"]
    else:
        found.unknown.append(planned)
    for text in changed:
        found.changed.setdefault(text, []).append(planned)


def _measured_at_instants(run: Run) -> bool:
    """Whether an older version measured a run at instants that are no ends of rounds. (The key of such a run is that of an
    experiment that asks for the ends of rounds.)"""
    return "of" not in (run.experiment.get("evaluation") or {}) and run.shown == "instant"
