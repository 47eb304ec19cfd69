"""Carrying a sweep out: what is done, what is left, what failed; and that it is what single runs would give."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sweeps import TINY, done, sweep, workers

from gossamer import BadInput, Experiment, Sweep, load_run, run, run_sweep
from gossamer.results.folder import locked
from gossamer.sweep.execute import Counts, SweepOutcome, jobs_for
from gossamer.sweep.sweep import Planned
from gossamer.sweep.table import State, states


def statuses(of: Sweep) -> list[str]:
    at = states(of)
    return [at[each.run].status for each in of.planned]


def written(of: Sweep) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((of.folder / "sweep.json").read_text())["runs"]
    return runs


def models(of: Sweep) -> list[torch.Tensor]:
    folders = [states(of)[each.run].folder for each in of.planned]
    found = [load_run(folder).parameters for folder in folders if folder is not None]
    return [each for each in found if each is not None]


class Remote(Executor):
    """Everything crosses a border, as on another machine, and nothing is done until all is submitted."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.calls: list[tuple[Future[Any], bytes]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, pickle.dumps((fn, args, kwargs))))
        self.left -= 1
        if self.left == 0:
            self.carry_out()
        return future

    def carry_out(self) -> None:
        """Do all calls, the last one first."""
        while self.calls:
            future, call = self.calls.pop()
            function, arguments, keywords = pickle.loads(call)  # noqa: S301 - our own
            future.set_running_or_notify_cancel()
            result = function(*arguments, **keywords)
            assert json.loads(json.dumps(result)) == result
            future.set_result(result)


class InTurn(Executor):
    """Begins a run when it is submitted; the last ones may be taken back."""

    first = True

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.first:
            self.first = False
            future.set_result(fn(*args, **kwargs))
        return future


def test_every_run_is_done_once_and_recorded(tmp_path: Path) -> None:
    cells = {"a": {"optimizer.lr": 0.05}, "b": {}, "same": {}}
    found = sweep(tmp_path, seeds=2, cells=cells)
    outcome = done(found)
    assert outcome == SweepOutcome(Counts(4, done=4), (), False)
    assert statuses(found) == ["done"] * 6
    assert len(list(found.folder.glob("*/*/experiment.yaml"))) == 4
    for each, entry in zip(found.planned, written(found), strict=True):
        recorded = load_run(found.folder / entry["folder"])
        said = Experiment.parse((recorded.path / "experiment.yaml").read_text()).override(
            name=each.experiment.name
        )
        assert said == each.experiment
        assert (entry["cell"], entry["seed"], entry["status"]) == (
            each.cell.name,
            each.experiment.seed,
            "done",
        )
    assert (found.folder / "sweep.yaml").read_text() == found.to_yaml()
    assert (found.folder / "results.parquet").exists()
    assert len((found.folder / "results.csv").read_text().splitlines()) == 7


def test_finished_runs_are_skipped(tmp_path: Path) -> None:
    done(sweep(tmp_path, seeds=2))
    before = sorted(tmp_path.rglob("status.json"))
    more = sweep(tmp_path, seeds=3)
    assert done(more).counts == Counts(3, skipped=2, done=1)
    after = sorted(tmp_path.rglob("status.json"))
    assert len(after) == 3
    assert set(before) < set(after)
    assert done(more).counts == Counts(3, skipped=3)


def test_interrupted_and_stopped_runs_are_repeated(tmp_path: Path) -> None:
    found = sweep(tmp_path)
    done(found)
    [run_] = {each.run for each in found.planned}
    for status in (None, "", '{"status": "do', "[]", '{"status": "stopped"}'):
        attempt = states(found)[run_].folder
        assert attempt is not None
        if status is None:
            (attempt / "status.json").unlink()
        else:
            (attempt / "status.json").write_text(status)
        assert statuses(found) == ["stopped" if status and "stopped" in status else "interrupted"]
        assert done(found).counts.done == 1
        assert statuses(found) == ["done"]
        assert attempt.exists()  # what it recorded stays
    assert len(list((found.folder / run_).iterdir())) == 6


