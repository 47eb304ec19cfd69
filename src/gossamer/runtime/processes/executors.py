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
from typing import Any

from gossamer.errors import BadInput, cause

log = logging.getLogger("gossamer")


def worker_main(address: str, token: str, slots: int) -> int:
    """Run a worker until its run is over; gives its exit code. This is what an executor is given.

    The worker is a separate process, since it forks: an executor may call this in any thread.
    """
    path = os.pathsep.join(each for each in sys.path if each)
    command = [sys.executable, "-m", "gossamer", "worker", address, "--slots", str(slots), "--quiet"]
    environment = {**os.environ, "GOSSAMER_TOKEN": token, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode


def executor_of(name: str) -> Executor:
    """The executor of a name: "ray", or "module:factory" for what the factory returns.

    Raises:
        BadInput: for another name, and for a factory that fails.
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
    """Tasks of Ray, of one core each: on the cluster that RAY_ADDRESS names, or on a local one that ends with this executor.

    Raises:
        BadInput: if Ray is not installed.
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
    """Have an executor run ``count`` workers of ``slots`` each, which end with the run; raises as :func:`executor_of`."""
    executor = executor_of(name)

    def tell(done: Future[int]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None or done.result():
            log.warning("a worker of %s failed: %s", name, error or f"exit code {done.result()}")

    try:
        for _ in range(count):
            executor.submit(worker_main, address, token, slots).add_done_callback(tell)
        yield
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
