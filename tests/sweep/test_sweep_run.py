"""Running a sweep: finished, pending and failed runs, with the same results as single runs."""

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
from sweeps import TINY, make_sweep, run_here, workers

from gossamer import BadInput, Experiment, Sweep, load_run, run, run_sweep
from gossamer.sweep.cells import Planned
from gossamer.sweep.execute import Counts, SweepObserver, SweepOutcome, jobs_for
from gossamer.sweep.table import RunState, states


def statuses(sweep: Sweep) -> list[str]:
    current = states(sweep)
    return [current[planned.run].status for planned in sweep.planned]


def written(sweep: Sweep) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((sweep.folder / "sweep.json").read_text())["runs"]
    return runs


def models(sweep: Sweep) -> list[torch.Tensor]:
    folders = [states(sweep)[planned.run].folder for planned in sweep.planned]
    parameters = [load_run(folder).parameters for folder in folders if folder is not None]
    return [model for model in parameters if model is not None]


class Remote(Executor):
    """Pickles every call, as for another machine, and executes calls only when all are submitted."""

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
        """Execute all calls, the last one first."""
        while self.calls:
            future, call = self.calls.pop()
            function, arguments, keywords = pickle.loads(call)  # noqa: S301 - our own
            future.set_running_or_notify_cancel()
            result = function(*arguments, **keywords)
            assert json.loads(json.dumps(result)) == result
            future.set_result(result)


class InTurn(Executor):
    """Executes the first call when it is submitted; later calls stay cancellable."""

    first = True

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.first:
            self.first = False
            future.set_result(fn(*args, **kwargs))
        return future


def test_every_run_is_done_once_and_recorded(tmp_path: Path) -> None:
    cells = {"a": {"optimizer.lr": 0.05}, "b": {}, "same": {}}
    sweep = make_sweep(tmp_path, seeds=2, cells=cells)
    outcome = run_here(sweep)
    assert outcome == SweepOutcome(Counts(4, done=4), (), False)
    assert statuses(sweep) == ["done"] * 6
    assert len(list(sweep.folder.glob("*/*/experiment.yaml"))) == 4
    for planned, entry in zip(sweep.planned, written(sweep), strict=True):
        recorded = load_run(sweep.folder / entry["folder"])
        experiment = Experiment.parse((recorded.path / "experiment.yaml").read_text()).override(
            name=planned.experiment.name
        )
        assert experiment == planned.experiment
        assert (entry["cell"], entry["seed"], entry["status"]) == (
            planned.cell.name,
            planned.experiment.seed,
            "done",
        )
    assert (sweep.folder / "sweep.yaml").read_text() == sweep.to_yaml()
    assert (sweep.folder / "results.parquet").exists()
    assert len((sweep.folder / "results.csv").read_text().splitlines()) == 7


def test_finished_runs_are_skipped(tmp_path: Path) -> None:
    run_here(make_sweep(tmp_path, seeds=2))
    before = sorted(tmp_path.rglob("status.json"))
    more = make_sweep(tmp_path, seeds=3)
    assert run_here(more).counts == Counts(3, skipped=2, done=1)
    after = sorted(tmp_path.rglob("status.json"))
    assert len(after) == 3
    assert set(before) < set(after)
    assert run_here(more).counts == Counts(3, skipped=3)
    # The files are of the sweep that was called last, also if nothing was left to do.
    assert run_here(make_sweep(tmp_path, seeds=2)).counts == Counts(2, skipped=2)
    assert [run["seed"] for run in written(more)] == [1, 2]
    run_here(more)
    assert [run["seed"] for run in written(more)] == [1, 2, 3]