def test_results_equal_single_runs_bit_for_bit(tmp_path: Path) -> None:
    cells = {"a": {}, "adam": {"optimizer": {"name": "adam", "lr": 0.01}, "batch_size": 4}}
    found = sweep(tmp_path, seeds=[2], cells=cells)
    done(found)
    for each, swept in zip(found.planned, models(found), strict=True):
        said = cells[each.cell.name]
        alone = run(Experiment.of({**TINY, **said, "seed": 2}), tmp_path / "alone").parameters
        assert alone is not None
        assert torch.equal(alone, swept)


def test_any_executor_gives_the_same_bits(tmp_path: Path) -> None:
    """Threads of one process take turns; what another machine is given can be pickled, and comes back as JSON."""
    fields = {"seeds": 3, "base": {"initial": "independent", "batch_size": 4}}
    serial, threads, remote = (sweep(tmp_path / name, **fields) for name in ("serial", "threads", "remote"))
    done(serial)
    with ThreadPoolExecutor(4) as pool:
        assert run_sweep(threads, pool).counts.done == 3
        assert pool.submit(int).result() == 0  # it is the caller's to shut down
    assert run_sweep(remote, Remote(3)).counts.done == 3
    for one, two, three in zip(models(serial), models(threads), models(remote), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_failed_run_is_named_and_retried_only_on_request(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.touch()
    cells = {
        "good": {},
        "bad": {"algorithm": {"name": "sweeps:Fails", "while_there": str(bad)}},
        "fine": {"batch_size": 4},
    }
    found = sweep(tmp_path, cells=cells)
    outcome = done(found)
    assert outcome.counts == Counts(3, done=2, failed=1)
    [(planned, state)] = outcome.failed
    assert planned.cell.name == "bad"
    assert state.cause is not None
    assert (
        "node 1 failed in round 0: ValueError: the second node has had enough (sweeps.py, line" in state.cause
    )
    assert "\n" not in state.cause
    assert statuses(found) == ["done", "failed", "done"]
    assert written(found)[1]["cause"] == state.cause

    bad.unlink()
    again = done(found)
    assert again.counts == Counts(3, skipped=3)
    assert [(each.cell.name, state.cause) for each, state in again.failed] == [("bad", state.cause)]
    retried = done(found, retry_failed=True)
    assert retried.counts == Counts(3, skipped=2, done=1)
    assert retried.failed == ()
    assert statuses(found) == ["done"] * 3


def test_diverged_run_is_retried_only_on_request(tmp_path: Path) -> None:
    steps = {"algorithm.local_steps": 40, "optimizer.lr": 1e9}
    found = sweep(tmp_path, cells={"good": {}, "wild": steps})
    outcome = done(found)
    assert outcome.counts == Counts(2, done=1, diverged=1)
    [(planned, state)] = outcome.failed
    assert (planned.cell.name, state.status) == ("wild", "diverged")
    assert state.cause is not None
    assert "is not finite after" in state.cause
    assert found.results()["status"].to_list() == ["done", "diverged"]
    assert done(found).counts == Counts(2, skipped=2)
    assert done(found, retry_failed=True).counts == Counts(2, skipped=1, diverged=1)


def test_again_repeats_finished_runs_and_newest_counts(tmp_path: Path) -> None:
    """For what no hash sees: here an algorithm that does otherwise than before."""
    bad = tmp_path / "bad"
    cells = {
        "changed": {"algorithm": {"name": "sweeps:Fails", "while_there": str(bad)}},
        "other": {"batch_size": 4},
    }
    found = sweep(tmp_path, cells=cells)
    done(found)
    older = [states(found)[each.run].folder for each in found.planned]
    assert done(found, again=True, only=["changed"]).counts == Counts(1, done=1)
    newer = [states(found)[each.run].folder for each in found.planned]
    assert newer[0] != older[0]
    assert newer[1] == older[1]
    assert load_run(str(older[0])).status == "done"  # its record stays
    assert [found.folder / entry["folder"] for entry in written(found)] == newer
    assert [found.folder / run for run in found.results()["run"]] == newer

    bad.touch()
    outcome = done(found, again=True)
    assert outcome.counts == Counts(2, done=1, failed=1)
    assert [each.cell.name for each, _ in outcome.failed] == ["changed"]
    assert statuses(found) == ["done", "done"]  # as it was before that
    assert states(found)[found.planned[0].run].folder == newer[0]


def test_again_does_not_retry_failures(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.touch()
    cells = {"good": {}, "bad": {"algorithm": {"name": "sweeps:Fails", "while_there": str(bad)}}}
    found = sweep(tmp_path, cells=cells)
    done(found)
    assert done(found, again=True).counts == Counts(2, skipped=1, done=1)
    bad.unlink()
    assert done(found, again=True, retry_failed=True).counts == Counts(2, done=2)


def test_failure_before_run_folder_exists_is_retried(tmp_path: Path) -> None:
    """With an executor of the caller, data is looked for where the run is done."""
    missing = {"topology": {"name": "edge-list", "path": str(tmp_path / "graph.txt")}}
    found = sweep(tmp_path, cells={"a": {}, "b": missing})
    assert [state.cause for _, state in done(found).failed if state.cause and "graph.txt" in state.cause]
    assert [entry["status"] for entry in written(found)] == ["done", "failed"]
    assert done(found).counts == Counts(2, skipped=1, failed=1)
    (tmp_path / "graph.txt").write_text("0 1\n1 2\n2 3\n")
    assert done(found).counts.done == 1
    assert statuses(found) == ["done", "done"]


def test_impossible_topology_is_found_before_any_run(tmp_path: Path) -> None:
    found = sweep(tmp_path, cells={"a": {}, "b": {"topology": {"name": "random-regular", "degree": 5}}})
    with pytest.raises(BadInput, match=r"^cell b: .*degree"):
        run_sweep(found)
    assert not found.folder.exists()


def test_only_selected_cells_run_but_all_are_listed(tmp_path: Path) -> None:
    found = sweep(tmp_path, cells={"a": {}, "b": {"batch_size": 4}})
    assert done(found, only=["b"]).counts.total == 1
    assert statuses(found) == ["pending", "done"]
    assert [entry["status"] for entry in written(found)] == ["pending", "done"]


def test_signal_between_runs_stops_the_sweep(tmp_path: Path) -> None:
    class Asks:
        def update(self, counts: Counts) -> None:
            pass

        def ended(self, planned: Planned, state: State, counts: Counts, value: str) -> None:
            if counts.done == 1:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    found = sweep(tmp_path, seeds=3)
    outcome = run_sweep(found, InTurn(), observer=Asks())
    assert signal.getsignal(signal.SIGINT) == before
    assert outcome.stopped
    assert statuses(found) == ["done", "pending", "pending"]
    assert [entry["status"] for entry in written(found)] == ["done", "pending", "pending"]


def test_killed_process_fails_only_its_run(tmp_path: Path) -> None:
    dies = {"name": "sweeps:Dies", "once": str(tmp_path / "died")}
    cells = {"a": {}, "b": {"batch_size": 4}, "dies": {"algorithm": dies}}
    unsaid = {"engine": {"name": "simulate", "trainer": "sequential"}}
    found = sweep(tmp_path / "pool", base=unsaid, cells=cells)
    outcome = run_sweep(found, jobs=2)
    assert outcome.counts == Counts(3, done=2, failed=1)
    [(planned, state)] = outcome.failed
    assert planned.cell.name == "dies"
    assert state.cause is not None
    assert "killed by SIGKILL" in state.cause
    assert statuses(found) == ["done", "done", "failed"]
    assert state.folder is not None
    assert load_run(state.folder).error == state.cause
    assert load_run(state.folder).metrics.height > 0  # what it had recorded

    [recorded] = [load_run(folder) for folder in (found.folder / found.planned[0].run).iterdir()]
    assert recorded.experiment["engine"]["workers"] == 1
    alone = sweep(tmp_path / "alone", cells={"a": {}, "b": {"batch_size": 4}})
    done(alone)
    for one, two in zip(models(found), models(alone), strict=True):
        assert torch.equal(one, two)


def test_signal_stops_runs_and_next_call_continues(tmp_path: Path) -> None:
    jobs = 2
    asks = {
        "name": "sweeps:AsksForTheEnd",
        "asked": str(tmp_path / "asked"),
        "of": os.getpid(),
        "least": jobs,
    }
    found = sweep(tmp_path, seeds=3, cells={"a": {"algorithm": asks}})
    outcome = run_sweep(found, jobs=jobs)
    assert outcome.stopped
    assert outcome.counts == Counts(3)
    assert statuses(found) == ["stopped"] * jobs + ["pending"] * (3 - jobs)
    assert [entry["status"] for entry in written(found)] == statuses(found)
    stopped = states(found)[found.planned[0].run].folder
    assert stopped is not None
    assert load_run(stopped).metrics.height > 0
    pids = workers(tmp_path / "asked")
    assert len(pids) == jobs
    assert os.getpid() not in pids
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert done(found).counts.done == 3


def test_uncancellable_calls_see_that_the_sweep_was_stopped(tmp_path: Path) -> None:
    class Asks:
        def update(self, counts: Counts) -> None:
            if counts.left == 3 and not executor.asked:
                executor.asked = True
                os.kill(os.getpid(), signal.SIGTERM)
            elif (found.folder / ".stopped").exists():
                executor.carry_out()

        def ended(self, planned: Planned, state: State, counts: Counts, value: str) -> None:
            raise AssertionError("none has begun")

    class Parsl(Remote):
        """Can't cancel, and does nothing before it is told to."""

        asked = False

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(fn, *args, **kwargs)
            future.cancel = self.refuse  # type: ignore[method-assign]
            return future

        def refuse(self) -> bool:
            raise NotImplementedError

    found, executor = sweep(tmp_path, seeds=3), Parsl(-1)
    assert run_sweep(found, executor, observer=Asks()) == SweepOutcome(Counts(3), (), True)
    assert statuses(found) == ["pending"] * 3
    assert done(found).counts.done == 3


def test_concurrent_sweeps_in_one_folder_are_refused(tmp_path: Path) -> None:
    found = sweep(tmp_path)
    found.folder.mkdir()
    with locked(found.folder, ""), pytest.raises(BadInput, match="another process is running this sweep"):
        done(found)
    assert statuses(found) == ["pending"]


def test_unwritable_out_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(BadInput, match=r"^--out .*; accepted: a place that can be written to"):
        done(sweep(tmp_path / "runs"))


def test_runs_of_a_sweep_do_not_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gossamer"):
        done(sweep(tmp_path, base={"engine": "simulate"}))
    assert caplog.messages == []


def test_default_jobs_fit_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.sweep.execute.cores", lambda: 8)

    def jobs(count: int, engine: Any) -> int:
        return jobs_for([Experiment.of({**TINY, "engine": engine})] * count)

    assert jobs(100, "simulate") == 8
    assert jobs(3, "simulate") == 3
    assert jobs(100, {"name": "simulate", "workers": 2}) == 4
    assert jobs(100, {"name": "simulate", "workers": 2, "threads": 2}) == 2
    assert jobs(100, {"name": "simulate", "workers": 20}) == 1
    assert jobs(100, {"name": "simulate", "device": "cuda"}) == 1
    assert jobs(100, "processes") == 1  # its time is real
    assert jobs_for([]) == 1
