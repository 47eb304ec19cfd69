"""Which messages were sent before which cut: told to peers when these have left, and heard from them (see cutting.py)."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.runtime.processes.transport.contact import Contact, Contacts
from gossamer.runtime.processes.transport.sending import OwnSending
from gossamer.runtime.processes.transport.wire import mark


class Marks:
    """The cuts of one node and its peers.

    Args:
        contacts: the peers.
        marked: called with a rank, the number of a cut and that of a message when all messages before that one, which the
            peer had sent before the cut, are delivered.
        told: called with the number of a cut and some ranks when all that was sent before it has left, and these peers,
            to whom anything was sent, were told of it.
    """

    def __init__(
        self,
        contacts: Contacts,
        marked: Callable[[int, int, int], None] | None,
        told: Callable[[int, list[int]], None] | None,
    ) -> None:
        self._contacts, self._marked, self._told = contacts, marked, told
        self._telling: dict[int, list[int]] = {}  # whom a cut concerns, while one of them isn't told yet

    def cut(self, number: int, rounds: int) -> None:
        """This node was cut when it had ended so many rounds."""
        concerned = [contact for contact in self._contacts.values() if contact.used and contact.lost is None]
        for contact in concerned:
            contact.marks.append((number, rounds))
        self._telling[number] = [contact.rank for contact in concerned]

    def tell(self, first: OwnSending | None) -> None:
        """Tell peers of cuts before which nothing is left to send.

        Args:
            first: the message that is the next to leave, or is leaving.
        """
        if not self._telling:
            return
        for contact in self._contacts.values():
            while contact.marks and contact.lost is None:
                number, rounds = contact.marks[0]
                link = contact.outgoing
                if link is None or (first is not None and first.round < rounds):
                    break
                if any(sending.round < rounds for sending in contact.waiting):
                    break
                since, message = contact.first
                link.write(mark(number, message if since >= rounds else contact.number))
                contact.marks.pop(0)
        for number, ranks in list(self._telling.items()):
            left = {rank for rank in ranks if self._contacts[rank].lost is None}
            if not any(number == owed for rank in left for owed, _ in self._contacts[rank].marks):
                del self._telling[number]
                if self._told is not None:
                    self._told(number, sorted(left))

    def hear(self, contact: Contact, cut: int, message: int) -> None:
        """A peer has made a cut, before this message; what has arrived of it may still be on its way through the network."""
        contact.marked.append((cut, message, contact.arrived))
        self.pass_on(contact)

    def pass_on(self, contact: Contact) -> None:
        """A peer's cuts before which all that it sent is delivered."""
        while contact.marked and contact.marked[0][2] <= contact.delivered:
            number, message, _ = contact.marked.popleft()
            if self._marked is not None:
                self._marked(contact.rank, number, message)
