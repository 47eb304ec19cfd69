"""Launching over a command in place of ssh, which carries commands out here, in a home folder a host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet import SETTINGS, free_addresses
from test_collect import record

from gossamer import Experiment
from gossamer.api import Silent
from gossamer.deploy import launch as launching
from gossamer.deploy.bundle import Bundle
from gossamer.deploy.hosts import Host, Hosts
from gossamer.errors import BadInput, RunFailed
from gossamer.results.run import load_run
from gossamer.runtime.processes.transport.transport import listen

SSH = """#!/bin/sh
home="$(dirname "$0")/homes/$1"
mkdir -p "$home" && cd "$home" && echo "$2" >> "$(dirname "$0")/commands" && exec sh -c "$2"
"""


def settle(folder: Path, **changes: Any) -> list[str]:
    """An experiment, two hosts and the command that launches; its arguments."""
    Experiment.of({**SETTINGS, "nodes": 2, **changes}).save(folder / "experiment.yaml")
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    hosts = [
        {
            "name": f"host-{number}",
            "address": "127.0.0.1",
            "port": int(address.rpartition(":")[2]),
            "command": f"{sys.executable} -m gossamer",
        }
        for number, address in enumerate(free_addresses(2))
    ]
    (folder / "hosts.yaml").write_text(yaml.safe_dump({"ssh": str(folder / "ssh"), "hosts": hosts}))
    return [
        sys.executable,
        "-m",
        "gossamer",
        "launch",
        "experiment.yaml",
        "--hosts",
        "hosts.yaml",
        "--no-report",
    ]


def left_behind(folder: Path) -> list[Path]:
    return [path for path in (folder / "homes").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_launched_run_is_brought_home_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(settle(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs" / "deployed").iterdir()
    assert done.stdout.splitlines()[-1] == f"done: {run.relative_to(tmp_path)}"
    assert (run / "models.safetensors").exists()
    assert "node 1 (host-1) is done" in done.stderr
    assert "round 6 " in done.stderr
    assert left_behind(tmp_path) == []
    given = (tmp_path / "commands").read_text()
    assert "--keys keys" in given
    assert "--insecure" not in given
    runs = re.findall(r"--run ([0-9a-f]{32}) ", given)
    assert len(runs) == 2
    assert len(set(runs)) == 1


@pytest.mark.slow
def test_ctrl_c_stops_all_nodes_and_brings_their_records_home(tmp_path: Path) -> None:
    process = subprocess.Popen(
        settle(tmp_path, stop={"rounds": 10**6}),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 2 " in line:
                break
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 130, said
    assert printed.startswith("stopped: runs/deployed/")
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_a_node_that_can_not_start_ends_the_launch_and_says_why(tmp_path: Path) -> None:
    command = settle(tmp_path)
    hosts = yaml.safe_load((tmp_path / "hosts.yaml").read_text())
    hosts["hosts"][1]["data_root"] = "{"  # no YAML
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(hosts))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "error: node 1 (host-1) did not start: error: --set data_root={" in done.stderr
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_a_second_launch_on_ports_that_another_one_has_ends_with_one_line(tmp_path: Path) -> None:
    command = settle(tmp_path)
    port = Hosts.load(tmp_path / "hosts.yaml").hosts[1].port
    with listen("127.0.0.1", port):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        f"error: node 1 (host-1) did not start: error: node 1: 127.0.0.1:{port}: Address already in use; accepted: "
    )
    assert "Traceback" not in done.stderr
    assert left_behind(tmp_path) == []


def test_a_host_that_can_not_be_reached_is_named(tmp_path: Path) -> None:
    command = settle(tmp_path)
    (tmp_path / "ssh").write_text('#!/bin/sh\necho "ssh: connect to host $1: no route" >&2\nexit 255\n')
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "error: host host-0: ssh: connect to host host-0: no route" in done.stderr


class Heard(Silent):
    """All that was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def play(folder: Path, *scripts: str, **changes: Any) -> tuple[Experiment, Hosts]:
    """An experiment and hosts whose nodes, instead of gossamer, are shell scripts; a record of rank 0 lies there."""
    settle(folder, **changes)
    record(folder / "record", 0, 4)
    hosts = yaml.safe_load((folder / "hosts.yaml").read_text())
    for host, script in zip(hosts["hosts"], scripts, strict=True):
        (folder / f"{host['name']}.sh").write_text(f"top=\"{folder}\"\necho '{{\"pid\": '$$'}}'\n{script}\n")
        host["command"] = f"sh {folder}/{host['name']}.sh"
    (folder / "hosts.yaml").write_text(yaml.safe_dump(hosts))
    return Experiment.load(folder / "experiment.yaml"), Hosts.load(folder / "hosts.yaml")


