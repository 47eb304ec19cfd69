"""Fields that files of older versions may have."""

from __future__ import annotations

from gossamer import Experiment

DESCRIBED = {"nodes": 4, "task": "digits", "topology": "ring", "algorithm": "d-psgd", "stop": {"rounds": 1}}


def test_cohort_in_an_older_file_has_no_effect() -> None:
    now = Experiment.of({**DESCRIBED, "engine": {"name": "simulate"}})
    for cohort in (True, False):
        older = Experiment.of({**DESCRIBED, "engine": {"name": "simulate", "cohort": cohort}})
        assert older == now
        assert "cohort" not in older.to_yaml()
