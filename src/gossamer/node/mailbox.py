"""A node's mailbox. Messages stay in it, never inside a future, until a task takes them.

So no message is lost when the task that waits for it is cancelled or times out at the same instant.

Unread messages lie in boxes, one for each tag, in order of arrival. Most calls name a whole tag, and so look into one box
only. All messages have consecutive numbers, by which those of several boxes are put in order: a tag may also be a prefix."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from heapq import merge
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from gossamer.errors import PeerFailure
from gossamer.messages.tags import Message, is_private
from gossamer.node.expectations import Expectations, Prefix, Undecodable
from gossamer.node.host import Host, Timer
from gossamer.node.setup import Setup
from gossamer.node.waiting import NONE, Slot, resolve

if TYPE_CHECKING:
    from gossamer.node.node import Node

MAX_REPORTED = 8
"""Maximum number of malformed messages of one sender that are recorded as events. All of them are counted."""

MAX_UNREAD = 4_096
"""Maximum number of unread messages of one sender. Beyond it, the oldest are dropped from time to time."""

MAX_UNREAD_VALUES = 2**18
"""Maximum number of values in unread messages of one sender, with the same consequence: an empty list takes a byte on the
wire and 64 in memory."""

MAX_TAGS, MAX_RANKS = 2, 16
"""Maximum number of tags of unread messages, and of their senders, that a description names."""

_Box = dict[int, Message]  # number -> message, in order of arrival
_NO_AGES = (0, 0.0, -math.inf)


class PeerLost(PeerFailure):
    """A node waits for a dead peer, and the experiment ends the run in this case."""


class MalformedMessage(PeerFailure):
    """A peer has sent a message that its receiver does not expect, and the experiment ends the run in this
    case."""


class Inbox(dict[int, Any]):
    """The result of ``gather``: rank -> payload in rank order.

    Attributes:
        missing: requested ranks whose message is not included, ascending.
        unknown_tag: the tag, if the node did not know which form its messages have.
        messages: the messages of the payloads, in any order; none of those that a middleware has put there itself."""

    def __init__(
        self,
        payloads: dict[int, Any],
        missing: Iterable[int] = (),
        unknown_tag: Prefix | None = None,
        messages: Collection[Message] = (),
    ) -> None:
        ranks = sorted(payloads)
        # Messages sent at one instant mostly arrive in this order.
        dict.__init__(self, payloads if ranks == [*payloads] else {rank: payloads[rank] for rank in ranks})
        self.missing, self.unknown_tag = tuple(sorted(missing)) if missing else (), unknown_tag
        self.messages = messages


class _Waiter:
    """One task that waits for messages, within a ``with`` statement. It waits until ``wanted`` of the
    ``sources`` (None is any) have a message in the mailbox whose tag begins with the prefix, or equals it if
    ``exact``."""

    __slots__ = (
        *("_mailbox", "_slot", "_timeout", "_timer", "expired", "length", "prefix", "seen", "sources"),
        "wanted",
    )

    def __init__(
        self,
        mailbox: Mailbox,
        prefix: Prefix,
        sources: Set[int] | None,
        timeout: float | None,
        *,
        exact: bool = False,
    ) -> None:
        self._mailbox, self._timeout = mailbox, timeout
        self.prefix, self.sources, self.wanted = prefix, sources, 1
        self.length = len(prefix) + exact  # number of tag parts to compare
        self.seen: set[int] = set()
        self.expired = False
        self._slot: Slot | None = None
        self._timer: Timer | None = None

    def __enter__(self) -> _Waiter:
        mailbox = self._mailbox
        mailbox.waiters.append(self)
        if mailbox.presence is not None and self.sources:
            mailbox.presence.watch(mailbox.rank, self, self.sources)
        if self._timeout is not None:
            self._timer = mailbox.host.timer(self._timeout, self._expire)
        return self

    def __exit__(self, *_: object) -> None:
        mailbox = self._mailbox
        mailbox.waiters.remove(self)
        if mailbox.presence is not None and self.sources:
            mailbox.presence.unwatch(self, self.sources)
        if self._timer is not None:
            self._timer.cancel()

    def fits(self, message: Message) -> bool:
        sources = self.sources
        return (sources is None or message.source in sources) and message.tag[: self.length] == self.prefix

    def wake(self) -> None:
        if self._slot is not None:
            resolve(self._slot)

    def _expire(self) -> None:
        self.expired = True
        self.wake()

    def woken(self) -> Slot:
        """A slot that is done when there may be more messages to take, or nothing left to wait for."""
        self._slot = self._mailbox.host.slot()
        return self._slot

    def __str__(self) -> str:
        tag = f"tag {_shown(self.prefix)}" if self.prefix else "any message"
        waiting = "anyone" if self.sources is None else f"ranks {sorted(self.sources - self.seen)}"
        return f"{tag} from {waiting}"


class _Decoding:
    """The decoding of some messages, as a :class:`~gossamer.learning.mixing.InboxJob`."""

    def __init__(self, opened: Callable[[Message], Message], messages: Sequence[Message], node: Node) -> None:
        self._opened, self._messages, self._node = opened, messages, node
        self.own: Any = None

    def prepare(self) -> None:
        """Codecs of differences read the node's own parameters."""
        self.own = self._node.parameters

    def terms(self) -> None:
        """None: decoding is not a weighted sum."""

    def run(self, fresh: Any) -> list[Message]:
        return [self._opened(message) for message in self._messages]

    def commit(self, result: Any) -> Any:
        """The decoded messages, unchanged."""
        return result