BEGINS = """echo '{"began": true}'; touch "$top/began"; mkdir runs; cp -R "$top/record/run" runs/run"""
VANISHES = """echo '{"began": true}'; touch "$top/vanished"; exec sleep 1000"""


def test_records_of_scripts_in_place_of_nodes_are_brought_home_and_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    done = """echo '{"status": "done"}'"""
    described, hosts = play(tmp_path, f"{BEGINS}; {done}", f"""echo '{{"began": true}}'; {done}""")
    heard = Heard()
    collected = launching.launch(described, hosts, tmp_path / "runs", observer=heard)
    assert collected.run.metrics["round"].to_list() == [0, 1, 2, 3, 4]
    assert {"node 0 (host-0) is done", "node 1 (host-1) is done"} <= {*heard.said}
    assert left_behind(tmp_path) == []
    given = (tmp_path / "commands").read_text()
    assert "--keys keys" in given
    assert "--insecure" not in given


@pytest.mark.parametrize(
    ("lost_peer", "end"),
    [("skip", """echo '{"status": "done"}'"""), ("fail", "echo 'node 1 is lost' >&2; exit 1")],
)
def test_a_host_that_vanishes_is_not_waited_for(
    lost_peer: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = 'until [ -e "$top/vanished" ]; do sleep 0.01; done'
    described, hosts = play(
        tmp_path,
        f"{BEGINS}; {wait}; {end}",
        VANISHES,
        gather={"lost_peer": lost_peer},
        failures={"heartbeat_s": 0.1, "detection_s": 0.2},
    )
    gone = f'#!/bin/sh\n[ "$1" = host-1 ] && [ -e "{tmp_path}/vanished" ] && echo "no route to $1" >&2 && exit 255\n'
    (tmp_path / "ssh").write_text(SSH.replace("#!/bin/sh\n", gone))
    monkeypatch.setattr(launching, "SILENT_S", 0.1)
    monkeypatch.setattr(launching, "END_S", 0.1)
    heard = Heard()
    collected = launching.launch(described, hosts, tmp_path / "runs", observer=heard)
    assert collected.run.metrics["node"].unique().to_list() == [0]
    assert "the run is over, and nothing was heard for 0.3 s of node 1 (host-1): ended" in heard.said
    assert any(text.startswith("host host-1: no route to host-1: its records stay") for text in heard.said)


def test_few_connections_to_a_host_are_opened_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = """echo '{"began": true}'; echo '{"status": "done"}'"""
    described, hosts = play(tmp_path, f"{BEGINS}; {done}", done, nodes=7)
    slots = {"host-0": 5, "host-1": 2}
    hosts = hosts.model_copy(
        update={"hosts": tuple(host.model_copy(update={"slots": slots[host.name]}) for host in hosts.hosts)}
    )
    knocks = (
        'case "$2" in *exec*) mkdir -p "$0.at-$1"; : > "$0.at-$1/$$"; ls "$0.at-$1" | wc -l >> "$0.most-$1"; '
    )
    slow = 'sleep 0.2; rm "$0.at-$1/$$";; esac\n'  # (as a handshake over a long way)
    (tmp_path / "ssh").write_text(SSH.replace("#!/bin/sh\n", f"#!/bin/sh\n{knocks}{slow}"))
    monkeypatch.setattr(launching, "AT_ONCE", 2)
    launching.launch(described, hosts, tmp_path / "runs")
    for name, count in slots.items():
        unanswered = [int(line) for line in (tmp_path / f"ssh.most-{name}").read_text().split()]
        assert len(unanswered) == count
        assert max(unanswered) <= 2


def test_what_was_recorded_is_kept_though_a_node_did_not_start(tmp_path: Path) -> None:
    described, hosts = play(
        tmp_path,
        f'{BEGINS}; cat; echo \'{{"status": "stopped"}}\'',
        'until [ -e "$top/began" ]; do sleep 0.01; done; echo broken >&2; exit 3',
    )
    with pytest.raises(RunFailed, match=r"node 1 \(host-1\) did not start: broken") as failed:
        launching.launch(described, hosts, tmp_path / "runs")
    assert failed.value.folder is not None
    assert load_run(failed.value.folder).metrics["round"].to_list() == [0, 1, 2, 3, 4]
    assert left_behind(tmp_path) == []


def test_hosts_that_do_not_answer_are_given_up_by_default() -> None:
    words = Hosts(hosts=(Host(name="a"),)).ssh.split()
    assert {"BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=3"} <= {
        *words
    }


def test_ranks_fill_the_hosts_in_order() -> None:
    hosts = Hosts(
        hosts=(Host(name="a", slots=2), Host(name="me@b", port=7000), Host(name="c", address="fe80::1"))
    )
    placed = [(host.name, host.endpoint(slot)) for host, slot in hosts.place(4)]
    assert placed == [("a", "a:29600"), ("a", "a:29601"), ("me@b", "b:7000"), ("c", "[fe80::1]:29600")]
    with pytest.raises(BadInput, match="hosts: 4 slots for 5 nodes; accepted: at least 5"):
        hosts.place(5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts: []", "hosts: none; accepted: at least one"),
        ("hosts: [{name: a}, {name: a}]", "hosts: a stands there twice; accepted: once, with more slots"),
        ("hosts: [{name: a, slot: 2}]", r"hosts.0.slot: unknown field \(did you mean 'slots'\?\)"),
        ("hosts: [{name: -oProxyCommand=x}]", "hosts.0.name: got '-oProxyCommand=x'"),
        ("hosts: [{name: a, port: 65535, slots: 2}]", "a port from 1 to 65535"),
        ("ssh: ''\nhosts: [{name: a}]", "ssh: got ''; accepted: a command"),
    ],
)
def test_a_hosts_file_that_can_not_be_used_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(text)
    with pytest.raises(BadInput, match=said):
        Hosts.load(tmp_path / "hosts.yaml")


def test_what_an_experiment_names_travels_with_it(tmp_path: Path) -> None:
    """The same experiment elsewhere has the same digest, though its files lie elsewhere and its data too."""
    from gossamer.runtime.processes.standalone.agreement import digest

    (tmp_path / "graph.txt").write_text("0 1\n")
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "mine.py").write_text("A = 1\n")
    graph = {"name": "edge-list", "path": str(tmp_path / "graph.txt")}
    here = Experiment.of({**SETTINGS, "nodes": 2, "topology": graph, "data_root": str(tmp_path)})
    Bundle(here, [tmp_path / "module"]).write(tmp_path / "there")
    there = Experiment.load(tmp_path / "there" / "experiment.yaml")
    assert there.topology.path == tmp_path / "there" / "files" / "0-graph.txt"
    assert there.data_root is None
    assert (tmp_path / "there" / "module" / "mine.py").read_text() == "A = 1\n"
    assert digest(there) == digest(here)
    there.topology.path.write_text("1 0\n")
    assert digest(there) != digest(here)
    assert digest(here.override(seed=9)) != digest(here)
    with pytest.raises(BadInput, match="--with .*nowhere: not there"):
        Bundle(here, [tmp_path / "nowhere"])
