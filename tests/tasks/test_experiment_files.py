from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gossamer.config import Experiment
from gossamer.tasks import TaskSource

FOLDER = Path(__file__).parents[2] / "experiments"
# A file with a base is a sweep (tests/sweep).
FILES = [file for file in sorted(FOLDER.rglob("*.yaml")) if "base" not in yaml.safe_load(file.read_text())]


def test_experiment_files_are_found():
    assert FOLDER / "quickstart.yaml" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_experiment_file_loads_and_round_trips(file):
    experiment = Experiment.load(file)
    assert isinstance(experiment.task, TaskSource)
    assert experiment.data_root is None
    assert Experiment.parse(experiment.to_yaml()) == experiment
