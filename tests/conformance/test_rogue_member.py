"""A worker that knows the token and says what it likes: it is named and cut off, its nodes have crashed, the run ends as its
rules for faults say, in one line, and the record can be read."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import gossamer
from gossamer import Experiment, Run, RunFailed, files, load_run
from gossamer.messages.tags import COUNTERS
from gossamer.results.observer import Observer
from gossamer.results.report import write_report
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.coordinator import checks, lifecycle
from gossamer.runtime.processes.fork_server import Listen
from hostile_messages import DEEP, TRAFFIC, VALUES, plain, replaced
from rogue_member import Rogue
from worker_fleet import TOKEN, Fleet, free_port

P = 3
ESCAPES = "\x1b[2J\x1b[31mred\x07\n\rline"
ROW = plain(protocol.Row(0, VALUES, TRAFFIC, {"test_loss": 0.5}, bytearray(4 * P)))
ROW[2][0] = 0


def described(**changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "nodes": 2,
        "task": {"name": "least-squares", "features": P, "samples": 32},
        "topology": "complete",
        "algorithm": "d-psgd",
        "gather": {"lost_peer": "skip", "timeout_s": 0.3},
        "failures": {"detection_s": 1.0},
        "evaluation": {"every_rounds": 1, "timeline": {"to_s": 60.0}},
        "stop": {"rounds": 5},
        "engine": {"name": "processes", "trainer": "sequential"},
    }
    return Experiment.of({**fields, **changes})


def check_record(folder: Path) -> Run:
    """The record can be read, also as a report, and has no control characters."""
    run = load_run(folder)
    assert run.error is None or run.error.isprintable(), run.error
    write_report([run], folder)
    texts = run.events.select(pl.col(pl.String)).rows() + run.metrics.select(pl.col(pl.String)).rows()
    for text in (text for row in texts for text in row if text is not None):
        assert text.replace("\n", "").isprintable(), text
    assert run.metrics["node"].is_between(-1, 1).all()
    assert set(run.timeline["node"]) <= {0, 1}
    assert not {"missing", "bytes", "columns"} & set(run.metrics["moment"])
    return run


def failure(folder: Path, script: Callable[[Rogue], object], **changes: Any) -> str:
    """How a run fails whose two nodes are the rogue's. Its record is checked."""
    listen = Listen(f"127.0.0.1:{free_port()}", TOKEN)
    rogue = Rogue(listen.address, script, nodes=2)
    with pytest.raises(RunFailed) as failed:
        gossamer.run(described(**changes), folder, listen=listen)
    rogue.join(10)
    assert not rogue.is_alive()
    text = str(failed.value)
    assert text.isprintable(), text
    assert failed.value.folder is not None
    assert check_record(failed.value.folder).status == "failed"
    return text


def row(place: tuple[Any, ...] = (), item: Any = None, **columns: Any) -> Any:
    """A row, with another item at one place, and further columns."""
    changed = replaced(ROW, (4,), {**ROW[4], **columns})
    return replaced(changed, place, item) if place else changed


def values(name: str, value: Any) -> Any:
    """A row with another value in a column that every row has."""
    return row((2, VALUES.__struct_fields__.index(name)), value)


def counter(name: str, value: Any) -> Any:
    """A row with another counter."""
    return row((3,), {**ROW[3], name: value})


def progress(place: int, item: Any) -> Any:
    return replaced(plain(protocol.Progress(0, 0.5, TRAFFIC)), (place,), item)


def timeline(*lines: bytes) -> Callable[[Rogue], None]:
    """The last model, with a timeline of these lines."""

    def script(rogue: Rogue) -> None:
        data = b"\n".join([*lines, b""])
        files = {f"segments/timeline-{rogue.ranks[0]}-0.jsonl": data}
        rogue.report(["FinalModel", 0, bytes(4 * P), None, True], files=files)

    return script


def saved(number: Any, path: str, error: Any = None) -> Callable[[Rogue], None]:
    return lambda rogue: rogue.report(["Saved", number, 0, 0.5, error], files={path: b"data"})


