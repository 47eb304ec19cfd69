"""One sweep that several processes share: each run is done once, and state and tables are right."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from pathlib import Path

import polars as pl
import pytest
from sweeps import TINY, make_sweep, run_here

import gossamer
from command_line import Cli
from forked import FORKER
from gossamer import BadInput, Sweep, load_run
from gossamer.sweep import execute, run_claims, table
from gossamer.sweep.cells import Planned
from gossamer.sweep.execute import Counts, SweepObserver
from gossamer.sweep.run_claims import RunClaim, Watch
from gossamer.sweep.table import RunState, states, write_results


def statuses(sweep: Sweep) -> list[str]:
    current = states(sweep)
    return [current[planned.run].status for planned in sweep.planned]


def attempts(sweep: Sweep) -> dict[str, int]:
    return {
        planned.run: len(list((sweep.folder / planned.run).glob("*/experiment.yaml")))
        for planned in sweep.planned
    }


def check_done_once(sweep: Sweep) -> None:
    """Each run has one attempt, which is done; state and table say so; no claim is left."""
    assert set(attempts(sweep).values()) == {1}
    written = json.loads((sweep.folder / "sweep.json").read_text())["runs"]
    assert [run["status"] for run in written] == ["done"] * len(sweep.planned)
    results = pl.read_csv(sweep.folder / "results.csv")
    assert results["status"].to_list() == ["done"] * len(sweep.planned)
    assert results["run"].to_list() == [run["folder"] for run in written]
    assert results["test_loss"].null_count() == 0
    assert list(sweep.folder.glob("*/.claim-*")) == []


class Says(SweepObserver):
    """Collects what is said, and does something at the first sentence that begins with "waits"."""

    def __init__(self, then: object = None) -> None:
        self.then, self.said, self.ends = then, list[str](), list[tuple[str, str, str]]()

    def say(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("waits") and callable(self.then):
            self.then()

    def ended(self, planned: Planned, state: RunState, counts: Counts, value: str) -> None:
        self.ends.append((planned.title, state.status, value))


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "LOOK_S", 0.0)
    monkeypatch.setattr(execute, "_CHECK_S", 0.0)


def test_processes_share_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes meet: each waits in its first run until the other is in one. So they do different runs at one time."""
    monkeypatch.chdir(tmp_path)
    algorithm = {"name": "sweeps:Meets", "folder": str(tmp_path / "met"), "processes": 2}
    (tmp_path / "met").mkdir()
    sweep = make_sweep(tmp_path / "runs", base={"algorithm": algorithm}, seeds=7)
    (tmp_path / "small.yaml").write_text(sweep.to_yaml())
    arguments = ("sweep", "small.yaml", "--workers", "sweeps:one_thread")
    both = [FORKER.program(*arguments, output=tmp_path / f"{number}.txt") for number in range(2)]
    outputs = [
        (process.wait(), (tmp_path / f"{number}.txt").read_text()) for number, process in enumerate(both)
    ]
    for code, output in outputs:
        assert (code, output.count("7/7  small, seed")) == (0, 1), output
    assert len(list((tmp_path / "met").iterdir())) == 2
    alone = [output.count(": done") - output.count("by another process") for _, output in outputs]
    assert sum(alone) == 7
    assert min(alone) >= 1
    check_done_once(sweep)


def test_run_of_a_living_process_is_waited_for(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, seeds=2)
    first = sweep.planned[0]
    claim = RunClaim.take(sweep.folder / first.run, "another-machine:1")
    assert claim is not None
    assert statuses(sweep) == ["running", "pending"]

    def finish() -> None:
        assert statuses(sweep) == ["running", "done"]
        with claim:
            gossamer.run(first.experiment, sweep.folder, name=first.run)

    observer = Says(finish)
    assert run_here(sweep, observer=observer).counts == Counts(2, done=2)
    assert observer.said == ["waits for runs of other processes: small, seed 1"]
    assert observer.ends[1] == ("small, seed 1", "done", "by another process")
    check_done_once(sweep)


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_end_of_another_process_counts_unless_it_was_stopped(tmp_path: Path, status: str) -> None:
    sweep = make_sweep(tmp_path)
    [planned] = sweep.planned
    claim = RunClaim.take(sweep.folder / planned.run, "another-machine:1")
    assert claim is not None

    def end() -> None:
        with claim:
            done = gossamer.run(planned.experiment, sweep.folder, name=planned.run)
            record = json.loads((done.path / "status.json").read_text())
            del record["crc32"]
            (done.path / "status.json").write_text(
                json.dumps(record | {"status": status, "error": "a reason"})
            )

    outcome = run_here(sweep, observer=Says(end), again=True, retry_failed=True)
    assert outcome.counts == (Counts(1, failed=1) if status == "failed" else Counts(1, done=1))
    assert attempts(sweep) == {planned.run: 1 if status == "failed" else 2}


