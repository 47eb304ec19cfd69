"""Channels between the processes of a run, and the memory they share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.messages.tags import Model
from gossamer.runtime.processes.system.channel import Channel, PatientChannel, Unpacker, pack
from gossamer.runtime.processes.system.memory import FINAL, SharedModels
from gossamer.runtime.processes.system.shared_file import shared_file

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(st.lists(values, min_size=1, max_size=4), max_size=6), st.data())
def test_messages_survive_any_cut_of_the_stream(messages: list[list[object]], data: st.DataObject) -> None:
    stream = b"".join(pack(*message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    unpacker, came = Unpacker(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        came += unpacker.feed(stream[start:stop])
    assert came == messages


def test_a_closed_channel_says_so_on_both_sides() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    theirs.send("hello", 1)
    theirs.send("again", 2)
    assert ours.receive() == ["hello", 1]
    assert (ours.pending() or [ours.receive()]) == [["again", 2]]
    theirs.close()
    assert ours.read() is None
    assert not ours.send("anyone?")
    ours.close()


def test_what_nobody_reads_is_kept_for_later_and_nobody_waits() -> None:
    """As where a process was stopped: more than its socket takes."""
    ends = socket.socketpair()
    ours, theirs = PatientChannel(ends[0]), Channel(ends[1])
    sent = 0
    while not ours.waiting:
        assert ours.send("lost", sent, "x" * 1000)
        sent += 1
    for number in range(sent, sent + 10):
        ours.send("lost", number, "x" * 1000)
    came: list[int] = []
    while len(came) < sent + 10:
        came += [number for _, number, _ in theirs.read() or []]
        ours.flush()
    assert came == list(range(sent + 10))
    assert not ours.waiting
    theirs.close()
    assert not ours.send("anyone?")
    assert not ours.waiting
    ours.close()


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = shared_file()
    yield descriptor
    os.close(descriptor)


def test_models_written_in_a_child_are_read_by_its_parent(file: int) -> None:
    shared = SharedModels(file, nodes=3, parameters=4, buffers=2)
    child = os.fork()
    if child == 0:
        shared.write(FINAL, 1, Model(torch.arange(4.0), torch.tensor([7.0, 8.0])))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    # Another mapping of the same file, as the launcher makes one.
    parameters, buffers = SharedModels(file, 3, 4, 2).all(FINAL)
    assert parameters.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert buffers is not None
    assert buffers[1].tolist() == [7, 8]
    assert SharedModels(file, 3, 4, 2).read(0, 1).parameters.tolist() == [0, 0, 0, 0]
