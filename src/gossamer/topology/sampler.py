"""The interface of peer samplers, with which nodes find their neighbours themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gossamer.messages.tags import Message
from gossamer.topology.graph import Direction


class PeerSampler(ABC):
    """The peer sampler of one node."""

    @property
    @abstractmethod
    def view(self) -> tuple[int, ...]:
        """The ranks in the view that are not known to be dead, ascending."""

    @abstractmethod
    def neighbors(self, r: int, direction: Direction) -> tuple[int, ...]:
        """The neighbours for round ``r``, ascending. ValueError for a direction in which the node does not know them."""

    @abstractmethod
    def deliver(self, message: Message) -> None:
        """Queue a message from the sampler of another node."""

    @abstractmethod
    def round_ended(self, rounds: int) -> None:
        """Note that the node has completed this number of rounds."""

    @abstractmethod
    async def run(self) -> None:
        """Handle messages and start exchanges until cancelled."""
