"""Small experiments give, to the bit, the results in the files of ``recorded``.

After an intended change of results, ``python tests/golden/record.py`` records them and prints the changes. Where no
record has the bits of this machine, although libraries are restricted to common instructions, only facts are compared
exactly.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from golden_experiments import EXPERIMENTS, RESUMED, SYNCHRONOUS, UNUSED
from golden_hashes import RECORDED, measured

pytestmark = pytest.mark.timeout(900)

NAMES = [*EXPERIMENTS, *RESUMED]
GIVEN: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))]
FACTS: dict[str, dict[str, Any]] = GIVEN[0]["experiments"]
LOSS, ACCURACY = 1e-4, 0.02
"""Tolerances of final means on another machine: relative for the loss, absolute for the accuracy."""
WINDOW = 65536
"""Larger messages, in bytes, may be partly sent when a process records a row."""

Measured = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A function from an engine to the hashes of its experiments, which only the first test worker runs."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def get(engine: str) -> dict[str, Any]:
        folder = root / f"golden-{engine}"
        with (root / f"golden-{engine}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "hashes.json").exists():
                measured(engine, folder)
        return dict(json.loads((folder / "hashes.json").read_text()))

    return get


def ended(results: dict[str, Any], name: str) -> dict[str, Any]:
    """The hashes of one experiment."""
    hashes: dict[str, Any] = results["experiments"][name]
    if "error" in hashes:
        pytest.fail(hashes["error"], pytrace=False)
    return hashes


def same_bits(results: dict[str, Any], name: str) -> dict[str, Any]:
    """The recorded hashes of an experiment for machines like this one."""
    for given in GIVEN:
        if all(results[key] == given[key] for key in ("torch", "machine", "probe")):
            hashes: dict[str, Any] = given["experiments"][name]
            return hashes
    pytest.skip(f"no record for torch {results['torch']}, {results['machine']}, bits {results['probe']}")


def test_records_hold_all_experiments() -> None:
    for given in GIVEN:
        assert list(given["experiments"]) == NAMES


def test_every_registered_component_is_used(golden: Measured) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "gossamer", "list", "--json"], capture_output=True, text=True, check=True
    )
    files = ("experiment", "sweep")  # files in the wheel
    registered = {kind: set(names) for kind, names in json.loads(listed.stdout).items() if kind not in files}
    used = golden("simulate")["used"]
    unused = {kind: names - set(used.get(kind, [])) for kind, names in registered.items()}
    assert {kind: names for kind, names in unused.items() if names} == UNUSED


@pytest.mark.parametrize("name", NAMES)
def test_facts_match_the_record(name: str, golden: Measured) -> None:
    """Counts, times, events and graphs agree on every machine."""
    actual, expected = ended(golden("simulate"), name), FACTS[name]
    for part in ("facts", "events", "message_bytes"):
        assert actual[part] == expected[part], part


@pytest.mark.parametrize("name", NAMES)
def test_bits_match_the_record(name: str, golden: Measured) -> None:
    results = golden("simulate")
    actual, expected = ended(results, name), same_bits(results, name)
    for part in ("numbers", "models", "final"):
        assert actual[part] == expected[part], part


@pytest.mark.parametrize("name", NAMES)
def test_final_means_match_the_record(name: str, golden: Measured) -> None:
    """Final means agree on every machine, up to rounding."""
    final, expected = ended(golden("simulate"), name)["final"], FACTS[name]["final"]
    assert final.keys() == expected.keys()
    assert final["test_loss"] == pytest.approx(expected["test_loss"], rel=LOSS)
    assert final.get("test_accuracy") == pytest.approx(expected.get("test_accuracy"), abs=ACCURACY)


def test_idle_wrapper_changes_nothing(golden: Measured) -> None:
    results = golden("simulate")
    assert ended(results, "wrapped") == ended(results, "unwrapped")


def test_identity_codec_changes_nothing(golden: Measured) -> None:
    results = golden("simulate")
    assert ended(results, "identity") == ended(results, "unwrapped")


def test_resumed_run_equals_the_uninterrupted_one(golden: Measured) -> None:
    """Only the events differ, by that of the resumption. (Asynchronous runs continue differently.)"""
    results = golden("simulate")
    resumed, whole = (dict(ended(results, name)) for name in ("saved-resumed", "saved"))
    assert resumed.pop("events") != whole.pop("events")
    assert resumed == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_processes_match_the_record(name: str, golden: Measured) -> None:
    """Processes give the simulated samples, graphs, losses and models, with messages of the same size."""
    results = golden("processes")
    actual, expected = ended(results, name), FACTS[name]
    assert actual["events"] == expected["events"]
    size = expected["message_bytes"]
    if size is not None and size <= WINDOW:
        assert actual["message_bytes"] == size
    expected = same_bits(results, name)
    for part in ("numbers", "models", "final"):
        assert actual[part] == expected[part], part
