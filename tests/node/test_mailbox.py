"""Mailbox: receive, drain and gather, late messages, and the bound on unread ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.messages import decode, encode
from gossamer.messages.encoding import MAX_ITEMS
from gossamer.messages.tags import Message, Traffic, as_tag, matches
from gossamer.node.expectations import Expectations
from gossamer.node.host import Host
from gossamer.node.mailbox import MAX_UNREAD, MAX_UNREAD_VALUES, Inbox, Mailbox
from gossamer.node.setup import Setup

Tags = st.lists(st.one_of(st.integers(0, 2), st.sampled_from("ab")), max_size=3).map(tuple)
Messages = st.lists(st.tuples(st.integers(0, 3), Tags), max_size=12)


def message(source: int, *tag: str | int) -> Message:
    return Message(source, tag, None, 0.0)


def mailbox(*messages: Message) -> Mailbox:
    gather = SimpleNamespace(lost_peer="skip", malformed="drop", drops_malformed=True)
    setup = mock.Mock(spec=Setup, experiment=SimpleNamespace(gather=gather))
    parts = {"lost": set(), "presence": None, "counters": Traffic()}
    slot = lambda: asyncio.get_running_loop().create_future()  # noqa: E731
    host = mock.Mock(spec=Host, now=lambda: 1.0, slot=slot, **parts)
    box = Mailbox(setup, 9, host, lambda: 0, Expectations(3, encoded=False))
    for sent in messages:
        box.deliver(sent)
    return box


def missed(box: Mailbox, prefix: tuple[str | int, ...], *sources: int) -> None:
    """Gather without waiting, where no message from these sources has arrived."""
    assert asyncio.run(box.gather(set(sources), prefix, 0, None)).missing == sources


def test_tag_is_a_tuple_of_its_parts() -> None:
    assert as_tag("model") == ("model",)
    assert as_tag(3) == (3,)
    assert as_tag(("model", 3)) == ("model", 3)
    with pytest.raises(TypeError, match=r"tag True: bool in a tag; accepted: str, int, or a tuple of these"):
        as_tag(True)


@given(Messages, Tags, st.none() | st.integers(0, 3))
def test_drain_takes_matching_messages_and_keeps_their_order(
    sent: list[tuple[int, tuple[Any, ...]]], prefix: tuple[Any, ...], source: int | None
) -> None:
    messages = [message(source, *tag) for source, tag in sent]
    box, one_by_one = mailbox(*messages), mailbox(*messages)
    fits = [
        item
        for item in messages
        if item.tag[: len(prefix)] == prefix and (source is None or item.source == source)
    ]
    assert box.drain(prefix, source, newest=False) == fits
    assert box.messages == [item for item in messages if item not in fits]

    async def received() -> list[Message]:
        return [await one_by_one.receive(prefix, source, None) for _ in fits]

    assert asyncio.run(received()) == fits
    assert one_by_one.messages == box.messages
    assert one_by_one.host.counters.messages_taken == len(fits)


def test_unread_messages_are_bounded_per_sender() -> None:
    box = mailbox(*(message(3, "early", k) for k in range(5)))
    for k in range(50_000):
        box.deliver(message(0, "nobody", k))
        assert k % 511 or len(box.messages) <= 2 * MAX_UNREAD + 10
    box.deliver(message(0, "last"))
    unread = Counter(item.source for item in box.messages)
    assert unread[3] == 5
    assert unread[0] + box.host.counters.messages_refused == 50_001
    assert [item.tag for item in box.drain((), 0, newest=False)[-2:]] == [("nobody", 49_999), ("last",)]
    event = "node 9 drops messages of node 0: over 4096 are unread, or over 262144 values in them; the first is under tag"
    event += " ('nobody', 0)"
    assert box.host.event.mock_calls == [mock.call("unread", event)]  # type: ignore[attr-defined]


def test_values_in_unread_messages_are_bounded_per_sender() -> None:
    """An empty list takes a byte on the wire and sixty in memory."""
    box = mailbox(message(3, "early"))
    largest = 0
    for k in range(100):
        box.deliver(Message(0, ("nobody", k), [[]] * 50_000, 0.0, values=50_003))
        largest = max(largest, sum(item.values for item in box.messages))
    assert largest < 3 * MAX_UNREAD_VALUES
    assert box.drain(("early",), 3, newest=False)
    assert [item.tag for item in box.messages][-1] == ("nobody", 99)
    assert len(box.messages) + box.host.counters.messages_refused == 100
    assert box.host.event.call_count == 1  # type: ignore[attr-defined]


def test_age_of_a_message_is_not_negative() -> None:
    """The clock of a sender on another machine may be ahead."""
    box = mailbox(Message(0, ("a",), 1, 3.0))
    assert len(box.drain((), 0, newest=False)) == 1
    assert box.take_ages() == (0.0, 0.0)


def test_many_senders_with_few_unread_messages_lose_none() -> None:
    box = mailbox(*(message(k % 10_000, "model") for k in range(30_000)))
    assert len(box.messages) == 30_000
    assert box.host.counters.messages_refused == 0


@given(Messages, Tags)
def test_gather_takes_the_oldest_message_of_each_source(
    sent: list[tuple[int, tuple[Any, ...]]], prefix: tuple[Any, ...]
) -> None:
    messages = [message(source, *tag) for source, tag in sent]
    box = mailbox(*messages)
    inbox = asyncio.run(box.gather({0, 2}, prefix, 0, None))
    oldest = []
    for source in (0, 2):
        fits = [item for item in messages if item.source == source and matches(prefix, item.tag)]
        assert (source in inbox) is bool(fits)
        oldest += fits[:1]
    assert box.messages == [item for item in messages if item not in oldest]


def test_one_missed_message_is_dropped_once_when_late() -> None:
    box = mailbox()
    missed(box, ("m", 1), 2, 3)
    late, again, other_tag, other_source = (
        message(2, "m", 1),
        message(2, "m", 1),
        message(3, "m", 2),
        message(4, "m", 1),
    )
    for item in (other_tag, other_source, late, again):
        box.deliver(item)
    assert box.messages == [other_tag, other_source, again]
    assert box.host.counters.messages_late == 1


def test_two_gathers_that_miss_a_message_drop_two() -> None:
    box = mailbox()
    missed(box, ("m",), 2)
    missed(box, ("m",), 2, 3)
    late = [message(2, "m"), message(2, "m", 1), message(3, "m")]
    kept = [message(2, "m"), message(3, "m")]
    for item in (late[0], late[1], kept[0], late[2], kept[1]):
        box.deliver(item)
    assert box.messages == kept


def test_lost_messages_do_not_make_other_messages_late() -> None:
    box = mailbox()
    for r in range(1000):
        missed(box, ("m", r), 1)
    kept, late = [message(1, "m", 1000), message(1, "m", 500)], message(1, "m", 500)
    for item in (kept[0], late, kept[1]):
        box.deliver(item)
    assert box.messages == kept


def test_retired_mailbox_drops_all_messages() -> None:
    box = mailbox(message(1, "m"))
    box.retire()
    box.deliver(message(2, "m"))
    assert box.messages == []
    assert box.host.counters.messages_late == 2


def test_waiters_describe_themselves() -> None:
    async def scene() -> list[str]:
        box = mailbox(message(1, "m"))
        tasks = [
            asyncio.ensure_future(box.receive(("a",), None, None)),
            asyncio.ensure_future(box.receive((3,), 2, None)),
            asyncio.ensure_future(box.gather({1, 2, 3}, ("m",), None, None)),
        ]
        await asyncio.sleep(0)
        waits = [str(waiter) for waiter in box.waiters]
        for task in tasks:
            task.cancel()
        return waits

    assert asyncio.run(scene()) == [
        "tag 'a' from anyone",
        "tag 3 from ranks [2]",
        "tag 'm' from ranks [2, 3]",
    ]


def test_inbox_is_in_rank_order() -> None:
    inbox = Inbox({3: "c", 1: "a"}, {5, 2})
    assert list(inbox.items()) == [(1, "a"), (3, "c")]
    assert inbox.missing == (2, 5)


def test_restored_mailbox_keeps_messages_that_arrived_meanwhile() -> None:
    box = mailbox(message(1, "new"))
    box.restore([message(1, "saved")], mailbox().saved())
    assert [item.tag for item in box.messages] == [("saved",), ("new",)]


def test_mailbox_with_many_missed_messages_can_be_saved() -> None:
    box = mailbox()

    async def miss() -> None:
        for r in range(MAX_ITEMS):
            await box.gather({1}, ("model", r), 0, None)

    asyncio.run(miss())
    saved = decode(*vars(encode(box.saved())).values())
    other = mailbox()
    other.restore([], saved)
    for item in (message(1, "model", 0), message(1, "model", MAX_ITEMS - 1), message(1, "model", MAX_ITEMS)):
        other.deliver(item)
    assert [item.tag for item in other.messages] == [("model", MAX_ITEMS)]


def test_long_tag_is_not_looked_up_part_by_part() -> None:
    class Counted(tuple[str | int, ...]):
        lookups = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.lookups += 1
            return super().__getitem__(index)

    box = mailbox()
    missed(box, ("model", 1), 2)
    box.deliver(Message(1, Counted(range(1000)), None, 0.0))
    assert len(box.messages) == 1
    assert Counted.lookups < 10
