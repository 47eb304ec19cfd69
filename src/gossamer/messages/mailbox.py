"""A node's mailbox: messages wait in it until a task takes them, never inside a future.

So a message is not lost when the task that waited for it is cancelled or times out at the same instant.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from gossamer.messages.tags import Message, matches

Prefix = tuple[str | int, ...]


class Inbox(dict[int, Any]):
    """What ``gather`` collected: rank -> payload in rank order.

    Attributes:
        missing: ranks that were asked for and are not here, ascending.
    """

    def __init__(self, payloads: dict[int, Any], missing: Iterable[int] = ()) -> None:
        super().__init__(sorted(payloads.items()))
        self.missing = tuple(sorted(missing))


class Ages:
    """How old messages were when their node took them, in seconds since their senders queued them."""

    __slots__ = ("_count", "_largest", "_total")

    def __init__(self) -> None:
        self._count, self._total, self._largest = 0, 0.0, -math.inf

    def add(self, now: float, messages: Iterable[Message]) -> None:
        """These messages are taken now."""
        ages = [now - message.sent_at for message in messages]
        if ages:
            self._count += len(ages)
            self._total += sum(ages)
            self._largest = max(self._largest, *ages)

    def take(self) -> tuple[float | None, float | None]:
        """The mean and the largest since the last call; None where no message was taken."""
        if not self._count:
            return None, None
        mean, largest = self._total / self._count, self._largest
        self._count, self._total, self._largest = 0, 0.0, -math.inf
        return mean, largest

    def saved(self) -> list[int | float]:
        """The state, for :meth:`restore`."""
        return [self._count, self._total, self._largest]

    def restore(self, saved: Iterable[int | float]) -> None:
        """Go on from what was saved."""
        count, self._total, self._largest = saved
        self._count = int(count)


class Waiter:
    """One task that waits for messages.

    Args:
        prefix: the messages' tag begins with it.
        sources: ranks it takes messages from; None is any.
        wanted: wake when this many of ``sources`` have a message here (1 for a plain receive).
        exact: the messages' tag is the prefix, with nothing after it.
    """

    __slots__ = ("_future", "expired", "length", "prefix", "seen", "sources", "wanted")

    def __init__(
        self, prefix: Prefix, sources: set[int] | None, wanted: int = 1, *, exact: bool = False
    ) -> None:
        self.prefix = prefix
        self.length = len(prefix) + exact  # parts of a tag that are compared
        self.sources = sources
        self.wanted = wanted
        self.seen: set[int] = set()
        self.expired = False
        self._future: asyncio.Future[None] | None = None

    def offer(self, message: Message) -> None:
        """Tell the waiter of a message that is now in the mailbox."""
        sources = self.sources
        if (sources is None or message.source in sources) and message.tag[: self.length] == self.prefix:
            self.seen.add(message.source)
            if len(self.seen) >= self.wanted:
                self.wake()

    def wake(self) -> None:
        """Let the waiting task look again."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def expire(self) -> None:
        """The time is up."""
        self.expired = True
        self.wake()

    async def wait(self) -> None:
        """Until woken."""
        self._future = asyncio.get_running_loop().create_future()
        await self._future

    def __str__(self) -> str:
        shown = self.prefix[0] if len(self.prefix) == 1 else self.prefix
        tag = f"tag {shown!r}" if self.prefix else "any message"
        waiting = sorted(self.sources - self.seen) if self.sources is not None else None
        return f"{tag} from {'anyone' if waiting is None else f'ranks {waiting}'}"


