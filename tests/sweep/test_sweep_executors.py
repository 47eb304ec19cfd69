"""Executors of sweeps: local processes (with functions that need no torch), Ray, Parsl."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
from sweeps import HERE, make_sweep, run_here, workers

from command_line import Cli
from gossamer import BadInput, Sweep, run_sweep
from gossamer.sweep.execute import Counts
from gossamer.sweep.pool import LocalPool, WorkerDied
from gossamer.sweep.table import states


@pytest.fixture
def pool() -> Iterator[LocalPool]:
    with LocalPool(1) as executor:
        yield executor


def test_worker_runs_calls_one_after_another(pool: LocalPool) -> None:
    pids = [pool.submit(os.getpid) for _ in range(3)]
    assert len({pid.result(60) for pid in pids}) == 1
    assert pids[0].result() != os.getpid()
    assert pool.submit(operator.concat, [1, "zwölf"], [None]).result(60) == [1, "zwölf", None]


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        (signal.raise_signal, 9, "killed by SIGKILL, as the system does when memory runs out"),
        (signal.raise_signal, 6, "killed by SIGABRT"),
        (os._exit, 3, "exit code 3"),
    ],
)
def test_dead_worker_is_explained_and_replaced(
    pool: LocalPool, function: Callable[..., Any], argument: int, message: str
) -> None:
    first = pool.submit(os.getpid).result(60)
    with pytest.raises(WorkerDied, match=message):
        pool.submit(function, argument).result(60)
    second = pool.submit(os.getpid).result(60)
    assert second != first
    assert not psutil.pid_exists(first)


def test_closed_pool_leaves_no_worker() -> None:
    with LocalPool(2) as executor:
        assert isinstance(executor, Executor)
        pids = [executor.submit(os.getpid).result(60), executor.submit(os.getppid).result(60)]
        assert psutil.pid_exists(pids[0])
    assert pids[1] == os.getpid()
    assert not psutil.pid_exists(pids[0])


def test_cancelling_shutdown_ends_pool_at_once() -> None:
    pool = LocalPool(1)
    pid = pool.submit(os.getpid).result(60)
    endless, queued = pool.submit(time.sleep, 1e6), pool.submit(os.getpid)
    pool.shutdown(cancel_futures=True)
    assert queued.cancelled()
    assert endless.cancelled() or isinstance(endless.exception(0), WorkerDied)
    assert not psutil.pid_exists(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="on other systems it ends after its call")
def test_orphaned_worker_ends() -> None:
    code = """
import os, time
from gossamer.sweep.pool import LocalPool
pool = LocalPool(1)
print(pool.submit(os.getpid).result(60), flush=True)
pool.submit(time.sleep, 1e6)
time.sleep(1e6)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as sweep:
        assert sweep.stdout is not None
        worker = psutil.Process(int(sweep.stdout.readline()))
        sweep.kill()
    assert psutil.wait_procs([worker], timeout=60)[1] == []


# --- Ray and Parsl

CELLS = {"a": {"initial": "independent"}, "b": {"batch_size": 4}}


def threads() -> Executor:
    """Parsl in threads of this process."""
    from parsl.concurrent import ParslPoolExecutor
    from parsl.config import Config
    from parsl.executors import ThreadPoolExecutor

    return ParslPoolExecutor(Config([ThreadPoolExecutor(max_threads=2)], initialize_logging=False))


def processes() -> Executor:
    """Parsl in its own processes, as on a cluster."""
    from parsl.concurrent import ParslPoolExecutor
    from parsl.config import Config
    from parsl.executors import HighThroughputExecutor

    local = HighThroughputExecutor(
        address="127.0.0.1", loopback_address="127.0.0.1", max_workers_per_node=2, poll_period=1
    )
    return ParslPoolExecutor(Config([local], initialize_logging=False))


