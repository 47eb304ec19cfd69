"""What strangers may cost: so many connections that have not said who they are, and so many lines about them."""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

STRANGERS = 128
"""Connections that may be here without having said who they are, beside one a node."""
STRANGERS_EACH = 16
"""The same from one address, besides one for each node at that address."""
LINES = 8
"""Lines a minute about one address, or one rank."""
ALL_LINES = 64
"""Lines a minute about all of them."""
MINUTE_S = 60.0
_REMEMBERED = 1024


@runtime_checkable
class Stranger(Protocol):
    """A connection that has not said who it is."""

    def refuse(self, reason: str) -> None:
        """Close it."""


class Guard:
    """Counts strangers, and reports them without letting them fill the record.

    Args:
        hosts: where the nodes are, one entry a node.
        report: called with a line.
        clock: seconds.
    """

    def __init__(
        self, hosts: Iterable[str], report: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        given = list(hosts)
        self._at = Counter(map(place_of, given))
        self._most = STRANGERS + self._at.total()
        self.names = {host for host in given if _address(host) is None}
        """Hosts that go by a name; connections come from addresses (see :meth:`locate`)."""
        self._report, self._ration = report, Ration(clock, "refusals")
        self._here: dict[str, OrderedDict[Stranger, None]] = {}  # by address, the first that came first

    def locate(self, name: str, addresses: Iterable[str]) -> None:
        """A host that goes by a name has these addresses: its nodes have their places at each of them."""
        self.names.discard(name)
        nodes = self._at.pop(name)
        self._at.update(dict.fromkeys(map(place_of, addresses), nodes))

    def has_nodes(self, host: str) -> bool:
        """Whether there are nodes at an address."""
        return self._at[place_of(host)] > 0

    def enter(self, host: str, stranger: Stranger) -> None:
        """A connection comes in, to stay until :meth:`leave`. Where that makes too many, the one from its address, or else
        from the address with most, that has been there longest is refused: those who hold their places for nothing must not
        keep out who would say at once who it is."""
        place = place_of(host)
        self._here.setdefault(place, OrderedDict())[stranger] = None
        if len(self._here[place]) > STRANGERS_EACH + self._at[place]:
            self._refuse_oldest(place)
        elif sum(map(len, self._here.values())) > self._most:
            self._refuse_oldest(max(self._here, key=lambda each: len(self._here[each])))

    def leave(self, host: str, stranger: Stranger) -> None:
        """A connection has said who it is, or is gone."""
        here = self._here.get(place := place_of(host), OrderedDict())
        here.pop(stranger, None)
        if not here:
            self._here.pop(place, None)

    def _refuse_oldest(self, place: str) -> None:
        count, oldest = len(self._here[place]), next(iter(self._here[place]))
        del self._here[place][oldest]
        oldest.refuse(f"did not say who it is while others came ({count} from there)")

    def tell(self, host: str, line: str) -> None:
        """Report a line about an address or a rank, unless there were too many; these are counted with the next one."""
        more = self._ration.take(place_of(host))
        if more is not None:
            self._report(line + more)

    def close(self) -> None:
        """Nobody comes any more: report how many lines were left out since the last one."""
        if self._ration.left_out:
            self._report(f"{self._ration.left_out} refusals more that are not shown")


class Ration:
    """How many lines may be written: some a minute about each, and some about all.

    Args:
        clock: seconds.
        what: what those are that are left out, in words.

    Attributes:
        left_out: how many there were since the last line.
    """

    def __init__(self, clock: Callable[[], float], what: str) -> None:
        self._clock, self._what = clock, what
        # By whom they are about: the minute's start, and lines asked for.
        self._lines: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._minute, self._written, self.left_out = -MINUTE_S, 0, 0

    def take(self, who: str) -> str | None:
        """What to write behind a line about somebody: how many were left out before it; None leaves it out, too."""
        now = self._clock()
        if now - self._minute >= MINUTE_S:
            self._minute, self._written = now, 0
        since, count = self._lines.pop(who, (now, 0))
        if now - since >= MINUTE_S:
            since, count = now, 0
        self._lines[who] = since, count + 1
        if len(self._lines) > _REMEMBERED:
            self._lines.popitem(last=False)
        if count >= LINES or self._written >= ALL_LINES:
            self.left_out += 1
            return None
        self._written += 1
        more = f" (and {self.left_out} {self._what} that are not shown)" if self.left_out else ""
        self.left_out = 0
        return more


def place_of(host: str) -> str:
    """What counts as one address: a host, or the network of 64 bits that one host has under IPv6."""
    address = _address(host)
    if address is None:
        return host
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return "loopback" if address.is_loopback else str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
