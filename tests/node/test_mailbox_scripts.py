"""Random scripts, played with the mailbox and with the plain one of mailbox_reference.py, do the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mailbox_reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossamer.codecs.coder import Coder
from gossamer.messages.tags import Message, Traffic
from gossamer.node import mailbox
from gossamer.node.expectations import Expectations
from gossamer.node.host import Host
from gossamer.node.node import Node
from gossamer.node.setup import Setup

Ranks = st.integers(0, 3)
Tags = st.sampled_from(
    [*[("a", 1)] * 4, (), ("a",), ("b",), (1,), ("a", 1), ("a", 2), ("a", 1, "x"), (1, "a")]
)
Timeouts = st.none() | st.just(1.0)
Payloads = st.sampled_from(["vector", "vector", "vector", "short", "nan", "nothing", "undecodable"])
Steps = st.one_of(
    *[st.tuples(st.just("deliver"), Ranks, Tags, Payloads, st.integers(0, 4), st.booleans())] * 3,
    st.tuples(st.just("round"), st.sets(Ranks, min_size=1), Tags),
    st.tuples(st.just("deliver again"), st.integers(0, 5)),
    st.tuples(st.just("gather"), st.sets(Ranks), Tags, st.none() | Ranks, Timeouts),
    st.tuples(
        st.just("receive"), Tags, st.none() | Ranks, Timeouts, st.none() | st.just(("kept",)), st.booleans()
    ),
    st.tuples(st.just("drain"), Tags, st.none() | Ranks, st.booleans(), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["expire", "mix", "retire", "save and restore", "restore again", "overwrite"])),
    st.tuples(st.just("write into"), st.integers(0, 5)),
    st.tuples(st.just("lose"), Ranks),
    st.tuples(st.just("find"), Ranks, st.integers(0, 2), st.booleans()),
)


class Scene:
    """A mailbox of one of the two kinds, with a host whose time and mixing steps the script moves."""

    def __init__(self, kind: Any, lost_peer: str, drops: bool, decodes: bool) -> None:
        self.kind, self.decodes = kind, decodes
        gather = SimpleNamespace(lost_peer=lost_peer, drops_malformed=drops)
        self.setup = mock.Mock(spec=Setup, experiment=SimpleNamespace(gather=gather))
        self.log: list[Any] = []
        self.timers: list[Callable[[], None]] = []
        self.decoding: list[asyncio.Future[None]] = []
        host = {"event": lambda *event: self.log.append(event), "timer": self.timer, "mix": self.mix}
        slot = lambda: asyncio.get_running_loop().create_future()  # noqa: E731
        self.host = mock.Mock(
            spec=Host, lost=set(), presence=None, counters=Traffic(), now=lambda: 2.5, slot=slot, **host
        )
        self.expectations = Expectations(3, encoded=False)
        self.expectations.sent(("a", 7), torch.ones(3))
        self.expectations.sent(("a", 7, "x"), torch.ones(3))
        self.expectations.sent((7,), torch.ones(3))
        self.sent: list[Message] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.box = self.new_box()

    def new_box(self) -> Any:
        box = self.kind.Mailbox(self.setup, 9, self.host, lambda: 1, self.expectations)
        if self.decodes:
            decoder = mock.Mock(spec=Coder, node=mock.Mock(spec=Node), decode=self.decode)
            setattr(box, "decoder" if self.kind is mailbox else "coder", decoder)
        return box

    def decode(self, message: Message) -> Message:
        self.log.append(("decode", message.number))
        if message.payload == "undecodable":
            raise ValueError("no such code")
        return message

    def timer(self, seconds: float, call: Callable[[], None]) -> Any:
        self.timers.append(call)
        return SimpleNamespace(cancel=lambda: self.timers.remove(call) if call in self.timers else None)

    async def mix(self, step: Any, *, read: bool) -> Any:
        self.decoding.append(asyncio.get_running_loop().create_future())
        await self.decoding[-1]
        return step.run(None)

    def deliver(self, source: int, tag: tuple[Any, ...], kind: str, sent_at: float, large: bool) -> None:
        payload: Any = {"nothing": None, "undecodable": "undecodable"}.get(kind, "vector")
        versions: tuple[Any, ...] = ()
        if payload == "vector":
            payload = torch.full((2 if kind == "short" else 3,), torch.nan if kind == "nan" else 1.0)
            versions = ((payload, payload._version),)
        values = 2**17 if large else 1
        message = Message(source, tag, payload, sent_at, versions, len(self.sent), values=values)
        self.sent.append(message)
        self.box.deliver(message)

    def round(self, ranks: Sequence[int], tag: tuple[Any, ...]) -> None:
        for rank in ranks:
            self.deliver(rank, tag, "vector", 1.0, False)

    def deliver_again(self, k: int) -> None:
        """Someone has sent to this node twice in one broadcast."""
        if k < len(self.sent):
            self.box.deliver(self.sent[k])

    def start(self, coroutine: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine))

    def gather(self, wanted: set[int], prefix: Any, at_least: int | None, timeout: float | None) -> None:
        self.start(self.box.gather(set(wanted), prefix, at_least, timeout))

    def receive(
        self, prefix: Any, source: int | None, timeout: float | None, keep_as: Any, exact: bool
    ) -> None:
        if prefix or keep_as is None:  # Node.receive refuses what would come back
            self.start(self.box.receive(prefix, source, timeout, keep_as, exact=exact))

    def drain(self, prefix: Any, source: int | None, newest: bool, even: bool) -> None:
        only = (lambda message: message.number % 2 == 0) if even else None
        try:
            drained = self.box.drain(prefix, source, newest=newest, only=only)
            self.log.append([message.number for message in drained])
        except Exception as error:  # noqa: BLE001 - whatever it is, both mailboxes must raise it
            self.log.append((type(error).__name__, str(error)))

    def cancel(self, k: int) -> None:
        if k < len(self.tasks):
            self.tasks[-1 - k].cancel()

    def expire(self) -> None:
        for call in list(self.timers):
            call()

    def end_mixing(self) -> None:
        for future in self.decoding:
            if not future.done():
                future.set_result(None)

    def write_into(self, k: int) -> None:
        if k < len(self.sent) and isinstance(self.sent[k].payload, torch.Tensor):
            self.sent[k].payload.add_(1.0)

    def lose(self, rank: int) -> None:
        self.host.lost.add(rank)
        self.box.wake_all()

    def find(self, rank: int, first: int, restarted: bool) -> None:
        self.host.lost.discard(rank)
        if restarted:
            self.box.forget_late({rank})
        self.box.first[rank] = first
        self.box.wake_all()

    def restore(self, again: bool) -> None:
        """A new mailbox, with a message that arrives before it is restored."""
        messages, saved = list(self.box.messages), self.box.saved()
        self.box = self.new_box()
        self.deliver(0, ("a",), "vector", 1.0, False)
        self.box.restore(messages, saved, again=again)

    def overwrite(self) -> None:
        first = {message.source: message.number + 1 for message in reversed(self.box.messages)}
        known = [message for message in self.box.messages if message.number < first[message.source]]
        if len({(message.source, message.number) for message in known}) == len(known):
            self.box.overwrite(known, first)

    def play(self, step: tuple[Any, ...]) -> None:
        what, *arguments = step
        plays: dict[str, Callable[..., None]] = {
            "deliver": self.deliver,
            "round": self.round,
            "deliver again": self.deliver_again,
            "gather": self.gather,
            "receive": self.receive,
            "drain": self.drain,
            "cancel": self.cancel,
            "expire": self.expire,
            "mix": self.end_mixing,
            "retire": self.box.retire,
            "save and restore": lambda: self.restore(again=False),
            "restore again": lambda: self.restore(again=True),
            "overwrite": self.overwrite,
            "write into": self.write_into,
            "lose": self.lose,
            "find": self.find,
        }
        plays[what](*arguments)

    def look(self) -> None:
        """Note everything that can be seen of the mailbox."""
        box = self.box
        self.log += [
            [message.number for message in box.messages],
            [str(waiter) for waiter in box.waiters],
            box.unread(),
            astuple(self.host.counters),
            box.saved(),
            [_outcome(task) for task in self.tasks],
        ]


def _outcome(task: asyncio.Task[Any]) -> Any:
    if not task.done():
        return "waits"
    if task.cancelled():
        return "cancelled"
    if (error := task.exception()) is not None:
        return type(error).__name__, str(error)
    result = task.result()
    if isinstance(result, Message):
        return result.number, result.tag
    return [(rank, id(payload)) for rank, payload in result.items()], result.missing, result.unknown_tag


def played(kind: Any, steps: Sequence[tuple[Any, ...]], rules: tuple[str, bool, bool]) -> list[Any]:
    """All that can be seen while a script is played. Payloads are named by the order in which they were sent."""

    async def scene() -> list[Any]:
        scene = Scene(kind, *rules)
        for step in steps:
            scene.play(step)
            for _ in range(4):
                await asyncio.sleep(0)
            scene.look()
        for task in scene.tasks:
            task.cancel()
        await asyncio.gather(*scene.tasks, return_exceptions=True)
        scene.look()
        names = {id(message.payload): message.number for message in scene.sent}
        return _renamed(scene.log, names)

    return asyncio.run(scene())


def _renamed(item: Any, names: dict[int, int]) -> Any:
    if isinstance(item, list | tuple):
        return [_renamed(inner, names) for inner in item]
    return f"payload {names[item]}" if type(item) is int and item in names else item


@settings(max_examples=100)
@given(
    st.lists(Steps, max_size=25),
    st.tuples(st.sampled_from(["fail", "wait", "skip"]), st.booleans(), st.booleans()),
)
@example(  # who has sent a malformed message is not waited for, even if it sends another one
    [
        ("gather", {0, 1}, ("a", 1), 1, None),
        ("deliver", 0, ("a", 1), "short", 1, False),
        ("round", {0, 1}, ("a", 1)),
    ],
    ("skip", True, False),
)
def test_mailbox_does_what_the_plain_one_does(
    steps: list[tuple[Any, ...]], rules: tuple[str, bool, bool]
) -> None:
    assert played(mailbox, steps, rules) == played(mailbox_reference, steps, rules)