def shown(sweep: Sweep) -> pl.DataFrame:
    """The results without columns that differ between attempts."""
    return sweep.results().drop("wall_s", "run")


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("parsl", "test_sweep_executors:threads"),
        pytest.param("parsl", "test_sweep_executors:processes", marks=pytest.mark.slow),
        pytest.param("ray", "ray", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)  # Ray's tasks give way to all other processes
@pytest.mark.filterwarnings("ignore")  # warnings of the packages
@pytest.mark.usefixtures("no_process_is_left")
def test_remote_results_equal_local_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    local, remote = (make_sweep(tmp_path / folder, seeds=2, cells=CELLS) for folder in ("here", "there"))
    assert run_here(local).counts == Counts(4, done=4)
    assert run_sweep(remote, name).counts == Counts(4, done=4)
    assert shown(remote).equals(shown(local))
    assert run_sweep(remote, name).counts == Counts(4, skipped=4)


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name"), [("parsl", "test_sweep_executors:processes"), ("ray", "ray")])
@pytest.mark.timeout(600)  # Ray's tasks give way to all other processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_process_is_left")
def test_killed_worker_fails_only_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    dies = {"algorithm": {"name": "sweeps:Dies", "once": str(tmp_path / "died")}}
    sweep = make_sweep(tmp_path, cells={"dies": dies, **CELLS})
    outcome = run_sweep(sweep, name)
    assert outcome.counts == Counts(3, done=2, failed=1)
    [(planned, state)] = outcome.failed
    assert planned.cell.name == "dies"
    assert "\n" not in str(state.cause)
    assert run_sweep(sweep, name, retry_failed=True).counts == Counts(3, skipped=2, done=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_process_is_left")
def test_signal_stops_ray_runs_gracefully(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    asks = {"name": "sweeps:AsksForTheEnd", "asked": str(tmp_path / "asked"), "pid": os.getpid()}
    sweep = make_sweep(tmp_path, seeds=3, cells={"a": {"algorithm": asks}})
    outcome = run_sweep(sweep, "ray")
    assert outcome.stopped
    assert sorted(state.status for state in states(sweep).values())[-1] == "stopped"
    for pid in workers(tmp_path / "asked"):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(60)  # Ray ends its workers a moment after the sweep
    run_here(sweep)  # one run may have completed before the signal
    assert {state.status for state in states(sweep).values()} == {"done"}


class Broken(Executor):
    """Accepts one run, and loses it."""

    taken = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.taken += 1
        if self.taken > 1:
            raise RuntimeError("no cluster answers")
        future: Future[Any] = Future()
        future.set_exception(ConnectionError("the node is gone"))
        return future


def test_dead_executor_is_reported_and_sweep_can_continue(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(make_sweep(tmp_path, seeds=3).to_yaml())
    code, out, err = cli("sweep", "sweep.yaml", "--workers", "test_sweep_executors:Broken")
    assert code == 1
    refused, lost = [line for line in err.splitlines() if " runs to do; " not in line]
    assert refused.startswith(
        "0/3  small, seed 2: pending: the executor failed: RuntimeError: no cluster answers"
    )
    assert lost == (
        "0/3  small, seed 1: pending: the executor lost it before it began: ConnectionError: the node is gone"
    )
    assert "STOPPED  3 runs are left; the same command continues with them" in out.splitlines()
    assert '"done": 3' in cli("sweep", "sweep.yaml", *HERE, "--json")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "math:pi"], "error: --workers math:pi: TypeError: 'float' object is not callable"),
        (["--workers", "ray", "--jobs", "2"], "error: --jobs: accepted without --workers"),
    ],
)
def test_bad_options_are_refused(cli: Cli, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "sweep.yaml").write_text(make_sweep(tmp_path).to_yaml())
    code, _, err = cli("sweep", "sweep.yaml", *arguments)
    assert code == 2
    assert err.startswith(message)
    assert err.count("\n") == 1
    with pytest.raises(BadInput, match="--workers"):
        run_sweep(make_sweep(tmp_path), "nothing:there")
