"""Channels between the processes of a run."""

from __future__ import annotations

import selectors
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.config.ranges import LONGEST_ACCEPTED_S
from gossamer.messages.tags import COUNTERS, LONGEST_S, Traffic
from gossamer.runtime.processes.channel import (
    Channel,
    SelectorChannel,
    Unpacker,
    Violation,
    keep_alive,
    pack,
)
from gossamer.runtime.processes.protocol import (
    CurrentRound,
    Event,
    FromNode,
    Progress,
    ProtocolMessage,
    Ready,
    Row,
    Values,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


numbers, ranks = st.integers(0, 2**53), st.integers(0, 2**31 - 1)
seconds, shares = st.floats(0.0, LONGEST_S), st.none() | st.floats(0.0, 1.0)
traffic = st.builds(Traffic, **dict.fromkeys(COUNTERS, numbers))
messages = st.one_of(
    st.builds(Ready, st.ip_addresses().map(str), st.integers(1, 65_535)),
    st.builds(CurrentRound, ranks, numbers),
    st.builds(Event, st.just("slow"), st.text()),
    st.builds(Progress, numbers, seconds, traffic, st.lists(st.text(), max_size=3)),
    st.builds(
        Row,
        numbers | st.just("end") | st.tuples(st.just("tick"), numbers),
        st.builds(
            Values,
            *(numbers, numbers, seconds, seconds, seconds),
            *(st.none() | st.floats(allow_nan=False), st.none() | seconds, st.none() | seconds),
            *(shares, shares, shares),
        ),
        traffic,
        st.dictionaries(st.text(), values, max_size=3),
        st.none() | st.binary().map(bytearray),
        st.none() | st.lists(ranks, max_size=3),
    ),
)


@given(st.lists(messages, max_size=6), st.data())
def test_messages_survive_any_division_of_the_stream(
    sent: list[ProtocolMessage], data: st.DataObject
) -> None:
    stream = b"".join(map(pack, sent))
    ends = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    unpacker: Unpacker[ProtocolMessage] = Unpacker(FromNode)
    received: list[ProtocolMessage] = []
    for start, stop in zip([0, *ends], [*ends, len(stream)], strict=True):
        received += unpacker.feed(stream[start:stop])
    assert received == sent


@pytest.mark.parametrize(
    "body",
    [
        b"\x92\xa2At\x01",  # a field is missing
        b"\x93\xa2At\x01\xa1x",  # a string for a number
        b"\x91\xa5Hello",  # an unknown message
        b"\x93\xa4Note\xa5leave\x01",  # a message of the other direction
        b"\x80",  # not an array
        b"\xc1",  # not msgpack
    ],
)
def test_unexpected_messages_are_refused(body: bytes) -> None:
    with pytest.raises(Violation, match="can't be read"):
        list(Unpacker(FromNode).feed(len(body).to_bytes(4, "little") + body))


def test_too_long_message_is_refused_before_it_arrives() -> None:
    whole = pack(Event("slow", "x" * 100))
    assert list(Unpacker(FromNode, len(whole) - 4).feed(whole)) == [Event("slow", "x" * 100)]
    with pytest.raises(Violation, match="a message of 114 bytes; accepted: 113"):
        list(Unpacker(FromNode, len(whole) - 5).feed(whole[:4]))


def test_closing_a_channel_is_seen_on_both_sides() -> None:
    ends = socket.socketpair()
    ours: Channel[FromNode] = Channel(ends[0], FromNode)
    theirs: Channel[FromNode] = Channel(ends[1], FromNode)
    theirs.send(CurrentRound(1, 2))
    theirs.send(CurrentRound(3, 4))
    assert [ours.receive(), ours.receive()] == [CurrentRound(1, 2), CurrentRound(3, 4)]
    theirs.close()
    assert ours.receive() is None
    assert not ours.send(Ready("127.0.0.1", 1))
    ours.close()


class Watched:
    """A channel on a selector, and the messages received on it."""

    def __init__(self) -> None:
        self.heard: list[FromNode] = []
        self.gone: list[str | None] = []
        self.selector = selectors.DefaultSelector()
        ours, self.theirs = socket.socketpair()
        self.channel: SelectorChannel[FromNode] = SelectorChannel(
            ours, FromNode, self.selector, self.heard.append, self.gone.append, largest=2000
        )

    def serve(self) -> None:
        for key, events in self.selector.select(0):
            key.data(events)


def test_unread_messages_are_queued_without_blocking() -> None:
    """As for a stopped process: more than its socket holds."""
    watched = Watched()
    theirs: Channel[Event] = Channel(watched.theirs, FromNode)
    sent = 0
    while not watched.channel.waiting:
        watched.channel.send(Event("slow", f"{sent}{'x' * 1000}"))
        sent += 1
    for number in range(sent, sent + 10):
        watched.channel.send(Event("slow", f"{number}{'x' * 1000}"))
    assert not watched.selector.select(0)
    for number in range(sent + 10):
        message = theirs.receive()
        assert message is not None
        assert message.text.rstrip("x") == str(number)
        watched.serve()
    assert not watched.channel.waiting
    assert not watched.selector.select(0)  # there is room, but nothing to send
    theirs.close()
    watched.serve()
    assert watched.gone == [None]
    watched.channel.send(Ready("127.0.0.1", 1))
    assert not watched.channel.waiting


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"\x01\0\0\0\xc1", "can't be read"), ((2001).to_bytes(4, "little"), "2001 bytes; accepted: 2000")],
)
def test_invalid_message_ends_the_channel(data: bytes, why: str) -> None:
    watched = Watched()
    watched.theirs.sendall(pack(CurrentRound(1, 2)) + data)
    watched.serve()
    assert watched.heard == [CurrentRound(1, 2)]
    [reason] = watched.gone
    assert reason is not None
    assert why in reason
    assert not watched.selector.get_map()
    watched.theirs.close()


@pytest.mark.parametrize("silent_s", [1e-9, 10.0, 2e5, LONGEST_ACCEPTED_S])
def test_connections_are_kept_alive_for_any_time_that_an_experiment_may_have(silent_s: float) -> None:
    """Linux takes at most 32,767 s between two questions, and 2^31 - 1 ms without an answer."""
    with socket.socket() as end:
        keep_alive(end, silent_s)
        every = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        silent_ms = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert every == min(max(int(silent_s / 4), 1), 32_767)
    assert silent_ms == min(int(1000 * silent_s), 2**31 - 1)
