"""The description of how a run ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from gossamer.runtime.outcome import describe_waits, ending_signals


def test_nodes_with_the_same_wait_are_named_together() -> None:
    waits = {rank: ["tag 'never' from anyone"] for rank in range(20)} | {20: ["tag 'm' from ranks [1]"]}
    named = ", ".join(map(str, range(16)))
    assert describe_waits(waits, {21: 3}) == (
        f"nodes {named} and 4 more for tag 'never' from anyone; node 20 for tag 'm' from ranks [1];"
        " node 21 returned after 3 rounds"
    )


def test_only_a_few_different_waits_are_described() -> None:
    waits = {rank: [f"tag 'm' from ranks [{rank + 1}]"] for rank in range(8)}
    first = "; ".join(f"node {rank} for tag 'm' from ranks [{rank + 1}]" for rank in range(5))
    assert describe_waits(waits, {}) == f"{first}; and 3 more waits"


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals are as before afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_closed_terminal_ends_a_run_once_however_often_it_says_so() -> None:
    said: list[str] = []
    stopped: list[bool] = []
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with ending_signals(lambda: stopped.append(True), said.append):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # of the system, after that of the shell
    signal.raise_signal(signal.SIGHUP)  # while the report is written
    assert stopped == [True]
    assert said[0].startswith("SIGHUP: the run ends and keeps its record")


@pytest.mark.usefixtures("handlers")
def test_run_under_nohup_survives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ending_signals(lambda: pytest.fail("stopped"), pytest.fail):
        signal.raise_signal(signal.SIGHUP)