def test_interrupted_and_stopped_runs_are_repeated(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    run_here(sweep)
    [run_name] = {planned.run for planned in sweep.planned}
    for status in (None, "", '{"status": "do', "[]", '{"status": "stopped"}'):
        attempt = states(sweep)[run_name].folder
        assert attempt is not None
        if status is None:
            (attempt / "status.json").unlink()
        else:
            (attempt / "status.json").write_text(status)
        assert statuses(sweep) == ["stopped" if status and "stopped" in status else "interrupted"]
        assert run_here(sweep).counts.done == 1
        assert statuses(sweep) == ["done"]
        assert attempt.exists()  # its record stays
    assert len(list((sweep.folder / run_name).iterdir())) == 6


def test_results_equal_single_runs_bit_for_bit(tmp_path: Path) -> None:
    cells = {"a": {}, "adam": {"optimizer": {"name": "adam", "lr": 0.01}, "batch_size": 4}}
    sweep = make_sweep(tmp_path, seeds=[2], cells=cells)
    run_here(sweep)
    for planned, swept in zip(sweep.planned, models(sweep), strict=True):
        overrides = cells[planned.cell.name]
        alone = run(Experiment.of({**TINY, **overrides, "seed": 2}), tmp_path / "alone").parameters
        assert alone is not None
        assert torch.equal(alone, swept)


def test_any_executor_gives_the_same_bits(tmp_path: Path) -> None:
    """Also threads of one process, and an executor of another machine, with pickled calls and JSON results."""
    fields = {"seeds": 3, "base": {"initial": "independent", "batch_size": 4}}
    serial, local, remote = (make_sweep(tmp_path / name, **fields) for name in ("serial", "local", "remote"))
    run_here(serial)
    with ThreadPoolExecutor(4) as pool:
        assert run_sweep(local, pool).counts.done == 3
        assert pool.submit(int).result() == 0  # the caller shuts it down
    assert run_sweep(remote, Remote(3)).counts.done == 3
    for first, second, third in zip(models(serial), models(local), models(remote), strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_failed_run_is_named_and_retried_only_on_request(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.touch()
    cells = {
        "good": {},
        "bad": {"algorithm": {"name": "sweeps:Fails", "while_there": str(bad)}},
        "fine": {"batch_size": 4},
    }
    sweep = make_sweep(tmp_path, cells=cells)
    outcome = run_here(sweep)
    assert outcome.counts == Counts(3, done=2, failed=1)
    [(planned, state)] = outcome.failed
    assert planned.cell.name == "bad"
    assert state.cause is not None
    assert (
        "node 1 failed in round 0: ValueError: the second node has had enough (sweeps.py, line" in state.cause
    )
    assert "\n" not in state.cause
    assert statuses(sweep) == ["done", "failed", "done"]
    assert written(sweep)[1]["cause"] == state.cause

    bad.unlink()
    again = run_here(sweep)
    assert again.counts == Counts(3, skipped=3)
    assert [(failed.cell.name, state.cause) for failed, state in again.failed] == [("bad", state.cause)]
    retried = run_here(sweep, retry_failed=True)
    assert retried.counts == Counts(3, skipped=2, done=1)
    assert retried.failed == ()
    assert statuses(sweep) == ["done"] * 3


def test_diverged_run_is_retried_only_on_request(tmp_path: Path) -> None:
    steps = {"algorithm.local_steps": 40, "optimizer.lr": 1e9}
    sweep = make_sweep(tmp_path, cells={"good": {}, "wild": steps})
    outcome = run_here(sweep)
    assert outcome.counts == Counts(2, done=1, diverged=1)
    [(planned, state)] = outcome.failed
    assert (planned.cell.name, state.status) == ("wild", "diverged")
    assert state.cause is not None
    assert "is not finite after" in state.cause
    assert sweep.results()["status"].to_list() == ["done", "diverged"]
    assert run_here(sweep).counts == Counts(2, skipped=2)
    assert run_here(sweep, retry_failed=True).counts == Counts(2, skipped=1, diverged=1)


def test_again_repeats_finished_runs_and_newest_counts(tmp_path: Path) -> None:
    """For changes that no hash covers, here of the behaviour of an algorithm."""
    bad = tmp_path / "bad"
    cells = {
        "changed": {"algorithm": {"name": "sweeps:Fails", "while_there": str(bad)}},
        "other": {"batch_size": 4},
    }
    sweep = make_sweep(tmp_path, cells=cells)
    run_here(sweep)
    older = [states(sweep)[planned.run].folder for planned in sweep.planned]
    assert run_here(sweep, again=True, only=["changed"]).counts == Counts(1, done=1)
    newer = [states(sweep)[planned.run].folder for planned in sweep.planned]
    assert newer[0] != older[0]
    assert newer[1] == older[1]
    assert load_run(str(older[0])).status == "done"  # its record stays
    assert [sweep.folder / entry["folder"] for entry in written(sweep)] == newer
    assert [sweep.folder / run for run in sweep.results()["run"]] == newer

    bad.touch()
    outcome = run_here(sweep, again=True)
    assert outcome.counts == Counts(2, done=1, failed=1)
    assert [planned.cell.name for planned, _ in outcome.failed] == ["changed"]
    assert statuses(sweep) == ["done", "done"]  # as before the failure
    assert states(sweep)[sweep.planned[0].run].folder == newer[0]


def test_again_does_not_retry_failures(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.touch()
    cells = {"good": {}, "bad": {"algorithm": {"name": "sweeps:Fails", "while_there": str(bad)}}}
    sweep = make_sweep(tmp_path, cells=cells)
    run_here(sweep)
    assert run_here(sweep, again=True).counts == Counts(2, skipped=1, done=1)
    bad.unlink()
    assert run_here(sweep, again=True, retry_failed=True).counts == Counts(2, done=2)


def test_failure_before_run_folder_exists_is_retried(tmp_path: Path) -> None:
    """With an executor of the caller, the worker looks for data."""
    missing = {"topology": {"name": "edge-list", "path": str(tmp_path / "graph.txt")}}
    sweep = make_sweep(tmp_path, cells={"a": {}, "b": missing})
    assert [state.cause for _, state in run_here(sweep).failed if state.cause and "graph.txt" in state.cause]
    assert [entry["status"] for entry in written(sweep)] == ["done", "failed"]
    assert run_here(sweep).counts == Counts(2, skipped=1, failed=1)
    (tmp_path / "graph.txt").write_text("0 1\n1 2\n2 3\n")
    assert run_here(sweep).counts.done == 1
    assert statuses(sweep) == ["done", "done"]


def test_impossible_topology_is_found_before_any_run(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, cells={"a": {}, "b": {"topology": {"name": "random-regular", "degree": 5}}})
    with pytest.raises(BadInput, match=r"^cell b: .*degree"):
        run_sweep(sweep)
    assert not sweep.folder.exists()


def test_only_selected_cells_run_but_all_are_listed(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, cells={"a": {}, "b": {"batch_size": 4}})
    assert run_here(sweep, only=["b"]).counts.total == 1
    assert statuses(sweep) == ["pending", "done"]
    assert [entry["status"] for entry in written(sweep)] == ["pending", "done"]


def test_signal_between_runs_stops_the_sweep(tmp_path: Path) -> None:
    class Asks(SweepObserver):
        def say(self, text: str) -> None:
            said.append(text)

        def ended(self, planned: Planned, state: RunState, counts: Counts, value: str) -> None:
            if counts.done == 1:
                os.kill(os.getpid(), signal.SIGINT)

    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    sweep = make_sweep(tmp_path, seeds=3)
    outcome = run_sweep(sweep, InTurn(), observer=Asks())
    assert signal.getsignal(signal.SIGINT) == before
    [answer] = said
    what = "the sweep ends, and the runs that have begun keep their records"
    assert answer.startswith(f"Ctrl-C: {what}; once more ends it at once")
    assert outcome.stopped
    assert statuses(sweep) == ["done", "pending", "pending"]
    assert [entry["status"] for entry in written(sweep)] == ["done", "pending", "pending"]


def test_killed_process_fails_only_its_run(tmp_path: Path) -> None:
    dies = {"name": "sweeps:Dies", "once": str(tmp_path / "died")}
    cells = {"a": {}, "b": {"batch_size": 4}, "dies": {"algorithm": dies}}
    engine = {"engine": {"name": "simulate", "trainer": "sequential"}}
    sweep = make_sweep(tmp_path / "pool", base=engine, cells=cells)
    outcome = run_sweep(sweep, jobs=2)
    assert outcome.counts == Counts(3, done=2, failed=1)
    [(planned, state)] = outcome.failed
    assert planned.cell.name == "dies"
    assert state.cause is not None
    assert "killed by SIGKILL" in state.cause
    assert statuses(sweep) == ["done", "done", "failed"]
    assert state.folder is not None
    assert load_run(state.folder).error == state.cause
    assert load_run(state.folder).metrics.height > 0  # rows before the kill

    [recorded] = [load_run(folder) for folder in (sweep.folder / sweep.planned[0].run).iterdir()]
    assert recorded.experiment["engine"]["workers"] == 1
    alone = make_sweep(tmp_path / "alone", cells={"a": {}, "b": {"batch_size": 4}})
    run_here(alone)
    for first, second in zip(models(sweep), models(alone), strict=True):
        assert torch.equal(first, second)


def test_signal_stops_runs_and_next_call_continues(tmp_path: Path) -> None:
    jobs = 2
    asks = {
        "name": "sweeps:AsksForTheEnd",
        "asked": str(tmp_path / "asked"),
        "pid": os.getpid(),
        "runs": jobs,
    }
    sweep = make_sweep(tmp_path, seeds=3, cells={"a": {"algorithm": asks}})
    outcome = run_sweep(sweep, jobs=jobs)
    assert outcome.stopped
    assert outcome.counts == Counts(3)
    assert statuses(sweep) == ["stopped"] * jobs + ["pending"] * (3 - jobs)
    assert [entry["status"] for entry in written(sweep)] == statuses(sweep)
    stopped = states(sweep)[sweep.planned[0].run].folder
    assert stopped is not None
    assert load_run(stopped).metrics.height > 0
    pids = workers(tmp_path / "asked")
    assert len(pids) == jobs
    assert os.getpid() not in pids
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert run_here(sweep).counts.done == 3


def test_uncancellable_calls_see_that_the_sweep_was_stopped(tmp_path: Path) -> None:
    class Asks:
        def update(self, counts: Counts) -> None:
            if counts.left == 3 and not executor.asked:
                executor.asked = True
                os.kill(os.getpid(), signal.SIGTERM)
            elif [*sweep.folder.glob(".stopped-*")]:
                executor.carry_out()

        def ended(self, planned: Planned, state: RunState, counts: Counts, value: str) -> None:
            raise AssertionError("none has begun")

        def say(self, text: str) -> None:
            assert text.startswith("SIGTERM: the sweep ends")

    class Parsl(Remote):
        """Can't cancel, and executes nothing before :meth:`carry_out`."""

        asked = False

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(fn, *args, **kwargs)
            future.cancel = self.refuse  # type: ignore[method-assign]
            return future

        def refuse(self) -> bool:
            raise NotImplementedError

    sweep, executor = make_sweep(tmp_path, seeds=3), Parsl(-1)
    assert run_sweep(sweep, executor, observer=Asks()) == SweepOutcome(Counts(3), (), True)
    assert statuses(sweep) == ["pending"] * 3
    assert run_here(sweep).counts.done == 3


def test_unwritable_out_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(BadInput, match=r"^--out .*; accepted: a place that can be written to"):
        run_here(make_sweep(tmp_path / "runs"))


def test_runs_of_a_sweep_do_not_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gossamer"):
        run_here(make_sweep(tmp_path, base={"engine": "simulate"}))
    assert [text for text in caplog.messages if "compiling" not in text] == []  # on a machine's first run


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
    assert jobs(100, "processes") == 1  # real time must not be shared
    assert jobs_for([]) == 1