MESSAGES: dict[str, Any] = {
    # rows
    "a row of another node": row(node=1),
    "a row of the network": row(node=-1),
    "a row of node x": row(node="x"),
    "a row of node 2^63": row(node=2**63),
    "a row of another moment": row(moment="missing"),
    "a row with other bytes": row(network_bytes=-1),
    "a second counter": row(bytes_sent=1),
    "NaN as a time": values("time_s", math.nan),
    "a negative time": values("time_s", -1.0),
    "an infinite time": values("time_s", math.inf),
    "a time in the future": values("time_s", 1e9),
    "a text as a time": values("time_s", "now"),
    "a negative wall time": values("wall_s", -1.0),
    "a wall time in the future": values("wall_s", 1e9),
    "a negative age": values("model_age_s", -1.0),
    "an age before the run": values("model_age_s", 1e6),
    "a negative round": values("round", -1),
    "round 2^63": values("round", 2**63),
    "a round in the future": values("round", 2**52),
    "half a round": values("round", 0.5),
    "a negative step": values("step", -5),
    "a text as a loss": values("train_loss", "low"),
    "a share above one": values("idle_share", 2.0),
    "NaN as a share": values("uplink_share", math.nan),
    "a negative counter": counter("bytes_sent", -1),
    "a counter of 2^63": counter("messages_sent", 2**63),
    "a counter of 2^60": counter("messages_taken", 2**60),
    "NaN as a counter": counter("bytes_received", math.nan),
    "a text as a counter": counter("messages_lost", "many"),
    "a text as a metric": row(test_loss="low"),
    "a list as a metric": row(test_loss=[1.0]),
    "a text as an unknown metric": row(test_colour="red"),
    "a list of texts as an unknown metric": row(test_colours=["red"]),
    "bytes in a row": row(bytes=b"bytes"),
    "a long text": row(text="x" * 10**6),
    "a column with a long name": row(**{"x" * 10**6: 1}),
    "ten thousand columns": row(**{f"column_{k}": 1 for k in range(10_001)}),
    "a million values": row(list=[[]] * 2**20),
    "an unknown moment": row((1,), "missing"),
    "a negative moment": row((1,), -1),
    "a moment 2^63": row((1,), 2**63),
    "a moment of two texts": row((1,), ["tick", "tock"]),
    "an unknown kind of moment": row((1,), ["tock", 1]),
    "a short model": row((5,), bytes(4 * P - 1)),
    "a long model": row((5,), bytes(10**6)),
    "a view of another size": row((6,), [0, 1, 0]),
    "a view of unknown nodes": row((6,), [10**6]),
    "a negative view": row((6,), [-1]),
    "no values": ["Row", 0],
    # the others
    "a crash that is not planned": ["Crashing", 99],
    "crash -1": ["Crashing", -1],
    "NaN in a report": progress(2, math.nan),
    "a report in the future": progress(2, 1e9),
    "a report of a negative time": progress(2, -1.0),
    "a report of a negative round": progress(1, -1),
    "a report of round 2^62": progress(1, 2**62),
    "negative traffic": progress(3, dict.fromkeys(COUNTERS, -1)),
    "a million waits": progress(4, ["x"] * 10**6),
    "a report of numbers": progress(4, [1, 2]),
    "a round of an unknown node": ["CurrentRound", 7, 0],
    "a current round in the future": ["CurrentRound", 1, 2**52],
    "an unknown node is unreachable": ["Unreachable", 7, "silent"],
    "unreachable for a number": ["Unreachable", 1, 7],
    "done after -1 rounds": ["Done", -1],
    "a last model of text": ["FinalModel", 0, "model", None],
    "a short last model": ["FinalModel", 0, b"1", None],
    "a negative memory": ["FinalModel", 0, bytes(4 * P), -1],
    "checkpoint 10^20": ["Saved", 2**64 - 1, 0, 0.5],
    "checkpoint 2^30": ["Saved", 2**30, 0, 0.5, "no space"],
    "a checkpoint that was not begun": ["Saved", 2, 0, 0.5],
    "a snapshot of checkpoint 9": ["Marked", 9, {}],
    "a snapshot of checkpoint 2^62": ["Marked", 2**62, {}],
    "a snapshot about unknown nodes": ["Marked", 1, {7: 1}],
    "an unknown kind of event": ["Event", "lost", "node 1"],
    "an event of a number": ["Event", "slow", 7],
    "an unknown message": ["Hello"],
    "a message of the coordinator": ["Finish", "rounds"],
    "a deep message": ["Row", DEEP],
    "a text": "Progress",
}
SCRIPTS: dict[str, Callable[[Rogue], object]] = {
    "a message of a node elsewhere": lambda rogue: rogue.report(ROW, rank=5),
    "a message of node 2^40": lambda rogue: rogue.report(ROW, rank=2**40),
    "a start -1": lambda rogue: rogue.report(ROW, incarnation=-1),
    "two last models": lambda rogue: [rogue.report(["FinalModel", 0, bytes(4 * P), None]) for _ in range(2)],
    "a row after the last model": lambda rogue: [
        rogue.report(["FinalModel", 0, bytes(4 * P), None]),
        rogue.report(ROW),
    ],
    "more messages than arrived": lambda rogue: rogue.say(protocol.Acknowledge(99)),
    "a refusal in the run": lambda rogue: rogue.say(protocol.Refused([ESCAPES])),
    "other code in the run": lambda rogue: rogue.say(protocol.Differs([ESCAPES])),
    "no message": lambda rogue: rogue.send(b""),
    "not msgpack": lambda rogue: rogue.send(b"\xc1"),
    "no UTF-8": lambda rogue: rogue.send(b"\x92\xa7Refused\x91\xa1\xff"),
    "a thousand levels": lambda rogue: rogue.send(DEEP),
    "an unfinished timeline": timeline(b'{"node": 0'),
    "a timeline of text": timeline(b"text"),
    "a timeline of another node": timeline(b'{"node":9,"kind":"send","start_s":0.0,"end_s":1.0}'),
    "a timeline without times": timeline(b'{"node":0,"kind":"send"}'),
    "a file of another kind": lambda rogue: rogue.report(progress(1, 0), files={"metrics.parquet": b""}),
    "a file elsewhere": saved(None, "../elsewhere"),
    "a file of another node": saved(None, "restart/node-7.safetensors"),
    "a file with a long name": saved(None, "x" * 300),
    "a checkpoint's file that was not begun": saved(3, "checkpoints/3/node-0.safetensors"),
}
EARLY: dict[str, tuple[str, Callable[[Rogue], object]]] = {
    "port 70000": (
        "it sent a message that can't be read",
        lambda r: r.report(["Ready", "127.0.0.1", 70_000]),
    ),
    "a host with NUL": (
        "it sent a message that can't be read",
        lambda r: r.report(["Ready", "127.0.0.1\0", 9]),
    ),
    "a row before the start": ("does not take part yet", lambda rogue: rogue.report(ROW)),
    "done before the start": ("does not take part yet", lambda rogue: rogue.report(["Done", 5])),
    "a death with colours": ("red line", lambda rogue: rogue.report(["Exited", ESCAPES])),
    "a failure with colours": ("red line", lambda rogue: rogue.report(["Failed", ESCAPES, 1, ESCAPES])),
}