class Mailbox:
    """Messages in order of arrival, and the tasks that wait for them.

    Args:
        dropped: called with each message that no task will take: it is late for a tag that was already
            gathered, or its node has ended.

    Attributes:
        taken: how many messages were taken out so far.
    """

    __slots__ = ("_dropped", "_late", "_messages", "_retired", "_waiters", "taken")

    def __init__(self, dropped: Callable[[Message], None]) -> None:
        self._messages: list[Message] = []
        self._waiters: list[Waiter] = []
        self._late: Counter[tuple[int, Prefix]] = Counter()
        self._dropped = dropped
        self._retired = False
        self.taken = 0

    def __len__(self) -> int:
        return len(self._messages)

    def deliver(self, message: Message) -> None:
        """Put a message in, and wake the tasks that wait for it."""
        if (self._late or self._retired) and self._refuses(message):
            self._dropped(message)
            return
        self._messages.append(message)
        source, tag = message.source, message.tag
        for waiter in self._waiters:  # as in offer(); a call less for every message
            sources = waiter.sources
            if (sources is None or source in sources) and tag[: waiter.length] == waiter.prefix:
                waiter.seen.add(source)
                if len(waiter.seen) >= waiter.wanted:
                    waiter.wake()

    def unread(self) -> list[Message]:
        """The messages that are here, oldest first."""
        return list(self._messages)

    def late(self) -> list[tuple[int, Prefix, int]]:
        """The messages that will be dropped when they come: (source, prefix, how many)."""
        return [(source, prefix, count) for (source, prefix), count in self._late.items()]

    def restore(self, unread: Iterable[Message], late: Iterable[tuple[int, Prefix, int]]) -> None:
        """Hold what :meth:`unread` and :meth:`late` gave; for an empty mailbox."""
        self._messages = list(unread)
        for source, prefix, count in late:
            self._late[source, prefix] += count

    def _refuses(self, message: Message) -> bool:
        if self._retired:
            return True
        # Lost messages are expected forever, so there may be many: prefixes are looked up, not searched.
        source, tag = message.source, message.tag
        for key in ((source, tag[:length]) for length in range(len(tag) + 1)):
            if key in self._late:
                self._late[key] -= 1
                if not self._late[key]:
                    del self._late[key]
                return True
        return False

    def retire(self) -> None:
        """No task will take a message any more: drop all that are here, and all that come."""
        self._retired = True
        messages, self._messages = self._messages, []
        for message in messages:
            self._dropped(message)

    def close(self, prefix: Prefix, sources: Iterable[int]) -> None:
        """The next message of each source under this tag comes too late and will be dropped."""
        for source in sources:
            self._late[source, prefix] += 1

    def forget_late(self, source: int) -> None:
        """Expect no late messages of a source: it was restarted and will not send them."""
        self._late = Counter({key: count for key, count in self._late.items() if key[0] != source})

    def take_first(self, prefix: Prefix, sources: set[int] | None, *, exact: bool = False) -> Message | None:
        """Take out the oldest message that fits, if there is one."""
        length = len(prefix) + exact
        for index, message in enumerate(self._messages):
            if (sources is None or message.source in sources) and message.tag[:length] == prefix:
                self.taken += 1
                return self._messages.pop(index)
        return None

    def take_all(
        self, prefix: Prefix, sources: set[int] | None, only: Callable[[Message], bool] | None = None
    ) -> list[Message]:
        """Take out every message that fits (and is one of ``only`` these), oldest first."""
        taken: list[Message] = []
        left: list[Message] = []
        for message in self._messages:
            fits = (sources is None or message.source in sources) and matches(prefix, message.tag)
            (taken if fits and (only is None or only(message)) else left).append(message)
        self._messages = left
        self.taken += len(taken)
        return taken

    def take_one_each(self, prefix: Prefix, sources: set[int]) -> dict[int, Message]:
        """Take out the oldest message that fits of every source."""
        taken: dict[int, Message] = {}
        left = []
        length = len(prefix)
        for message in self._messages:
            source = message.source
            if source in sources and source not in taken and message.tag[:length] == prefix:
                taken[source] = message
            else:
                left.append(message)
        self._messages = left
        self.taken += len(taken)
        return taken

    def watch(self, waiter: Waiter) -> None:
        """Tell a waiter of the messages that are here and of later ones."""
        self._waiters.append(waiter)
        self.recount(waiter)

    def recount(self, waiter: Waiter) -> None:
        """Let a waiter count again, after another task took messages."""
        waiter.seen.clear()
        for message in self._messages:
            waiter.offer(message)

    def unwatch(self, waiter: Waiter) -> None:
        """Stop telling it."""
        self._waiters.remove(waiter)

    def wake_all(self) -> None:
        """Let every waiting task look again (a peer was lost)."""
        for waiter in self._waiters:
            waiter.wake()

    def waiting(self) -> list[str]:
        """The messages that each waiting task waits for, in words."""
        return [str(waiter) for waiter in self._waiters]
