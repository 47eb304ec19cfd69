"""Claims on runs: each run has one owner, also after an owner's death, whatever the clocks of the machines say."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from gossamer.errors import RecordError
from gossamer.startup import environment, program
from gossamer.sweep import run_claims
from gossamer.sweep.run_claims import BEAT_S, DEAD_S, LOOK_S, RunClaim, Watch, held, held_for, process

ELSEWHERE = "another-machine/1:1"


class Clock:
    """Stands still between two looks, which :meth:`look` does."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.watch = Watch(lambda: self.now_s)

    def look(self, folder: Path, after_s: float = LOOK_S) -> int | None:
        self.now_s += after_s
        return self.watch.dead(folder)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims that this process takes seem to be those of another machine, whose processes can't be seen."""
    monkeypatch.setattr(run_claims, "process", lambda: ELSEWHERE)


def take(folder: Path, owner: str = ELSEWHERE, after: int = 0) -> RunClaim:
    claim = RunClaim.take(folder, owner, after)
    assert claim is not None
    return claim


RACE = """
import sys
from pathlib import Path
from gossamer.sweep.run_claims import RunClaim
out, after = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for number in range(100):
    if RunClaim.take(out / str(number), "race:0", after) is not None:
        print(number)
"""


@pytest.mark.parametrize("after", [0, 1])
def test_of_racing_processes_one_gets_each_run(tmp_path: Path, after: int) -> None:
    """Both runs that nobody has, and those whose owner is dead."""
    if after:
        for number in range(100):
            take(tmp_path / str(number))
    command = program(RACE, str(tmp_path), str(after))
    racing = [
        subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for one in racing:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in racing:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    got = [one.communicate()[0].split() for one in racing]
    assert sorted(number for numbers in got for number in numbers) == sorted(map(str, range(100)))


@pytest.mark.usefixtures("elsewhere")
def test_heartbeat_is_judged_by_its_change(tmp_path: Path) -> None:
    clock, claim = Clock(), take(tmp_path)
    beats = 0
    for look in range(100):
        assert clock.look(tmp_path) is None
        # The owner's clock is years ahead or behind, which the times of its files show.
        os.utime(tmp_path / ".claim-1", times=(1e9 * (look % 3), 1e9 * (look % 3)))
        if look * LOOK_S >= (beats + 1) * BEAT_S:
            beats += 1
            claim.beat()
    silent = 0
    while clock.look(tmp_path) is None:
        silent += 1
    assert silent * LOOK_S <= DEAD_S < (silent + 3) * LOOK_S
    assert held(tmp_path)  # one look can't tell
    assert RunClaim.take(tmp_path, ELSEWHERE) is None
    with take(tmp_path, after=1):
        assert clock.look(tmp_path) is None
    assert clock.look(tmp_path) == 0
    assert not held(tmp_path)


@pytest.mark.usefixtures("elsewhere")
def test_time_in_which_nobody_looked_is_not_silence(tmp_path: Path) -> None:
    """The observer was suspended, or the file system stood still for all."""
    clock, _ = Clock(), take(tmp_path)
    clock.look(tmp_path)
    assert clock.look(tmp_path, 1e6) is None


@pytest.mark.usefixtures("elsewhere")
def test_owner_that_was_suspended_finds_its_claim_lost(tmp_path: Path) -> None:
    first = take(tmp_path)
    second = take(tmp_path, after=1)
    first.beat()
    second.beat()
    assert (first.lost, second.lost) == (True, False)
    first.release()
    assert held(tmp_path)
    second.release()
    assert not tmp_path.exists()  # an empty folder is of no use
    third = take(tmp_path)  # with the number of the first
    first = RunClaim(tmp_path / ".claim-1", os.open(os.devnull, os.O_RDWR), ELSEWHERE)
    first.release()
    assert held(tmp_path)
    third.release()


@pytest.mark.usefixtures("elsewhere")
def test_claim_that_is_released_meanwhile_is_no_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attempt").mkdir()
    slow, create = take(tmp_path), os.open

    def after_release(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_EXCL:
            slow.release()
        return create(path, flags, mode)

    monkeypatch.setattr(os, "open", after_release)
    assert RunClaim.take(tmp_path, ELSEWHERE, 1) is None
    assert [path.name for path in tmp_path.iterdir()] == ["attempt"]


def test_killed_owner_on_this_machine_is_dead_at_once(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from gossamer.sweep.run_claims import RunClaim, process;"
        " RunClaim.take(Path(sys.argv[1]), process()); os.kill(os.getpid(), 9)"
    )
    subprocess.run(program(code, str(tmp_path)), env=environment(), check=False)
    assert (tmp_path / ".claim-1").exists()
    assert not held(tmp_path)
    assert Watch().dead(tmp_path) == 1
    with take(tmp_path, process(), 1):  # the worker's and the sweep's process live
        assert Watch().dead(tmp_path) is None
        assert held_for(tmp_path, process())
    assert not held_for(tmp_path, process())


def test_folder_that_can_t_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RecordError, match="can't be written: File exists"):
        RunClaim.take(tmp_path / "run", process())

    def full(descriptor: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RecordError, match=r"\.claim-1 can't be written: No space left"):
        RunClaim.take(tmp_path / "other", process())
    assert not held(tmp_path / "other")
