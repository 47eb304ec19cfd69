from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.messages.mailbox import Inbox, Mailbox, Waiter
from gossamer.messages.tags import Message, as_tag, matches

Tags = st.lists(st.one_of(st.integers(0, 2), st.sampled_from("ab")), max_size=3).map(tuple)
Messages = st.lists(st.tuples(st.integers(0, 3), Tags), max_size=12)


def message(source: int, *tag: str | int, payload: Any = None) -> Message:
    return Message(source, tag, payload, 0.0)


def mailbox(*messages: Message) -> tuple[Mailbox, list[Message]]:
    dropped: list[Message] = []
    box = Mailbox(dropped.append)
    for each in messages:
        box.deliver(each)
    return box, dropped


def test_a_tag_is_a_tuple_of_its_parts() -> None:
    assert as_tag("model") == ("model",)
    assert as_tag(3) == (3,)
    assert as_tag(("model", 3)) == ("model", 3)
    with pytest.raises(TypeError, match=r"tag True: bool in a tag; accepted: str, int, or a tuple of these"):
        as_tag(True)


@given(Tags, Tags)
def test_a_prefix_matches_itself_and_everything_longer(
    prefix: tuple[Any, ...], rest: tuple[Any, ...]
) -> None:
    assert matches(prefix, prefix + rest)
    assert matches((), rest)
    assert not matches((*prefix, "more"), prefix)


@given(Messages, Tags, st.none() | st.sets(st.integers(0, 3)))
def test_taking_all_splits_the_messages_and_keeps_their_order(
    sent: list[tuple[int, tuple[Any, ...]]], prefix: tuple[Any, ...], sources: set[int] | None
) -> None:
    messages = [message(source, *tag) for source, tag in sent]
    box, _ = mailbox(*messages)
    fits = [
        each
        for each in messages
        if each.tag[: len(prefix)] == prefix and (sources is None or each.source in sources)
    ]
    assert box.take_all(prefix, sources) == fits
    assert len(box) == len(messages) - len(fits)
    assert box.take_all((), None) == [each for each in messages if each not in fits]


@given(Messages, Tags, st.none() | st.sets(st.integers(0, 3)))
def test_taking_the_first_one_at_a_time_is_taking_all(
    sent: list[tuple[int, tuple[Any, ...]]], prefix: tuple[Any, ...], sources: set[int] | None
) -> None:
    messages = [message(source, *tag) for source, tag in sent]
    one_by_one, _ = mailbox(*messages)
    at_once, _ = mailbox(*messages)
    taken = list(iter(lambda: one_by_one.take_first(prefix, sources), None))
    assert taken == at_once.take_all(prefix, sources)
    assert len(one_by_one) == len(at_once)


@given(Messages, Tags)
def test_taking_one_of_each_takes_everyones_oldest(
    sent: list[tuple[int, tuple[Any, ...]]], prefix: tuple[Any, ...]
) -> None:
    messages = [message(source, *tag) for source, tag in sent]
    box, _ = mailbox(*messages)
    taken = box.take_one_each(prefix, {0, 2})
    for source in (0, 2):
        fits = [each for each in messages if each.source == source and matches(prefix, each.tag)]
        assert taken.get(source) is (fits[0] if fits else None)
    assert set(taken) <= {0, 2}
    assert len(box) == len(messages) - len(taken)


def test_a_latecomer_is_dropped_once_for_each_time_that_it_was_missed() -> None:
    box, dropped = mailbox()
    box.close(("m", 1), [2, 3])
    late, again, other_tag, other_source = (
        message(2, "m", 1),
        message(2, "m", 1),
        message(3, "m", 2),
        message(4, "m", 1),
    )
    for each in (other_tag, other_source, late, again):
        box.deliver(each)
    assert dropped == [late]
    assert box.take_all((), None) == [other_tag, other_source, again]