def test_run_of_a_dead_process_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died on another machine, so only its silence shows it, by the clock of the process that waits."""
    sweep = make_sweep(tmp_path, seeds=2)
    folder = sweep.folder / sweep.planned[0].run
    folder.mkdir(parents=True)
    (folder / ".claim-1").write_text("000000000007 0123456789abcdef another-machine:1 another-machine:1\n")
    clock = partial(next, count(0.0, run_claims.LOOK_S))
    monkeypatch.setattr(execute, "Watch", lambda: Watch(clock))
    assert run_here(sweep).counts == Counts(2, done=2)
    assert clock() > run_claims.DEAD_S
    check_done_once(sweep)


def test_lost_run_is_left_to_its_new_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was suspended goes on with a run that another one has taken over meanwhile."""
    sweep = make_sweep(tmp_path, base={"stop": {"rounds": 10**6}, "evaluation": {"every_rounds": 10**6}})
    [planned] = sweep.planned
    folder, taken = sweep.folder / planned.run, RunClaim.take
    later: list[RunClaim] = []

    def take(folder: Path, owner: str, after: int = 0) -> RunClaim | None:
        if (claim := taken(folder, owner, after)) is not None and not later:
            other = taken(folder, "another-machine:1", 1)
            assert other is not None
            later.append(other)
            claim.beat()
        return claim

    def finish() -> None:
        [stopped] = folder.glob("*/status.json")
        assert load_run(stopped.parent).status == "stopped"
        monkeypatch.undo()
        with later[0]:
            short = planned.experiment.override(stop={"rounds": 2})
            gossamer.run(short, sweep.folder, name=planned.run)

    monkeypatch.setattr(RunClaim, "take", take)
    assert run_here(sweep, observer=Says(finish)).counts == Counts(1, done=1)
    assert [load_run(path.parent).status for path in sorted(folder.glob("*/status.json"))] == [
        "stopped",
        "done",
    ]


def test_table_has_the_end_of_a_run_that_ends_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make_sweep(tmp_path, cells={"a": {}, "b": {"batch_size": 4}})
    run_here(sweep, only=["a"])
    calls, results = count(1), table.results

    def slow(sweep: Sweep) -> pl.DataFrame:
        made = results(sweep)
        if next(calls) == 1:
            run_here(sweep, only=["b"])  # calls it as well
        return made

    monkeypatch.setattr(table, "results", slow)
    write_results(sweep, {})
    check_done_once(sweep)


@pytest.mark.slow
def test_shares_of_an_array_are_disjoint_and_complete(tmp_path: Path, cli: Cli) -> None:
    cells = {"a": {}, "b": {"batch_size": 4}, "same": {}}
    sweep = make_sweep(tmp_path / "runs", base={**TINY, "name": "small"}, seeds=3, cells=cells)
    for first in (0, 1):
        shares = [{planned.run for planned in sweep.chosen((), (first + k, 4))} for k in range(4)]
        assert sorted(map(len, shares)) == [1, 1, 2, 2]
        assert set.union(*shares) == {planned.run for planned in sweep.planned}
    assert sweep.chosen((), (4, 4)) == sweep.chosen((), (0, 4))
    assert [planned.cell.name for planned in sweep.chosen(["b"], (1, 3))] == ["b"]
    for array in ((5, 4), (0, 0)):
        with pytest.raises(BadInput, match=rf"^--array {array[0]}/{array[1]}: accepted: K/N, with K from 0"):
            sweep.chosen((), array)
    (tmp_path / "small.yaml").write_text(sweep.to_yaml())
    arguments = ("sweep", "small.yaml", "--workers", "sweeps:one_thread", "--array")
    assert cli(*arguments, "1-4")[:2] == (2, "")
    code, _, errors = cli(*arguments, "2/4")
    assert (code, errors.splitlines()[0]) == (0, "--array 2/4: 1 of 6 runs")
    assert sorted(statuses(sweep)) == ["done"] * 2 + ["pending"] * 7  # two cells share this run
    for k in (1, 3, 4):
        assert cli(*arguments, f"{k}/4")[0] == 0
    check_done_once(sweep)
