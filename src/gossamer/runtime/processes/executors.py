"""Workers that an executor starts: Ray, or any ``concurrent.futures.Executor``."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from gossamer.errors import BadInput, cause

log = logging.getLogger("gossamer")


def worker_main(address: str, token: str, slots: int) -> int:
    """Be a worker until its run is over; gives its exit code. This is what an executor is given.

    The worker is a process of its own, since it forks: an executor may call this in any thread.
    """
    path = os.pathsep.join(each for each in sys.path if each)
    command = [sys.executable, "-m", "gossamer", "worker", address, "--slots", str(slots), "--quiet"]
    environment = {**os.environ, "GOSSAMER_TOKEN": token, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode


def executor_of(name: str) -> Executor:
    """The executor of a name: "ray", or "module:factory" for what the factory returns.

    Raises:
        BadInput: for a name of neither, and for a factory that fails.
    """
    if name == "ray":
        return RayExecutor()
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise BadInput(f"--workers {name}: {cause(error)}; accepted: ray, or module:factory") from error
    if not isinstance(made, Executor):
        found = type(made).__name__
        raise BadInput(f"--workers {name}: gives {found}; accepted: a concurrent.futures.Executor")
    return made


class RayExecutor(Executor):
    """Tasks of Ray, of one core each: on the cluster that RAY_ADDRESS names, or on a local one that ends with this.

    Raises:
        BadInput: where Ray is not installed.
    """

    def __init__(self) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise BadInput(
                "--workers ray: Ray is not installed; accepted: pip install gossamer[ray]"
            ) from None
        self._own = not self._ray.is_initialized()
        if self._own:
            self._ray.init(log_to_driver=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a task."""
        task = self._ray.remote(num_cpus=1, max_retries=0)(fn)
        future: Future[Any] = task.remote(*args, **kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave Ray, if it was started here."""
        if self._own:
            self._ray.shutdown()


@contextmanager
def started_workers(name: str, count: int, address: str, token: str, slots: int) -> Iterator[None]:
    """Have an executor run some workers; they end with the run.

    Args:
        name: of the executor.
        count: how many workers.
        address: where they join.
        token: of the run.
        slots: of each worker.

    Raises:
        BadInput: as :func:`executor_of`.
    """
    executor = executor_of(name)
    try:
        for number in range(1, count + 1):
            future = executor.submit(worker_main, address, token, slots)
            future.add_done_callback(partial(_tell, name, number))
        yield
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _tell(name: str, number: int, done: Future[int]) -> None:
    if done.cancelled():
        return
    if (error := done.exception()) is not None:
        log.warning("worker %d of %s failed: %s", number, name, error)
    elif done.result():
        log.warning("worker %d of %s ended with exit code %d", number, name, done.result())