def test_two_gathers_that_missed_a_message_drop_two() -> None:
    box, dropped = mailbox()
    box.close(("m",), [2])
    box.close(("m",), [2, 3])
    late = [message(2, "m"), message(2, "m", 1), message(3, "m")]
    kept = [message(2, "m"), message(3, "m")]
    for each in (late[0], late[1], kept[0], late[2], kept[1]):
        box.deliver(each)
    assert dropped == late
    assert box.take_all((), None) == kept


def test_what_was_here_before_the_gather_closed_is_not_dropped() -> None:
    here = message(2, "m", 1)
    box, dropped = mailbox(here)
    box.close(("m", 1), [2])
    assert dropped == []
    assert box.take_first((), None) is here


def test_a_waiter_is_woken_by_what_fits_and_by_nothing_else() -> None:
    async def scene() -> None:
        box, _ = mailbox()
        waiter = Waiter(("m",), {1})
        box.watch(waiter)
        task = asyncio.ensure_future(waiter.wait())
        for other in (message(2, "m"), message(1, "x"), message(1)):
            await asyncio.sleep(0)
            box.deliver(other)
        await asyncio.sleep(0)
        assert not task.done()
        box.deliver(message(1, "m", 5))
        await task
        assert len(box) == 4  # it waits in the mailbox, not in the waiter
        box.unwatch(waiter)

    asyncio.run(scene())


def test_a_waiter_for_several_is_woken_by_the_last_of_them() -> None:
    async def scene() -> None:
        box, _ = mailbox(message(1, "m"))
        waiter = Waiter(("m",), {1, 2, 3}, wanted=2)
        box.watch(waiter)
        assert waiter.seen == {1}
        task = asyncio.ensure_future(waiter.wait())
        await asyncio.sleep(0)
        box.deliver(message(1, "m"))  # a second one of the same sender does not count
        await asyncio.sleep(0)
        assert not task.done()
        assert box.waiting() == ["tag 'm' from ranks [2, 3]"]
        box.deliver(message(3, "m"))
        await task

    asyncio.run(scene())


def test_waits_in_words() -> None:
    box, _ = mailbox()
    for waiter in (Waiter((), None), Waiter(("a",), None), Waiter((3,), {2}), Waiter(("a", 1), {2, 0})):
        box.watch(waiter)
    assert box.waiting() == [
        "any message from anyone",
        "tag 'a' from anyone",
        "tag 3 from ranks [2]",
        "tag ('a', 1) from ranks [0, 2]",
    ]


def test_expiry_and_wake_all_let_everyone_look_again() -> None:
    async def scene() -> None:
        box, _ = mailbox()
        first, second = Waiter(("m",), {1}), Waiter(("x",), None)
        for waiter in (first, second):
            box.watch(waiter)
        tasks = [asyncio.ensure_future(waiter.wait()) for waiter in (first, second)]
        await asyncio.sleep(0)
        first.expire()
        await tasks[0]
        assert first.expired
        assert not tasks[1].done()
        box.wake_all()
        await tasks[1]
        assert not second.expired

    asyncio.run(scene())


def test_an_inbox_is_in_rank_order() -> None:
    inbox = Inbox({3: "c", 1: "a"}, {5, 2})
    assert list(inbox.items()) == [(1, "a"), (3, "c")]
    assert inbox.missing == (2, 5)


def test_who_has_ended_keeps_no_message() -> None:
    dropped: list[Message] = []
    mailbox = Mailbox(dropped.append)
    here, later = message(1, "m"), message(2, "m")
    mailbox.deliver(here)
    mailbox.retire()
    mailbox.deliver(later)
    assert dropped == [here, later]
    assert len(mailbox) == 0


def test_many_messages_that_were_lost_make_no_other_one_late() -> None:
    dropped: list[Message] = []
    mailbox = Mailbox(dropped.append)
    for r in range(1000):
        mailbox.close(("m", r), [1])
    mailbox.deliver(message(1, "m", 1000))
    mailbox.deliver(message(1, "m", 500))
    mailbox.deliver(message(1, "m", 500))
    assert [each.tag for each in dropped] == [("m", 500)]
    assert len(mailbox) == 2