class Decoder(Protocol):
    """What decodes the models in messages, for instance a codec's."""

    node: Node

    def decode(self, message: Message) -> Message:
        """A message with its models decoded. ValueError for a faulty payload."""


class Mailbox:
    """The messages of one node that no task has taken, and the tasks that wait for messages.

    Attributes:
        first: rank -> the first round in which a node that was away takes part again. This node may be
            included.
        presence: replaces ``first`` in a simulation with faults.
        decoder: decodes the models in messages, if they are encoded.
        expectations: what the node expects of its peers.
        drops_malformed: whether the node goes on if a peer's message is malformed.
        retired: whether no task will take messages any more."""

    __slots__ = (
        *("_ages", "_arrived", "_boxes", "_check_at", "_late", "_longer", "_longest_late", "_lost_peer"),
        *("_malformed_of", "_most_unread", "_most_values", "_restored", "_round", "_taken", "_unread_of"),
        *("_values", "decoder", "drops_malformed", "expectations", "first", "host", "presence", "rank"),
        *("retired", "waiters"),
    )

    def __init__(
        self, setup: Setup, rank: int, host: Host, round: Callable[[], int], expectations: Expectations
    ) -> None:
        gather = setup.experiment.gather
        self.rank, self._lost_peer = rank, gather.lost_peer
        self.drops_malformed = gather.drops_malformed
        self._round, self.host, self.expectations = round, host, expectations
        self._boxes: dict[Prefix, _Box] = {}
        # What most nodes never need is None until it is needed: there may be a hundred thousand mailboxes.
        self._longer: dict[str | int, dict[Prefix, _Box]] | None = None  # tags of several parts, by the first
        self._arrived = self._taken = 0  # the number of the next message; the number of those that have gone
        self.waiters: list[_Waiter] = []
        self.first: dict[int, int] = {}
        self.presence = host.presence
        self.decoder: Decoder | None = None
        self._malformed_of: dict[int, int] | None = None  # malformed messages by sender
        self._unread_of: frozenset[int] = NONE  # senders of which unread messages were dropped
        self._late: dict[tuple[int, Prefix], int] | None = None  # messages that will be dropped on arrival
        self._longest_late = 0  # maximum number of parts of their tags
        self.retired = False
        # Numbers of messages, and of values in those delivered since the last check, at which unread ones are dropped; and
        # the number of the first message with which there may be too many.
        self._most_unread, self._most_values = 2 * MAX_UNREAD, 2 * MAX_UNREAD_VALUES
        self._check_at = self._most_unread
        self._values = 0
        self._ages = _NO_AGES  # of the messages taken since the last row: count, sum, largest
        self._restored = False  # whether there may be messages that were counted before a restart

    # --- boxes

    @property
    def messages(self) -> list[Message]:
        """The messages not yet taken, oldest first."""
        numbered = chain.from_iterable(box.items() for box in self._boxes.values())
        return [message for _, message in sorted(numbered)]

    @messages.setter
    def messages(self, messages: Iterable[Message]) -> None:
        self._boxes, self._longer, self._taken = {}, None, self._arrived
        for message in messages:
            self._box(message.tag)[self._arrived] = message
            self._arrived += 1

    def _box(self, tag: Prefix) -> _Box:
        """The box of a tag, which is new unless there are messages in it."""
        if (box := self._boxes.get(tag)) is None:
            box = self._boxes[tag] = {}
            if len(tag) > 1:
                self._longer = self._longer or {}
                self._longer.setdefault(tag[0], {})[tag] = box
        return box

    def _remove_box(self, tag: Prefix) -> None:
        """Remove a box whose messages have all been taken."""
        del self._boxes[tag]
        if self._longer and len(tag) > 1:
            alike = self._longer[tag[0]]
            del alike[tag]
            if not alike:
                del self._longer[tag[0]]

    def _under(self, prefix: Prefix, *, exact: bool = False) -> Iterable[tuple[int, Message]]:
        """The messages whose tags begin with a prefix, or equal it if ``exact``, oldest first, with their numbers. The empty
        prefix leaves out private tags."""
        box = self._boxes.get(prefix)
        beyond = self._beyond(prefix) if not exact and (self._longer or not prefix) else None
        if not beyond:
            return () if box is None else box.items()
        boxes = beyond if box is None else [box, *beyond]
        return merge(*[box.items() for box in boxes])

    def _beyond(self, prefix: Prefix) -> list[_Box]:
        """The boxes of longer tags that begin with a prefix."""
        longer = (self._longer or {}).get(prefix[0], {}) if prefix else self._boxes
        length = len(prefix)
        boxes = [(tag, box) for tag, box in longer.items() if len(tag) > length and tag[:length] == prefix]
        return [box for tag, box in boxes if prefix or not is_private(tag)]

    def _remove(self, number: int, message: Message) -> None:
        box = self._boxes[message.tag]
        del box[number]
        self._taken += 1
        if not box:
            self._remove_box(message.tag)

    # --- delivery

    def deliver(self, message: Message) -> None:
        """Add a message and wake the tasks that wait for it, or drop it if it is late."""
        if (self._late or self.retired) and self._is_late(message):
            self.late((message,))
            return
        source, tag, number = message.source, message.tag, self._arrived
        box = self._boxes.get(tag)
        if box is None:
            box = self._box(tag)
        box[number] = message
        self._arrived = number + 1
        if message.values > 1 or number >= self._check_at:
            self._limit_unread(message)
        for waiter in self.waiters:  # inlined from fits(), to save a call per message
            sources = waiter.sources
            if (sources is None or source in sources) and tag[: waiter.length] == waiter.prefix:
                waiter.seen.add(source)
                if len(waiter.seen) >= waiter.wanted:
                    waiter.wake()

    def _is_late(self, message: Message) -> bool:
        # Lost messages stay expected, so there may be many: their prefixes are looked up, not searched.
        late = self._late or {}
        for length in range(min(len(message.tag), self._longest_late) + 1):
            key = message.source, message.tag[:length]
            if key in late:
                late[key] -= 1
                if not late[key]:
                    del late[key]
                return True
        return self.retired

    def late(self, messages: Collection[Message]) -> None:
        self.host.counters.messages_late += self._new(messages)

    def _new(self, messages: Collection[Message]) -> int:
        """The number of messages that the counters do not include yet."""
        return sum(not message.again for message in messages) if self._restored else len(messages)

    def retire(self) -> None:
        """Drop all messages in the mailbox and all later ones: no task will take any more."""
        self.retired = True
        self.late(self.messages)
        self.messages = []

    def _limit_unread(self, message: Message) -> None:
        """Count the values of a new message, and drop unread messages if there are too many."""
        if message.values > 1:
            self._values += message.values
        if self._arrived - self._taken > self._most_unread or self._values > self._most_values:
            self._drop_unread()
        self._check_at = self._taken + self._most_unread

    def _drop_unread(self) -> None:
        """Drop the oldest messages of each sender that has more than ``MAX_UNREAD``, or ``MAX_UNREAD_VALUES`` values in
        them: a peer may send messages that no task ever takes."""
        waiting, values = Counter[int](), Counter[int]()
        for message in self.messages:
            waiting[message.source] += 1
            values[message.source] += message.values
        kept = []
        for message in self.messages:
            source = message.source
            if waiting[source] > MAX_UNREAD or values[source] > MAX_UNREAD_VALUES:
                waiting[source] -= 1
                values[source] -= message.values
                self.host.counters.messages_refused += self._new((message,))
                if source not in self._unread_of:
                    self._unread_of |= {source}
                    over = f"over {MAX_UNREAD} are unread, or over {MAX_UNREAD_VALUES} values in them"
                    text = f"node {self.rank} drops messages of node {source}: {over}; the first is under tag"
                    self.host.event("unread", f"{text} {_shown(message.tag):.100}")
            else:
                kept.append(message)
        self.messages, self._values = kept, values.total()
        # So that a message costs little on average.
        self._most_unread = 2 * max(len(kept), MAX_UNREAD)
        self._most_values = 2 * max(self._values, MAX_UNREAD_VALUES)

    def forget_late(self, sources: Set[int]) -> None:
        """Stop expecting late messages from some sources, which were restarted."""
        if self._late:
            self._late = {key: count for key, count in self._late.items() if key[0] not in sources}

    def unread(self) -> str:
        """The messages that no task waits for, by tag, in words; empty if there are none."""
        sources: dict[Prefix, set[int]] = {}
        for message in self.messages:
            if not any(waiter.fits(message) for waiter in self.waiters):
                sources.setdefault(message.tag, set()).add(message.source)
        named = [
            f"tag {_shown(tag):.100} from ranks {sorted(sources[tag])[:MAX_RANKS]}"
            for tag in [*sources][:MAX_TAGS]
        ]
        others = f" and {len(sources) - MAX_TAGS} more tags" if len(sources) > MAX_TAGS else ""
        return ", ".join(named) + others

    def first_round(self, rank: int) -> int:
        """The first round in which this node waits again for a node that was away."""
        return self.first.get(rank, 0) if self.presence is None else self.presence.first(self.rank, rank)

    def wake_all(self) -> None:
        for waiter in self.waiters:
            waiter.wake()

    # --- malformed messages

    def refuse(self, source: int, tag: Prefix, reason: str) -> None:
        """Record a malformed message of a peer, which was dropped. MalformedMessage if that ends the run."""
        self._malformed_of = self._malformed_of or {}
        self._malformed_of[source] = self._malformed_of.get(source, 0) + 1
        text = (
            f"node {self.rank} refuses a message of node {source} under tag {_shown(tag):.100}: {reason:.300}"
        )
        if self._malformed_of[source] <= MAX_REPORTED:
            self.host.event("malformed", text)
        if not self.drops_malformed:
            raise MalformedMessage(f"{text}; with gather.malformed: drop, the run continues without it")

    def _admitted(self, messages: Iterable[Message]) -> list[Message]:
        """The decoded messages that the node expects. The others are refused."""
        admitted, fault_of = [], self.expectations.fault
        for message in messages:
            if (fault := fault_of(message)) is None:
                admitted.append(message)
            else:
                self.host.counters.messages_refused += self._new((message,))
                self.refuse(message.source, message.tag, fault)
        return admitted

    # --- taking messages

    async def receive(
        self,
        prefix: Prefix,
        source: int | None,
        timeout: float | None,
        keep_as: Prefix | None = None,
        *,
        exact: bool = False,
    ) -> Message:
        """Take the oldest matching message, and wait for one if there is none; see :meth:`Node.receive`. With
        ``exact``, its tag must equal the prefix."""
        deadline = None if timeout is None else self.host.now() + timeout
        while True:
            remaining = None if deadline is None else max(deadline - self.host.now(), 0.0)
            message = self._opened(await self.take(prefix, source, remaining, exact=exact))
            if self._admitted((message,)):
                if keep_as is None:
                    self._took((message,))
                else:
                    self.deliver(replace(message, tag=keep_as))
                return message

    async def take(
        self, prefix: Prefix, source: int | None, timeout: float | None, *, exact: bool = False
    ) -> Message:
        """Wait for a message as in :meth:`receive`, and return it as it arrived: not decoded, checked or
        counted."""
        sources = None if source is None else {source}
        with _Waiter(self, prefix, sources, timeout, exact=exact) as waiter:
            while (message := self._take_first(prefix, source, exact=exact)) is None:
                if waiter.expired:
                    raise TimeoutError(f"node {self.rank}: {waiter} did not arrive within {timeout} s")
                if source in self.host.lost:
                    raise PeerLost(f"node {self.rank} waits for {waiter}, which is dead")
                await waiter.woken()
            return message

    def _take_first(self, prefix: Prefix, source: int | None, *, exact: bool) -> Message | None:
        for number, message in self._under(prefix, exact=exact):
            if source is None or message.source == source:
                self._remove(number, message)
                return message
        return None

    def take_all(
        self, prefix: Prefix, source: int | None, only: Callable[[Message], bool] | None = None
    ) -> list[Message]:
        """Take every matching message, oldest first. ``only`` restricts the selection."""
        fitting = [*self._under(prefix)]
        if source is None and only is None:
            self._taken += len(fitting)
            for tag in {message.tag for _, message in fitting}:
                self._remove_box(tag)
        else:
            fitting = [
                (number, message)
                for number, message in fitting
                if (source is None or message.source == source) and (only is None or only(message))
            ]
            for number, message in fitting:
                self._remove(number, message)
        return [message for _, message in fitting]

    def drain(
        self,
        prefix: Prefix,
        source: int | None,
        *,
        newest: bool,
        only: Callable[[Message], bool] | None = None,
    ) -> list[Message]:
        """Take every matching message; see :meth:`Node.drain`. ``only`` restricts the selection."""
        # Superseded messages are decoded too, since a codec may need every message of a sender.
        taken = self._all_opened(self.take_all(prefix, source, only))
        if newest:
            last = {(message.source, message.tag): message for message in taken}
            newest_ones = [message for message in taken if last[message.source, message.tag] is message]
            self.host.counters.messages_superseded += self._new(taken) - self._new(newest_ones)
            taken = newest_ones
        taken = self._admitted(taken)
        self._took(taken)
        return taken

    async def gather(
        self, wanted: Set[int], prefix: Prefix, at_least: int | None, timeout: float | None
    ) -> Inbox:
        """Take one message from each of some ranks; see :meth:`Node.gather`."""
        enough = len(wanted) if at_least is None else min(at_least, len(wanted))
        away: Set[int] = NONE  # ranks not to wait for, even if they come back in the meantime
        malformed: Set[int] = NONE  # ranks whose message was dropped
        with _Waiter(self, prefix, wanted, timeout) as waiter:
            while malformed or (inbox := self._complete(wanted, prefix)) is None:
                taken = self._oldest(wanted - malformed if malformed else wanted, prefix)
                waiter.seen = set(taken)
                if self.presence is not None or self.host.lost or self.first:
                    away |= self._away(wanted - waiter.seen, waiter)
                not_awaited = away | malformed
                waiter.wanted = min(enough, len(wanted) - len(not_awaited))
                if not (waiter.expired or len(waiter.seen - not_awaited) >= waiter.wanted):
                    await waiter.woken()
                    continue
                for numbered in taken.values():
                    self._remove(*numbered)
                opened: Sequence[Message] = [message for _, message in taken.values()]
                if self.decoder is None:
                    _check_unchanged(opened)
                else:
                    opened = await self._decoded(opened)
                admitted = self._admitted(opened)
                if len(admitted) == len(opened):
                    return self._gathered(admitted, wanted, malformed, prefix)
                malformed |= taken.keys() - {message.source for message in admitted}
                self.messages = [*admitted, *self.messages]
            return inbox

    def _oldest(self, wanted: Set[int], prefix: Prefix) -> dict[int, tuple[int, Message]]:
        """The oldest message of each of some ranks under a tag, with its number."""
        oldest: dict[int, tuple[int, Message]] = {}
        for numbered in self._under(prefix):
            source = numbered[1].source
            if source in wanted and source not in oldest:
                oldest[source] = numbered
        return oldest

    def _complete(self, wanted: Set[int], prefix: Prefix) -> Inbox | None:
        """What :meth:`gather` returns if one message of each rank, and no other message, is there under exactly this
        tag, and nothing is wrong with any of them. This is the most frequent case; None in any other."""
        box = self._boxes.get(prefix)
        if box is None or len(box) != len(wanted) or self.decoder is not None:
            return None
        accepted = self.expectations.accepted(prefix)
        if accepted is None or not prefix or (self._longer and self._beyond(prefix)):
            return None
        payloads = {}
        messages = box.values()
        for message in messages:
            form = message.form
            if not (form and form[0] in accepted) and self.expectations.fault(message) is not None:
                return None
            for tensor, version in message.versions:
                if tensor._version != version:
                    return None
            payloads[message.source] = message.payload
        if payloads.keys() != wanted:
            return None
        self._remove_box(prefix)
        self._taken += len(box)
        self._took(messages)
        return Inbox(payloads, (), None if accepted else self._unknown(prefix), messages)

    def _gathered(
        self, messages: Sequence[Message], wanted: Set[int], malformed: Set[int], prefix: Prefix
    ) -> Inbox:
        """The inbox with some of the messages that were wanted. The others are late if they arrive."""
        payloads = {message.source: message.payload for message in messages}
        missing = wanted - payloads.keys()
        if missing:
            self._late = self._late or {}
            for rank in missing - malformed:
                self._late[rank, prefix] = self._late.get((rank, prefix), 0) + 1
            self._longest_late = max(self._longest_late, len(prefix))
            if self.presence is not None:
                self.presence.remember(self.rank, missing)
        self._took(messages)
        return Inbox(payloads, missing, self._unknown(prefix), messages)

    def _unknown(self, prefix: Prefix) -> Prefix | None:
        return None if self.expectations.know(prefix) else prefix

    def fitting(self, inbox: Mapping[int, Any], own: Any = None) -> Mapping[int, Any]:
        """The payloads that can be combined with a vector or model (None: the node's own). If the form of gathered ones was
        not known, they are checked only here, and the others are refused."""
        if not isinstance(inbox, Inbox) or inbox.unknown_tag is None:
            return inbox
        faults = {rank: self.expectations.misfit(payload, own) for rank, payload in inbox.items()}
        for rank, fault in faults.items():
            if fault is not None:
                self.host.counters.messages_taken -= 1
                self.host.counters.messages_refused += 1
                self.refuse(rank, inbox.unknown_tag, fault)
        return {rank: payload for rank, payload in inbox.items() if faults[rank] is None}

    async def _decoded(self, messages: Sequence[Message]) -> list[Message]:
        """Decode taken messages. The engine does it, for many nodes at once if it can. The messages are put
        back if the task is cancelled in the meantime."""
        assert self.decoder is not None
        step = _Decoding(self._opened, messages, self.decoder.node)
        try:
            decoded: list[Message] = await self.host.mix(step, read=False)
        except asyncio.CancelledError:
            self.messages = [*messages, *self.messages]
            raise
        return decoded

    def _all_opened(self, messages: list[Message]) -> list[Message]:
        if self.decoder is None:
            _check_unchanged(messages)
            return messages
        return [self._opened(message) for message in messages]

    def _opened(self, message: Message) -> Message:
        """A message, decoded or :class:`Undecodable`; RuntimeError if a vector in it was modified in place."""
        _check_unchanged((message,))
        if self.decoder is None:
            return message
        try:
            return self.decoder.decode(message)
        except ValueError as error:
            return replace(message, payload=Undecodable(str(error)), form=[])

    def _took(self, messages: Collection[Message]) -> None:
        if not messages:
            return
        now, count = self.host.now(), len(messages)
        sent = [message.sent_at for message in messages]
        largest = max(now - (first := min(sent)), 0.0)  # clocks of machines differ
        ages = (max(now - sent_at, 0.0) for sent_at in sent)
        total = count * largest if sent.count(first) == count else math.fsum(ages)  # both are rounded once
        self.host.counters.messages_taken += self._new(messages) if self._restored else count
        self.note_ages(count, total, largest)

    def note_ages(self, count: int, age: float, largest: float) -> None:
        """Note that the node has taken some messages: the sum of their ages and the largest, in seconds."""
        taken, total, oldest = self._ages
        self._ages = taken + count, total + age, max(oldest, largest)

    def take_ages(self) -> tuple[float | None, float | None]:
        """The mean and the largest age of the messages taken since the last call, in seconds since their
        senders queued them. None if no message was taken."""
        (count, total, largest), self._ages = self._ages, _NO_AGES
        return (total / count, largest) if count else (None, None)

    def _away(self, awaited: Set[int], waiter: _Waiter) -> Set[int]:
        """The ranks in ``awaited`` that send nothing in this round."""
        lost = awaited & self.host.lost
        if lost and self._lost_peer == "fail":
            raise PeerLost(f"node {self.rank} waits for {waiter}, of which {sorted(lost)} are dead")
        round = self._round()
        if self.first_round(self.rank) > round:
            return awaited
        away = {rank for rank in awaited if self.first_round(rank) > round}
        return away if self._lost_peer == "wait" else away | lost

    # --- checkpoints

    def saved(self) -> dict[str, Any]:
        """The values that :meth:`restore` takes in addition to the messages."""
        late = [[source, list(prefix), count] for (source, prefix), count in (self._late or {}).items()]
        return {"late": json.dumps(late), "ages": list(self._ages)}  # one value, however long the list is

    def overwrite(self, messages: Iterable[Message], sent: Mapping[int, int]) -> None:
        """Replace every message that a source sent before it was saved with the saved copy. ``sent`` has the
        number of these messages of each source. LookupError if the mailbox has other messages."""
        saved = {(message.source, message.number): message for message in messages}
        self.messages = [
            saved.pop((message.source, message.number))
            if message.number < sent.get(message.source, 0)
            else message
            for message in self.messages
        ]
        if saved:
            raise LookupError(f"node {self.rank}: messages {list(saved)} are missing")

    def restore(self, messages: Iterable[Message], saved: Mapping[str, Any], *, again: bool = False) -> None:
        """Continue with saved values. Messages that have arrived already come after the saved ones. ``again`` is
        as in :meth:`NodeRuntime.restore`."""
        if again:
            self._restored, messages = True, [replace(message, again=True) for message in messages]
        self.messages = [*messages, *self.messages]
        late = json.loads(saved["late"])
        self._late = {(source, tuple(prefix)): count for source, prefix, count in late}
        self._longest_late = max((len(prefix) for _, prefix in self._late), default=0)
        if self.presence is not None:
            self.presence.remember(self.rank, {source for source, _ in self._late})
        count, total, largest = saved["ages"]
        self._ages = int(count), total, largest


def _shown(tag: Prefix) -> str:
    return repr(tag[0] if len(tag) == 1 else tag)


def _check_unchanged(messages: Iterable[Message]) -> None:
    """RuntimeError if a vector in one of the messages was modified in place."""
    for message in messages:
        if not message.unchanged():
            raise RuntimeError(
                f"message {message.tag} from node {message.source} was modified in place by another of its"
                " receivers or its sender; payloads are immutable: compute a new vector"
            )
