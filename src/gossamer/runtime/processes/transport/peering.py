"""Which peers are there: dials them, loses them, finds them again, and listens to their heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from gossamer.runtime.processes.transport.contact import Contact, Contacts
from gossamer.runtime.processes.transport.endpoint import Endpoint
from gossamer.runtime.processes.transport.link import Outward
from gossamer.runtime.processes.transport.outbox import Outbox
from gossamer.runtime.processes.transport.outgoing import Outgoing
from gossamer.runtime.processes.transport.sending import State

DIAL_TIMEOUT_S = 10.0
"""Seconds that a peer has to answer a dial, before it is dialled again."""
REDIAL_FIRST_S = 0.05
"""Seconds between a dial that failed and the next one; doubled each time, up to the last."""
REDIAL_LAST_S = 5.0
PATIENCE_S = 0.5
"""Seconds that messages to others wait behind one whose receiver does not answer."""


@dataclass(frozen=True)
class Watch:
    """How peers are watched; see :class:`~gossamer.runtime.processes.transport.transport.Transport`."""

    heartbeat_s: float | None
    detection_s: float
    lost: Callable[[int, str], None]
    found: Callable[[int], None] | None
    status: Callable[[], bytes] | None
    heard: Callable[[int, bytes], None] | None
    relinked: Callable[[int], None] | None


class Peering:
    """What becomes of the contacts of a node.

    Args:
        end: this node's end of all connections.
        contacts: the peers.
        outbox: told who is reached, and who is lost.
        watch: how they are watched.
    """

    def __init__(self, end: Endpoint, contacts: Contacts, outbox: Outbox, watch: Watch) -> None:
        self.contacts = contacts
        self._end, self._outbox, self._watch = end, outbox, watch

    # --- dialling

    def want(self, contact: Contact) -> None:
        """There is a message for a peer."""
        contact.used = True
        if contact.outgoing is None:
            self._dial_on(contact)
            self._expect(contact)

    def keep(self, ranks: Iterable[int]) -> None:
        """Be connected with these peers."""
        kept = frozenset(ranks)
        for contact in self.contacts.values():
            contact.kept = contact.rank in kept
        for rank in kept:
            contact = self.contacts[rank]
            contact.kept = True
            if contact.outgoing is None:
                self._dial_on(contact)
                self._expect(contact)

    def _dial_on(self, contact: Contact) -> None:
        """Dial a peer until it answers, unless that is done already."""
        contact.hurry.set()
        if contact.dial is None and contact.outgoing is None and not self._end.closing:
            contact.dial = self._end.spawn(self._dial(contact))

    def _stop_dial(self, contact: Contact) -> None:
        if contact.dial is not None:
            contact.dial.cancel()
            contact.dial = None

    async def _dial(self, contact: Contact) -> None:
        delay_s = REDIAL_FIRST_S
        while contact.outgoing is None and contact.wanted:
            contact.hurry.clear()
            failure = await self._try(contact)
            if failure is None:
                continue
            contact.why, contact.failures = failure, contact.failures + 1
            self._park(contact)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await contact.hurry.wait()
            delay_s = min(2 * delay_s, REDIAL_LAST_S)
        contact.dial = None

    async def _try(self, contact: Contact) -> str | None:
        """Dial a peer once; gives why it failed, or None."""
        host, port = self._end.addresses[contact.rank][:2]
        contact.dialled += 1
        link = None
        timeout_s = min(DIAL_TIMEOUT_S, self._watch.detection_s)
        patience = self._end.loop.call_later(PATIENCE_S, self._park, contact)
        try:
            async with asyncio.timeout(timeout_s):
                _, link = await self._end.loop.create_connection(
                    lambda: Outgoing(self._end, self, contact), host, port
                )
                return await link.greeted
        except (
            OSError,
            ValueError,
        ) as error:  # TimeoutError is of the first kind, a name that is none of the other
            return str(error) or f"did not answer within {timeout_s:g} s"
        finally:
            patience.cancel()
            if link is not None and contact.outgoing is not link:
                link.close()

    def _park(self, contact: Contact) -> None:
        """A peer does not answer: messages to it step aside until it does."""
        if contact.outgoing is None:  # (it may have answered while this call was due)
            contact.down = True
            self._end.wake()

    def _expect(self, contact: Contact) -> None:
        """A peer is lost unless it is reached in time."""
        if contact.timer is None and contact.lost is None and not self._end.closing:
            contact.timer = self._end.loop.call_later(self._watch.detection_s, self._miss, contact)

    def _miss(self, contact: Contact) -> None:
        contact.timer = None
        if contact.dial is not None and not contact.failures:  # this process had no time to try
            contact.timer = self._end.loop.call_later(REDIAL_FIRST_S, self._miss, contact)
            return
        self._lose(contact, f"could not be reached for {self._watch.detection_s:g} s: {contact.why}")

    # --- what connections say

    def meet(self, contact: Contact, incarnation: int) -> None:
        """A peer has named its incarnation, on a new connection."""
        restarted = contact.incarnation is not None and incarnation > contact.incarnation
        if incarnation != contact.incarnation:
            contact.disconnect()
            self._outbox.forget(contact, State.AGAIN)
            contact.begin_life(incarnation)
        lost, contact.lost = contact.lost, None
        if (restarted or lost is not None) and self._watch.found is not None:
            self._watch.found(contact.rank)

    def came(self, contact: Contact) -> None:
        """A peer has dialled this node."""
        contact.silent = 0
        if contact.wanted:
            self._dial_on(contact)
        if contact.outgoing is not None or not contact.wanted:
            contact.reached()

    def reached(self, contact: Contact, link: Outward) -> None:
        """A peer has answered this node."""
        contact.outgoing, contact.down, contact.silent = link, False, 0
        contact.reached()
        self._outbox.resume(contact)
        if contact.broken:
            contact.broken = False
            if self._watch.relinked is not None:
                self._watch.relinked(contact.rank)

    def gone(self, contact: Contact, why: str) -> None:
        """A connection that a peer had dialled is gone; it will dial again if it can."""
        contact.why = why
        if contact.outgoing is None:
            self._expect(contact)

    def broke(self, contact: Contact, why: str) -> None:
        """A connection to a peer is gone."""
        contact.outgoing, contact.why, contact.broken = None, why, True
        if contact.lost is None:
            self._park(contact)
            self._expect(contact)
            self._dial_on(contact)

    def left(self, contact: Contact) -> None:
        """A peer has closed its connections on purpose."""
        self._lose(contact, "closed its connections", ended=True)

    def refuse(self, contact: Contact, reason: str) -> None:
        """A peer does what no peer does: there's nothing more to do with it, in this life of it."""
        self._end.guard.tell(f"rank {contact.rank}", f"{contact.rank} {reason}")
        self._lose(contact, f"refused: {reason}", ended=True)

    # --- losing and finding

    def _lose(self, contact: Contact, why: str, *, ended: bool = False) -> None:
        """A peer is gone: for good, or until it is reached again."""
        if self._end.closing:
            return
        if ended:
            contact.ended = max(contact.ended, contact.incarnation or 0)
            self._stop_dial(contact)
        known = contact.lost is not None
        self._drop(contact, why)
        if not ended and contact.wanted:
            self._dial_on(contact)
        if not known:
            self._watch.lost(contact.rank, why)

    def mark_lost(self, contact: Contact, why: str, incarnation: int | None) -> None:
        """Somebody else says that a peer is lost."""
        if incarnation is not None:
            contact.ended = max(contact.ended, incarnation)
            if contact.incarnation is not None and contact.ended < contact.incarnation:
                return  # its next incarnation is there already
            self._stop_dial(contact)
        if contact.lost is None:
            self._drop(contact, why)

    def mark_found(self, contact: Contact) -> None:
        """Somebody else says that a peer is there."""
        contact.lost, contact.ended = None, -1
        # (It may have answered already, while the task that dialled does not know yet.)
        contact.down = contact.dial is not None and contact.outgoing is None
        contact.hurry.set()

    def _drop(self, contact: Contact, why: str) -> None:
        contact.lost = contact.lost or why
        contact.reached()
        self._outbox.drop(contact)
        contact.disconnect()
        self._end.wake()

    # --- heartbeats

    async def watch(self, tick_s: float) -> None:
        """Say that this node is alive, and notice who doesn't.

        Silence is counted in ticks, not by the clock: a process that was itself stopped for a while blames nobody.
        """
        while True:
            await asyncio.sleep(tick_s)
            self.beat(always=True)
            for contact in [contact for contact in self.contacts.values() if contact.connected]:
                contact.silent += 1
                if contact.silent * tick_s > self._watch.detection_s:
                    self._lose(contact, f"silent for {self._watch.detection_s:g} s")

    def beat(self, *, always: bool = False) -> None:
        """Send heartbeats to whom the newest status was not sent yet; ``always``, to whom nothing else was."""
        status = b"" if self._watch.status is None else self._watch.status()
        for contact in self.contacts.values():
            for link in (contact.incoming, contact.outgoing):
                if link is not None and not link.closed:
                    link.beat(status, always=always)

    def heard(self, contact: Contact, status: bytes) -> None:
        """A heartbeat has come in."""
        if self._watch.heard is not None:
            self._watch.heard(contact.rank, status)
