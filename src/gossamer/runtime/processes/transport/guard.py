"""Limits what strangers may cost: open connections that have not proved a rank, and lines about them in the record."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable

STRANGERS = 32
"""Connections that may be open without having proved a rank, in addition to one for each node."""
LINES, ALL_LINES = 8, 64
"""Lines a minute about one address or rank, and about all of them."""
MINUTE_S = 60.0

Refuse = Callable[[str], None]


class Guard:
    """Counts strangers, and reports them by ``report`` without letting them fill the record; ``clock`` gives seconds."""

    def __init__(self, nodes: int, report: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._most = STRANGERS + nodes
        self._report, self._clock = report, clock
        self._here: dict[str, dict[Refuse, None]] = {}  # by address, the oldest first
        self._minute = -MINUTE_S
        self._lines: Counter[str] = Counter()  # of this minute
        self._left_out = 0

    def enter(self, host: str, refuse: Refuse) -> None:
        """A connection comes in and stays until :meth:`leave`. If it is one too many, the oldest connection from the address
        that has most is refused, so that silent strangers do not keep out honest nodes."""
        self._here.setdefault(network_of(host), {})[refuse] = None
        if sum(map(len, self._here.values())) > self._most:
            network = max(self._here, key=lambda each: len(self._here[each]))
            count, oldest = len(self._here[network]), next(iter(self._here[network]))
            del self._here[network][oldest]
            oldest(f"did not say who it is while others came ({count} from there)")

    def leave(self, host: str, refuse: Refuse) -> None:
        here = self._here.get(network := network_of(host), {})
        here.pop(refuse, None)
        if not here:
            self._here.pop(network, None)

    def tell(self, host: str, line: str) -> None:
        """Report a line about an address or a rank, unless there were too many; these are counted in the next one."""
        now, network = self._clock(), network_of(host)
        if now - self._minute >= MINUTE_S:
            self._minute = now
            self._lines.clear()
        if self._lines[network] >= LINES or self._lines.total() >= ALL_LINES:
            self._left_out += 1
            return
        self._lines[network] += 1
        more = f" (and {self._left_out} refusals that are not shown)" if self._left_out else ""
        self._left_out = 0
        self._report(line + more)

    def close(self) -> None:
        """No stranger comes any more: report how many lines were left out since the last one."""
        if self._left_out:
            self._report(f"{self._left_out} refusals more that are not shown")


def network_of(host: str) -> str:
    """The unit that is counted as one address: a host, its /64 network under IPv6, or "loopback"."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "loopback"
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
