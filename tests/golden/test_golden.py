"""Small experiments end, to the bit, as they did when the files in ``recorded`` were written.

After a change that is meant to change results, ``python tests/golden/record.py`` records them, and says what has changed.
Where this machine computes other bits than those that have a record, though asked for what all have, only facts are compared
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
"""How far final means may be off on another machine: of the loss, relative; of the accuracy, absolute."""
WINDOW = 65536
"""Bytes of a message of which a real node may have sent a part only when a row is made."""

Measured = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """An engine -> what came of its experiments, which are run once, whichever worker of the tests asks first."""
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


def ended(found: dict[str, Any], name: str) -> dict[str, Any]:
    """What came of one experiment."""
    one: dict[str, Any] = found["experiments"][name]
    if "error" in one:
        pytest.fail(one["error"], pytrace=False)
    return one


def same_bits(found: dict[str, Any], name: str) -> dict[str, Any]:
    """What is recorded of an experiment for machines like this one."""
    for given in GIVEN:
        if all(found[what] == given[what] for what in ("torch", "machine", "probe")):
            one: dict[str, Any] = given["experiments"][name]
            return one
    pytest.skip(f"no record for torch {found['torch']}, {found['machine']}, bits {found['probe']}")


def test_the_record_is_of_these_experiments() -> None:
    for given in GIVEN:
        assert list(given["experiments"]) == NAMES


def test_everything_that_is_registered_is_used(golden: Measured) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "gossamer", "list", "--json"], capture_output=True, text=True, check=True
    )
    registered = {kind: set(entries) for kind, entries in json.loads(listed.stdout).items()}
    used = golden("simulate")["used"]
    unused = {kind: names - set(used.get(kind, [])) for kind, names in registered.items()}
    assert {kind: names for kind, names in unused.items() if names} == UNUSED


@pytest.mark.parametrize("name", NAMES)
def test_facts(name: str, golden: Measured) -> None:
    """What is counted and timed, events, graphs: on every machine."""
    one, expected = ended(golden("simulate"), name), FACTS[name]
    for part in ("facts", "events", "message_bytes"):
        assert one[part] == expected[part], part


@pytest.mark.parametrize("name", NAMES)
def test_bits(name: str, golden: Measured) -> None:
    found = golden("simulate")
    one, expected = ended(found, name), same_bits(found, name)
    for part in ("numbers", "models", "final"):
        assert one[part] == expected[part], part


@pytest.mark.parametrize("name", NAMES)
def test_final_means(name: str, golden: Measured) -> None:
    """On another machine too, to rounding."""
    final, expected = ended(golden("simulate"), name)["final"], FACTS[name]["final"]
    assert final.keys() == expected.keys()
    assert final["test_loss"] == pytest.approx(expected["test_loss"], rel=LOSS)
    assert final.get("test_accuracy") == pytest.approx(expected.get("test_accuracy"), abs=ACCURACY)


def test_a_wrapper_that_changes_nothing_changes_nothing(golden: Measured) -> None:
    found = golden("simulate")
    assert ended(found, "wrapped") == ended(found, "unwrapped")


def test_a_codec_that_changes_nothing_changes_nothing(golden: Measured) -> None:
    found = golden("simulate")
    assert ended(found, "identity") == ended(found, "unwrapped")


def test_a_run_that_was_resumed_is_the_run_that_was_not(golden: Measured) -> None:
    """But for the event that says so. (Asynchronous ones go on otherwise.)"""
    found = golden("simulate")
    resumed, whole = (dict(ended(found, name)) for name in ("saved-resumed", "saved"))
    assert resumed.pop("events") != whole.pop("events")
    assert resumed == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_real_processes(name: str, golden: Measured) -> None:
    """The same samples, graphs, losses and models as simulated, at every evaluation, and messages of the same size."""
    found = golden("processes")
    one, expected = ended(found, name), FACTS[name]
    assert one["events"] == expected["events"]
    size = expected["message_bytes"]
    if size is not None and size <= WINDOW:
        assert one["message_bytes"] == size
    expected = same_bits(found, name)
    for part in ("numbers", "models", "final"):
        assert one[part] == expected[part], part