def attack(name: str, message: Any) -> Callable[[Rogue], None]:
    def script(rogue: Rogue) -> None:
        rogue.begin()
        if callable(message):
            message(rogue)
        else:
            rogue.report(message)

    return script


FAST = ("a row of node x", "a crash that is not planned", "a timeline of text")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in (*MESSAGES, *SCRIPTS)],
)
def test_rogue_member_is_named_and_cut_off(name: str, tmp_path: Path) -> None:
    text = failure(tmp_path, attack(name, {**MESSAGES, **SCRIPTS}[name]))
    assert text.startswith("no node is left: node 0 died in round 0: worker 1 (127.0.0.1) is lost: it sent ")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "port 70000" else pytest.mark.slow) for name in EARLY]
)
def test_rogue_member_before_the_start_ends_the_run_in_one_line(name: str, tmp_path: Path) -> None:
    message, act = EARLY[name]

    def script(rogue: Rogue) -> None:
        rogue.prepare()
        act(rogue)

    assert message in failure(tmp_path, script)


@pytest.mark.slow
def test_ever_new_columns_do_not_cost_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_RECORDED", 100)

    def script(rogue: Rogue) -> None:
        rogue.begin()
        for batch in range(100):
            rogue.report(row(**{f"column_{batch}_{k}": 1.0 for k in range(30)}))

    assert "new columns of node 0" in failure(tmp_path, script)
    [folder] = tmp_path.glob("*/*")
    assert sum(name.startswith("column") for name in load_run(folder).metrics.columns) == 90


@pytest.mark.slow
def test_million_rows_do_not_cost_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_VALUES", 20_000)

    def script(rogue: Rogue) -> None:
        rogue.begin()
        for _ in range(10_000):
            rogue.report(ROW)

    assert "so that a table of" in failure(tmp_path, script)


@pytest.mark.slow
def test_flood_of_events_is_recorded_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_EVENTS", 100)

    def script(rogue: Rogue) -> None:
        rogue.begin()
        for _ in range(1_000):
            rogue.report(["Event", "slow", ESCAPES])
        rogue.report("over")

    failure(tmp_path, script)
    [folder] = tmp_path.glob("*/*")
    events = load_run(folder).events
    assert events.filter(event="slow").height == 100
    assert events.filter(event="left-out").height == 1


