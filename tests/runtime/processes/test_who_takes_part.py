"""Who takes part in a run of several machines: differences in code and data are refused by name, and the record says which
worker computed which nodes, with what, and when it was away."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import gossamer
from gossamer import Experiment, RunFailed
from gossamer.fingerprint import own_sources
from gossamer.results.folder import this_computer
from gossamer.results.observer import Observer
from gossamer.results.report import render
from gossamer.runtime.processes.coordinator import workers as coordinator_workers
from gossamer.runtime.processes.coordinator.computers import differing, new_numerics
from gossamer.runtime.processes.coordinator.listener import WorkerListener
from gossamer.runtime.processes.fork_server import Listen
from gossamer.runtime.processes.worker.worker import run_worker
from worker_fleet import TOKEN, Fleet

ALGORITHM = """
from pathlib import Path
from gossamer import Algorithm

class Lazy(Algorithm):
    local_steps: int = 1
    after: str = ""
    fails: int = -1

    async def run(self, node):
        async for r in node.rounds():
            while self.after and r and not Path(self.after).exists():
                await node.sleep(0.02)
            if node.rank == self.fails and r:
                raise ValueError("a broken sensor")
            await node.train(self.local_steps)
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))
"""
TASK = """
from pathlib import Path
import numpy as np
import torch
from gossamer.tasks import Task

def load(data_root=None):
    tables = [np.loadtxt(path, delimiter=",", dtype=np.float32) for path in sorted(Path(data_root).glob("*.csv"))]
    rows = torch.from_numpy(np.concatenate(tables))
    x, y = rows[:, :2].contiguous(), rows[:, 2].long()
    owners = torch.arange(len(tables)).repeat_interleave(len(tables[0]))
    loss = torch.nn.functional.cross_entropy
    return Task(model=lambda: torch.nn.Linear(2, 4), train=(x, y), test=(x, y), loss=loss, groups=owners)
"""
NODES = 3
PREPARED = "the coordinator has prepared the run"


def write_machine(folder: Path, *, steps: str = "", shift: int = 0, missing: int | None = None) -> None:
    """The code and the data of a machine: one file of measurements for each node."""
    (folder / "data").mkdir(parents=True)
    (folder / "lazy.py").write_text(ALGORITHM.replace("self.local_steps)", f"self.local_steps{steps})"))
    (folder / "sensors.py").write_text(TASK)
    for owner in range(NODES):
        if owner != missing:
            rows = [f"{k}.0,{owner}.5,{(k + owner + shift * (owner == 1)) % 3}" for k in range(6)]
            (folder / "data" / f"sensor-{owner}.csv").write_text("\n".join(rows))


def experiment(**changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "name": "machines",
        "nodes": NODES,
        "task": "sensors:load",
        "partition": "iid",
        "topology": "complete",
        "algorithm": "lazy:Lazy",
        "batch_size": 4,
        "data_root": "data",
        "evaluation": {"every_rounds": 1},
        "failures": {"detection_s": 3.0},
        "stop": {"rounds": 2},
        "engine": {"name": "processes", "trainer": "sequential"},
    }
    return Experiment.of({**fields, **changes})


class Says(Observer):
    """Keeps messages to the user, and acts once when one has some words."""

    def __init__(self, *acts: tuple[str, int, Callable[[], object]]) -> None:
        self.texts: list[str] = []
        self._acts = list(acts)  # (words, the number of texts with them, what to do then)

    def start(self, description: Mapping[str, Any]) -> None:
        self.say(PREPARED)

    def say(self, text: str) -> None:
        self.texts.append(text)
        for words, count, act in list(self._acts):
            if sum(words in text for text in self.texts) >= count:
                self._acts.remove((words, count, act))
                act()


Start = Callable[..., int]


@pytest.fixture
def start(fleet: Fleet, listen: Listen, here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a worker on a machine: in its folder, with its data."""

    def worker(machine: str, *options: str, slots: int = 2) -> int:
        with monkeypatch.context() as there:
            there.chdir(here / machine)
            there.setattr(sys, "path", [entry for entry in sys.path if entry != str(here / "a")])
            root = ("--data-root", str(here / machine / "data"))
            return fleet.start(listen.address, "--wait", "60", *(options or root), slots=slots)

    write_machine(here / "a")
    monkeypatch.chdir(here / "a")
    monkeypatch.syspath_prepend(here / "a")
    yield worker


