"""Starts workers with an executor: Ray, or any ``concurrent.futures.Executor``."""

from __future__ import annotations

import importlib
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gossamer.errors import BadInput, cause
from gossamer.runtime.processes.fork_server import Listen
from gossamer.startup import environment, make_importable, program

_WAIT_S = 5.0
"""Seconds for which a worker tries to reach a coordinator. It listens before workers start, so a coordinator out of reach has
ended its run."""
_END_S = 10.0
"""Seconds that workers have to end once their run is over."""


def worker_main(address: str, token: str, slots: int) -> int:
    """The executor's task: run a worker in its own process until its run is over. Returns the exit code."""
    options = ["--slots", str(slots), "--wait", str(_WAIT_S), "--quiet"]
    command = program("from gossamer.cli import main; main()", "worker", address, *options)
    variables = environment(GOSSAMER_TOKEN=token)
    return subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=False).returncode


def executor_of(name: str) -> Executor:
    """The executor of a name: "ray", or "module:factory" for the factory's executor. Raises BadInput for any
    other name, and if the factory fails."""
    if name == "ray":
        return RayExecutor()
    module, _, attribute = name.partition(":")
    # Executors look up modules and their own programs, so set both paths as an activated environment does.
    make_importable(str(Path.cwd()))
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    try:
        executor = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise BadInput(f"--workers {name}: {cause(error)}; accepted: ray, or module:factory") from error
    if not isinstance(executor, Executor):
        kind = type(executor).__name__
        raise BadInput(f"--workers {name}: returns {kind}; accepted: a concurrent.futures.Executor")
    return executor


class RayExecutor(Executor):
    """Runs tasks on Ray, with one core each: on the cluster that RAY_ADDRESS names, or on a local one that
    ends with this executor. Raises BadInput if Ray is not installed."""

    def __init__(self) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise BadInput(
                "--workers ray: Ray is not installed; accepted: pip install gossamer[ray]"
            ) from None
        self._owns_ray = not self._ray.is_initialized()
        if self._owns_ray:
            self._ray.init(log_to_driver=False, logging_level="WARNING", include_dashboard=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        task = self._ray.remote(num_cpus=1, max_retries=0)(fn).remote(*args, **kwargs)
        future: Future[Any] = task.future()
        # Ray interrupts a running task only in Python code: a blocking call, as in worker_main, ends first,
        # or with Ray. So the future ends with a result or an error, and never counts as cancelled.
        future.cancel = lambda: bool(self._ray.cancel(task))  # type: ignore[method-assign]
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._owns_ray:
            self._ray.shutdown()


@contextmanager
def started_workers(
    listen: Listen, address: str, slots: int, ended: Callable[[str], object]
) -> Iterator[None]:
    """Start the workers with an executor, each with ``slots`` slots. They join at ``address`` and end with
    the run. Raises as :func:`executor_of`. ``ended`` is called, from any thread, with the reason why a worker
    ended."""
    assert listen.executor is not None
    name, executor = listen.executor, executor_of(listen.executor)
    futures = []

    def report(number: int, future: Future[int]) -> None:
        if not future.cancelled():
            error = future.exception()
            how = f"exit code {future.result()}" if error is None else cause(error)
            ended(f"worker {number} of {name} ended before the run started: {how}")

    try:
        for number in range(1, listen.min_workers + 1):
            future = executor.submit(worker_main, address, listen.token, slots)
            future.add_done_callback(partial(report, number))
            futures.append(future)
        yield
    finally:
        wait(futures, _END_S)
        for future in futures:
            with suppress(NotImplementedError):  # Parsl's futures can't be cancelled
                future.cancel()
        executor.shutdown()
