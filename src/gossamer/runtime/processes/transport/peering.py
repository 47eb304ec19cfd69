"""Dialling the peers of a node, losing them, and finding them again."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from gossamer.runtime.processes.transport.connection import Outgoing
from gossamer.runtime.processes.transport.outbox import Outbox, State
from gossamer.runtime.processes.transport.peer import Endpoint, Peer

REDIAL_FIRST_S = 0.05
"""Seconds between a dial that failed and the next one; doubled each time, up to the last."""
REDIAL_LAST_S = 5.0


class Peering:
    """Keeps track of a node's peers; connections report to it."""

    def __init__(self, end: Endpoint, outbox: Outbox) -> None:
        self.end, self._outbox = end, outbox

    # --- dialling

    def want(self, peer: Peer) -> None:
        """There is a message for a peer."""
        peer.used = True
        if peer.outgoing is None:
            self._dial_on(peer)
            self._expect(peer)

    def _dial_on(self, peer: Peer) -> None:
        """Dial a peer until it answers, unless that is done already."""
        peer.hurry.set()
        if peer.dial is None and peer.outgoing is None and not self.end.closing:
            peer.dial = self.end.spawn(self._dial(peer))

    def _end_incarnation(self, peer: Peer, incarnation: int) -> None:
        """An incarnation of a peer is over: it is not listened to and not dialled any more."""
        peer.ended = max(peer.ended, incarnation)
        if peer.dial is not None:
            peer.dial.cancel()
            peer.dial = None

    async def _dial(self, peer: Peer) -> None:
        delay_s = REDIAL_FIRST_S
        while peer.outgoing is None:
            peer.hurry.clear()
            failure = await self._try(peer)
            if failure is None:
                continue
            peer.why, peer.failures = failure, peer.failures + 1
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):  # (wait_for() may swallow a cancellation)
                    await peer.hurry.wait()
            delay_s = min(2 * delay_s, REDIAL_LAST_S)
        peer.dial = None

    async def _try(self, peer: Peer) -> str | None:
        """Dial a peer once; returns why it failed, or None."""
        host, port = self.end.addresses[peer.rank]
        peer.dialled += 1
        link = None
        try:
            async with asyncio.timeout(self.end.detection_s):
                _, link = await self.end.loop.create_connection(lambda: Outgoing(self, peer), host, port)
                return await link.greeted
        except OSError as error:  # TimeoutError is one
            return str(error) or f"did not answer within {self.end.detection_s:g} s"
        finally:
            if link is not None and peer.outgoing is not link:
                link.close()

    def _expect(self, peer: Peer) -> None:
        """A peer is lost unless it is reached in time."""
        if peer.timer is None and peer.lost is None and not self.end.closing:
            peer.timer = self.end.loop.call_later(self.end.detection_s, self._miss, peer)

    def _miss(self, peer: Peer) -> None:
        peer.timer = None
        if peer.dial is not None and not peer.failures:  # this process had no time to try
            peer.timer = self.end.loop.call_later(REDIAL_FIRST_S, self._miss, peer)
            return
        self._lose(peer, f"could not be reached for {self.end.detection_s:g} s: {peer.why}")

    # --- reports of connections

    def meet(self, peer: Peer, incarnation: int) -> None:
        """A peer has named its incarnation, on a new connection."""
        restarted = peer.incarnation is not None and incarnation > peer.incarnation
        if incarnation != peer.incarnation:
            peer.disconnect()
            self._outbox.park(peer)
            self._outbox.forget(peer, State.AGAIN)
            peer.restarted(incarnation)
        lost, peer.lost = peer.lost, None
        if (restarted or lost is not None) and self.end.found is not None:
            self.end.found(peer.rank)

    def came(self, peer: Peer) -> None:
        """A peer has dialled this node."""
        peer.silent = 0
        if peer.used:
            self._dial_on(peer)
        if peer.outgoing is not None or not peer.used:
            peer.reached()

    def reached(self, peer: Peer, link: Outgoing) -> None:
        """A peer has answered this node."""
        peer.outgoing, peer.silent = link, 0
        peer.reached()
        self._outbox.resume(peer)
        if peer.broken:
            peer.broken = False
            if self.end.relinked is not None:
                self.end.relinked(peer.rank)

    def gone(self, peer: Peer, why: str) -> None:
        """A connection that a peer had dialled is gone; it will dial again if it can."""
        peer.why = why
        if peer.outgoing is None:
            self._expect(peer)

    def broke(self, peer: Peer, why: str) -> None:
        """A connection to a peer is gone."""
        peer.outgoing, peer.why, peer.broken = None, why, True
        self._outbox.park(peer)
        if peer.lost is None:
            self._expect(peer)
            self._dial_on(peer)

    def left(self, peer: Peer) -> None:
        """A peer has closed its connections on purpose."""
        self._lose(peer, "closed its connections", ended=True)

    def refuse(self, peer: Peer, reason: str) -> None:
        """A peer breaks the protocol: this incarnation of it is not listened to any more."""
        self.end.guard.tell(f"rank {peer.rank}", f"{peer.rank} {reason}")
        self._lose(peer, f"refused: {reason}", ended=True)

    # --- losing and finding

    def _lose(self, peer: Peer, why: str, *, ended: bool = False) -> None:
        """A peer is gone: for good, or until it is reached again."""
        if self.end.closing:
            return
        if ended:
            self._end_incarnation(peer, peer.incarnation or 0)
        known = peer.lost is not None
        self._drop(peer, why)
        if not ended and peer.used:
            self._dial_on(peer)
        if not known:
            self.end.lost(peer.rank, why)

    def mark_lost(self, peer: Peer, why: str, incarnation: int | None) -> None:
        """The coordinator says that a peer is lost."""
        if incarnation is not None:
            if peer.incarnation is not None and incarnation < peer.incarnation:
                return  # its next incarnation is there already
            self._end_incarnation(peer, incarnation)
        if peer.lost is None:
            self._drop(peer, why)

    def mark_found(self, peer: Peer) -> None:
        """The coordinator says that a peer is there."""
        peer.lost, peer.ended = None, -1
        peer.hurry.set()

    def _drop(self, peer: Peer, why: str) -> None:
        peer.lost = peer.lost or why
        peer.reached()
        self._outbox.drop(peer)
        peer.disconnect()
        self.end.wake()

    # --- heartbeats

    async def watch(self, tick_s: float) -> None:
        """Send heartbeats, and notice peers that send nothing.

        Silence is counted in ticks, not by the clock: a process that was itself stopped for a while blames no peer.
        """
        while True:
            await asyncio.sleep(tick_s)
            for connection in list(self.end.connections):
                if connection.peer is not None:
                    connection.beat()
            for peer in list(self.end.peers.values()):
                if peer.outgoing is None and peer.incoming is None:
                    continue
                peer.silent += 1
                if peer.silent * tick_s > self.end.detection_s:
                    self._lose(peer, f"silent for {self.end.detection_s:g} s")