SILENT: dict[str, tuple[str, Callable[[Rogue], object]]] = {
    "never prepared": ("was not ready within engine.start_timeout_s = 1 s", lambda rogue: None),
    "never ready": ("were not up within engine.start_timeout_s = 1.0", Rogue.prepare),
    "nothing after the start": ("it did not answer for 10 s (engine.start_timeout_s)", Rogue.begin),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SILENT)
def test_silent_member_ends_the_run_in_one_line(name: str, tmp_path: Path) -> None:
    message, script = SILENT[name]
    engine = {"name": "processes", "trainer": "sequential", "start_timeout_s": 1.0}
    started = time.monotonic()
    assert message in failure(tmp_path, script, engine=engine)
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_member_that_says_that_it_lives_can_not_keep_the_end_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LAST_S", 1.0)

    def script(rogue: Rogue) -> None:
        rogue.begin()
        for rank in rogue.ranks:
            rogue.report(["Done", 5], rank)
        while True:
            rogue.report(progress(1, 5))
            time.sleep(0.05)

    listen = Listen(f"127.0.0.1:{free_port()}", TOKEN)
    Rogue(listen.address, script, nodes=2)
    run = gossamer.run(described(), tmp_path, listen=listen)
    assert run.status == "done"
    check_record(run.path)


# --- beside an honest member


class Second(Observer):
    """Starts the rogue when the honest worker has joined."""

    def __init__(self, start: Callable[[], object]) -> None:
        self._start = start
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)
        if text.startswith("worker 1") and "has joined" in text:
            self._start()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def beside(
    fleet: Fleet, folder: Path, script: Callable[[Rogue], object], *, slots: int = 1, **changes: Any
) -> Run:
    """A run whose first node is an honest worker's, and whose second one is the rogue's."""
    listen = Listen(f"127.0.0.1:{free_port()}", TOKEN, 2)
    fleet.start(listen.address, slots=slots)
    observer = Second(lambda: Rogue(listen.address, script, slots=slots))
    run = gossamer.run(described(**changes), folder / "runs", listen=listen, observer=observer)
    assert all(text.isprintable() for text in observer.texts)
    return run


def after_a_round(rogue: Rogue) -> None:
    """Take part in a round, and then say what no member says."""
    rogue.begin()
    rogue.report(ROW)
    rogue.report(progress(1, 1))
    rogue.report(["Crashing", 99])


def check_honest_rows(run: Run) -> None:
    rows = check_record(run.path).metrics.filter(node=0)
    assert rows["round"].to_list() == list(range(6))
    assert rows["test_loss"].is_finite().all()


CUT_OFF = r"worker 2 \(127.0.0.1\) is lost: it sent crash 99 of node 1, which is not planned"


def test_honest_nodes_go_on_without_a_rogue_member(fleet: Fleet, tmp_path: Path) -> None:
    run = beside(fleet, tmp_path, after_a_round)
    assert run.status == "done"
    [lost] = run.events.filter(event="lost").to_dicts()
    assert lost["node"] == 1
    assert re.fullmatch(f"node 1 died in round 1: {CUT_OFF}", lost["detail"])
    check_honest_rows(run)


@pytest.mark.slow
def test_rogue_member_ends_a_run_that_needs_all_nodes(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=f"^node 1 died in round 1: {CUT_OFF}$") as failed:
        beside(fleet, tmp_path, after_a_round, gather={})
    assert failed.value.folder is not None
    check_record(failed.value.folder)


@pytest.mark.slow
def test_run_without_the_rounds_of_a_rogue_member_is_not_done(fleet: Fleet, tmp_path: Path) -> None:
    text = f"^node 1 completed no round: node 1 died in round 0: {CUT_OFF}$"
    with pytest.raises(RunFailed, match=text) as failed:
        beside(fleet, tmp_path, attack("", ["Crashing", 99]))
    assert failed.value.folder is not None
    check_honest_rows(check_record(failed.value.folder))


@pytest.mark.slow
def test_nodes_of_a_rogue_member_are_restarted_elsewhere(fleet: Fleet, tmp_path: Path) -> None:
    engine = {"name": "processes", "trainer": "sequential", "restart": "always", "pace": True}
    compute = {"name": "constant", "seconds_per_step": 0.1}
    more = {"engine": engine, "compute": compute, "stop": {"rounds": 30}}
    run = beside(fleet, tmp_path, after_a_round, slots=2, **more)
    assert run.status == "done"
    assert run.events.filter(event="returned")["node"].to_list() == [1]
    check_record(run.path)