def details(events: pl.DataFrame, kind: str) -> list[str]:
    return events.filter(event=kind)["detail"].to_list()


def test_other_code_and_other_data_are_refused_by_name(
    start: Start, fleet: Fleet, listen: Listen, here: Path
) -> None:
    """Also labels of one file that are shifted, and a file that is missing, which an own task may not notice."""
    write_machine(here / "b", steps=" + 3")
    write_machine(here / "c", shift=1)
    write_machine(here / "d", missing=2)
    write_machine(here / "e")
    refused = [start(machine) for machine in "bcd"]
    good: list[int] = []
    others = Says(("is refused", 3, lambda: good.extend(start(machine) for machine in "ae")))
    run = gossamer.run(experiment(), here, observer=others, listen=listen)
    assert run.status == "done"
    what = [
        f"module lazy ({here}/b/lazy.py)",
        "data_root/sensor-1.csv",
        "data_root/sensor-2.csv (missing)",
    ]
    told = details(run.events, "refused")
    for text in what:
        assert (
            sum(refusal.endswith(f"other code or data than the coordinator: {text}") for refusal in told) == 1
        )
        assert any(refusal in others.texts for refusal in told)
        assert f"refuses this worker: it has other code or data than the coordinator: {text}" in fleet.said()
    assert [fleet.wait(pid) for pid in refused] == [1, 1, 1]
    assert [fleet.wait(pid) for pid in good] == [0, 0]


