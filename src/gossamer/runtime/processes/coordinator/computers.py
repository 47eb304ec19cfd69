"""What the workers of a run compute with: in words, and compared with the coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gossamer.numerics import summary
from gossamer.results.folder import computers, latest, versions
from gossamer.results.formatting import some


def in_words(computer: Mapping[str, Any]) -> str:
    """The machine, the processor and the versions of a worker, in one line."""
    known = ", ".join(f"{name} {version}" for name, version in versions(computer).items())
    return f"{computer['machine']['host']}, {summary(computer['numerics'])}, {known}"


def differing(here: Mapping[str, Any], workers: Iterable[Mapping[str, Any]]) -> str | None:
    """One line that names the versions, processors and kernels of workers that are not those of the coordinator; None if
    there are none. Both are as in ``environment.json``."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        for text in _differences(here, worker):
            found.setdefault(text, []).append(worker["worker"])
    if not found:
        return None
    texts = [f"{text} at {some(names)}" for text, names in found.items()]
    return f"not all machines compute alike, so the last bits may depend on who computes what: {'; '.join(texts)}"


def _differences(here: Mapping[str, Any], worker: Mapping[str, Any]) -> Iterator[str]:
    there = {**worker["packages"], "python": worker["python"]}
    for name, version in versions(here).items():
        if (other := there.get(name)) != version:
            yield f"{name} {other or 'missing'} (not {version}, as at the coordinator)"
    if (other := summary(worker["numerics"])) != (own := summary(here["numerics"])):
        yield f"{other} (not {own})"


def new_numerics(recorded: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> str | None:
    """One line about a run that continues with processors or kernels that have not computed it before; None if there are
    none. ``recorded`` is its environment."""
    before = {summary(one["numerics"]) for one in computers(latest(recorded)) if "numerics" in one}
    now = {summary(worker["numerics"]): None for worker in workers}
    if not before or not (new := [text for text in now if text not in before]):
        return None
    return (
        f"bits may differ from those of an uninterrupted run: now {some(new)}, before {some(sorted(before))}"
    )
