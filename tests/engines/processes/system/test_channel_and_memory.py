"""Channels between the processes of a run, and the memory and locks they share."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.engines.processes.system.channel import Channel, Unpacker, pack
from gossamer.engines.processes.system.death import describe_exit
from gossamer.engines.processes.system.memory import FINAL, SharedModels, one_of
from gossamer.engines.processes.system.shared_file import shared_file
from gossamer.messages import Model

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


def test_places_are_limited_and_freed_by_death(file: int) -> None:
    """A child takes the only place and is killed in it: the place is free again, and not before."""
    inside, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with one_of(file, 1, 0):
            os.write(tell, b"!")
            signal.pause()
        os._exit(0)
    assert os.read(inside, 1) == b"!"
    second = os.fork()
    if second == 0:
        with one_of(file, 1, 0):
            os.write(tell, b"?")
        os._exit(0)
    os.set_blocking(inside, False)
    with pytest.raises(BlockingIOError):
        os.read(inside, 1)
    os.kill(child, signal.SIGKILL)
    assert describe_exit(os.waitpid(child, 0)[1]) == "killed by SIGKILL"
    assert describe_exit(os.waitpid(second, 0)[1]) == "exit code 0"
    assert os.read(inside, 1) == b"?"
    os.close(inside)
    os.close(tell)