def test_gossamer_itself_must_be_the_same(
    start: Start, fleet: Fleet, listen: Listen, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is no proof: its files may have been edited on one machine."""
    changed = {**own_sources(), "gossamer/algorithms/d_psgd.py": "0" * 64}
    monkeypatch.setattr(coordinator_workers, "own_sources", lambda: changed)

    def end() -> None:
        raise RunFailed("seen")

    worker = start("a", slots=3)
    with pytest.raises(RunFailed, match="^seen$"):
        gossamer.run(experiment(), here, observer=Says(("is refused", 1, end)), listen=listen)
    assert fleet.wait(worker) == 1
    assert fleet.last_line(worker).endswith("than the coordinator: gossamer/algorithms/d_psgd.py")


def test_record_says_which_worker_computed_which_nodes(
    start: Start, listen: Listen, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the record, on the page and in a line at the start, with other versions than the coordinator's, but no token."""
    for _ in range(2):
        start("a")
    packages = {**this_computer()["packages"], "numpy": "2.3.5"}
    monkeypatch.setattr(
        coordinator_workers, "this_computer", lambda: {**this_computer(), "packages": packages}
    )
    command = ["gossamer", "run", "--token", TOKEN, f"--token={TOKEN}", f"of-a-script:{TOKEN}"]
    observer = Says()
    run = gossamer.run(experiment(), here, observer=observer, listen=listen, command=command)
    shown = ["gossamer", "run", "--token", "***", "--token=***", "of-a-script:***"]
    assert run.environment["command"] == shown
    assert not [
        path for path in run.path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
    first, second = run.environment["workers"]
    assert (first["ranks"], second["ranks"]) == ([0, 1], [2])
    for worker in (first, second):
        assert worker["address"] == "127.0.0.1"
        for part in ("python", "platform", "machine", "numerics"):  # both are this machine
            assert worker[part] == {**run.environment, "numerics": worker["numerics"]}[part]
        assert worker["packages"].items() >= run.environment["packages"].items()
    versions = f"gossamer {gossamer.__version__}"
    placed = details(run.events, "placed")
    assert [text.partition(":")[0] for text in placed] == [
        "worker 1 (127.0.0.1) has nodes 0-1",
        "worker 2 (127.0.0.1) has node 2",
    ]
    for text in placed:
        assert text in observer.texts
        assert first["machine"]["host"] in text
        assert first["numerics"]["processor"] in text
        assert versions in text
    assert len(details(run.events, "worker-joined")) == 2
    [differ] = details(run.events, "machines-differ")
    assert differ in observer.texts
    assert (
        "numpy {} (not 2.3.5, as at the coordinator) at {} and {}".format(
            first["packages"]["numpy"], first["worker"], second["worker"]
        )
        in differ
    )
    page = render([run])
    assert '<section id="machines"><h2>Machines</h2>' in page
    assert '<tr><th scope="row">worker 1 (127.0.0.1)</th>' in page
    assert TOKEN not in page


def test_folder_of_data_that_is_missing_is_refused(
    start: Start, fleet: Fleet, listen: Listen, here: Path
) -> None:
    """By both ends, and not taken as none, with which a task may read something else."""
    (here / "elsewhere").mkdir()
    root = here / "a" / "data"
    for name in ("lazy.py", "sensors.py"):
        (here / "elsewhere" / name).write_text((here / "a" / name).read_text())
    moved = here / "moved"

    def replace() -> None:
        moved.rename(root)
        for _ in range(2):
            start("a")

    pid = start("elsewhere", "--quiet")
    observer = Says((PREPARED, 1, lambda: root.rename(moved)), ("is refused", 1, replace))
    run = gossamer.run(experiment(), here, observer=observer, listen=listen)
    assert run.status == "done"
    assert fleet.wait(pid) == 1
    text = f"data_root: {root} is not a folder here; accepted: gossamer worker --data-root"
    assert text in fleet.said()
    assert text in details(run.events, "refused")[0]
    missing = experiment(data_root="nowhere")
    with pytest.raises(gossamer.BadInput, match=r"data_root: .*/nowhere is not a folder"):
        gossamer.run(missing, here, listen=listen)
    with pytest.raises(gossamer.BadInput, match="--data-root nowhere: accepted: a folder"):
        run_worker(listen.address, TOKEN, 1, data_root="nowhere", wait_s=0.0)


def test_late_worker_that_cannot_run_the_experiment_leaves_the_run_alone(
    start: Start, fleet: Fleet, listen: Listen, here: Path
) -> None:
    """It was started in an empty folder, as a service may be. Both sides say why it is refused."""
    (here / "empty").mkdir()
    refused = here / "refused.txt"
    late: list[int] = []

    class Joins(Says):
        def row(self, row: Mapping[str, Any]) -> None:
            if not late:
                late.append(start("empty", "--quiet"))

    workers = [start("a") for _ in range(2)]
    described = experiment(algorithm={"name": "lazy:Lazy", "after": str(refused)})
    run = gossamer.run(described, here, observer=Joins(("is refused", 1, refused.touch)), listen=listen)
    assert run.status == "done"
    assert run.metrics["round"].max() == 2
    assert [fleet.wait(pid) for pid in workers] == [0, 0]
    assert fleet.wait(late[0]) == 1
    [told] = details(run.events, "refused")
    assert told.startswith("worker 3 (127.0.0.1) is refused: it can't run the experiment: ")
    assert "no module named 'sensors'" in told
    assert fleet.last_line(late[0]).startswith(f"error: {listen.address} refuses this worker: it can't run")
    assert len(run.environment["workers"]) == 2


def test_worker_whose_node_has_failed_says_so_and_the_others_only_why_it_is_over(
    start: Start, fleet: Fleet, listen: Listen, here: Path
) -> None:
    first, second = start("a"), start("a")
    described = experiment(algorithm={"name": "lazy:Lazy", "fails": 2})
    why = "node 2 failed in round 1: ValueError: a broken sensor (lazy.py, line 15)"
    with pytest.raises(RunFailed) as failed:
        gossamer.run(described, here, listen=listen)
    assert str(failed.value) == why
    codes = [fleet.wait(pid) for pid in (first, second)]
    assert sorted(codes) == [0, 1]
    culprit, other = (first, second) if codes[0] else (second, first)
    assert fleet.last_line(culprit) == f"error: the run has failed because of this worker: {why}"
    assert fleet.last_line(other) == f"gossamer: the run is over (failed: {why})"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_worker_that_is_stopped_says_goodbye(
    number: int,
    start: Start,
    fleet: Fleet,
    listen: Listen,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others do not look for it: the run ends long before ``failures.detection_s``."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    workers = [start("a", slots=2) for _ in range(2)]

    class Stops(Says):
        def row(self, row: Mapping[str, Any]) -> None:
            if row["round"] == 1:
                os.kill(workers[0], number)

    described = experiment(
        algorithm={"name": "lazy:Lazy", "after": str(here / "never")}, failures={"detection_s": 3000.0}
    )
    with pytest.raises(
        RunFailed, match=r"^node \d died in round \d: worker \d \(127.0.0.1\) was stopped$"
    ) as failed:
        gossamer.run(described, here, observer=Stops(), listen=listen)
    assert fleet.wait(workers[0]) == 130
    assert fleet.last_line(workers[0]) == "error: interrupted"
    assert fleet.wait(workers[1]) == 0
    assert fleet.last_line(workers[1]).endswith(f"(failed: {failed.value})")
    assert not list(temporary.glob("gossamer-worker-*"))
    assert failed.value.folder is not None
    assert len(details(gossamer.load_run(failed.value.folder).events, "worker-stopped")) == 1


def test_unauthenticated_refusal_does_not_end_a_waiting_worker(
    fleet: Fleet, tmp_path: Path, start: Start, listen: Listen, here: Path
) -> None:
    """An impostor without the token refuses the workers, until the coordinator is there."""
    answered: list[str] = []
    with (
        selectors.DefaultSelector() as selector,
        WorkerListener(listen.address, "the impostor's token") as impostor,
    ):
        impostor.open(selector, lambda *_: "never", answered.append)
        workers = [start("a") for _ in range(2)]
        while fleet.said().count("says: this worker has the wrong token") < 2:
            for key, events in selector.select(0.1):
                key.data(events)
    assert gossamer.run(experiment(), here, listen=listen).status == "done"
    assert [fleet.wait(pid) for pid in workers] == [0, 0]


COMPUTER: dict[str, Any] = {
    "python": "3.11.2",
    "machine": {"host": "a", "architecture": "x86_64", "cpus": 2, "gpus": 0},
    "numerics": {"processor": "Xeon", "kernels": "AVX512", "mkl": "AUTO", "settings": {}},
    "packages": {"gossamer": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "scipy": "1.0"},
}


def test_other_versions_and_processors_are_said_in_one_line() -> None:
    """Those that may change bits, at each worker that has them."""

    def worker(number: int, **changes: Mapping[str, str]) -> dict[str, Any]:
        return {
            "worker": f"worker {number}",
            **COMPUTER,
            **{part: {**COMPUTER[part], **changed} for part, changed in changes.items()},
        }

    alike = worker(1, machine={"host": "b"}, packages={"scipy": "2.0"})
    assert differing(COMPUTER, [alike]) is None
    others = [
        worker(2, packages={"numpy": "2.3.5"}),
        worker(3, packages={"numpy": "2.3.5"}, numerics={"kernels": "AVX2"}),
    ]
    assert differing(COMPUTER, [alike, *others]) == (
        "not all machines compute alike, so the last bits may depend on who computes what:"
        " numpy 2.3.5 (not 2.4.6, as at the coordinator) at worker 2 and worker 3;"
        " Xeon, AVX2 kernels, MKL_CBWR=AUTO (not Xeon, AVX512 kernels, MKL_CBWR=AUTO) at worker 3"
    )
    before = {**COMPUTER, "workers": [alike]}
    assert new_numerics(before, [alike, others[0]]) is None
    text = new_numerics(before, others)
    assert text is not None
    assert "now Xeon, AVX2 kernels" in text
