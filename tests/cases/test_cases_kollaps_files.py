"""Kollaps' files (case O17): what can't be simulated is named with its line and its service."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.config.registry import build
from gossamer.errors import BadInput

FILE = """<?xml version="1.0" encoding="UTF-8" ?>
<experiment boot="kollaps/bootstrapper:1.0">
  <services>
    <service name="dashboard" image="kollaps/dashboard:1.0" supervisor="true" port="8088"/>
    <service name="client" image="client:1.0"/>
    <service name="server" image="server:1.0"/>
  </services>
  <bridges><bridge name="s1"/></bridges>
  <links>
    <link origin="client" dest="s1" latency="10" upload="10Mbps" download="10Mbps" network="net"/>
    <link origin="server" dest="s1" latency="5" upload="50Mbps" download="50Mbps" network="net"/>
  </links>
  <dynamic>
    <schedule name="server" time="0.0" action="join" amount="1"/>
    <schedule name="client" time="70.0" action="leave"/>
    <schedule origin="client" dest="s1" time="20" jitter="0.5"/>
  </dynamic>
</experiment>
"""


def read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "topology.xml"
    path.write_text(text)
    build("network", {"name": "kollaps", "path": str(path)}).conditions(2, 1)  # type: ignore[attr-defined]


def test_the_other_lines_are_enough(tmp_path: Path) -> None:
    lines = FILE.splitlines()
    read(tmp_path, "\n".join(line for line in lines if "leave" not in line))


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ("", "", 15, "<schedule>: got {'name': 'client', 'time': '70.0', 'action': 'leave'}; accepted: services that join"),
        ('time="20" jitter', 'time="twenty" jitter', 16, "<schedule>.time: got 'twenty'; accepted: a number"),
        ('jitter="0.5"', 'drop="2"', 16, "<schedule>.drop: got '2'; accepted: less than or equal to 1"),
        ('origin="server" dest="s1"', 'origin="server" dest="s2"', 11, "<link>.dest: 's2'; accepted: a service or a bridge"),
        ('name="server" image', 'name="client" image', 6, "<service>: a second 'client', after line 5; accepted:"),
        ("<bridges>", "<routers/><bridges>", 8, "<routers>; accepted: <experiment> with bridge"),
        ("</experiment>", "</experiments>", 18, "mismatched tag; accepted: well-formed XML"),
    ],
)  # fmt: skip
def test_each_problem_has_its_line(tmp_path: Path, old: str, new: str, line: int, problem: str) -> None:
    with pytest.raises(BadInput) as raised:
        read(tmp_path, FILE.replace(old, new) if old else FILE)
    place = f"network.path: {tmp_path / 'topology.xml'}, line {line}"
    assert any(text.startswith(place) and problem in text for text in raised.value.problems), raised.value


def test_csv_files_name_row_and_column(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    accepted = "accepted: numbers"
    path.write_text("# measured\ntime_s,rank,uplink_mbps,downlink_mbps\n0,*,10,10\n1,0,fast,10\n")
    with pytest.raises(
        BadInput, match=rf"trace.csv: row 2 of the values, column 'uplink_mbps': 'fast'; {accepted}"
    ):
        read_trace(path)
    path.write_text("time_s,rank,uplink_mbps,downlink_mbps\n0,*,10,10\n1,0,10,10,7\n")
    with pytest.raises(BadInput, match=r"trace.csv, line 3: 5 cells, and 4 in line 1; accepted: a CSV file"):
        read_trace(path)
    path.write_text("")
    with pytest.raises(BadInput, match=r"trace.csv: empty; accepted: a CSV file"):
        read_trace(path)
    path.write_text("time_s,rank,uplink_mbps,downlink_mbps\n0,*,10,-1\n")
    with pytest.raises(
        BadInput,
        match=r"trace.csv: row 1 of the values, \{'time_s': 0.0.*-1.0, .*\}; accepted: numbers from 0",
    ):
        read_trace(path)


def read_trace(path: Path) -> None:
    build("network", {"name": "trace", "path": str(path)}).conditions(2, 1)  # type: ignore[attr-defined]
