"""Networks: a description of the links between nodes. An engine applies it to messages.

A network is a set of links, each with a rate, and a path for each pair of nodes. Link r is the uplink of node
r, and link n + r its downlink; links from 2 n on connect them. Everything may change with time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float
from msgspec import Struct
from pydantic import Field

from gossamer.config.ranges import LARGEST_MBPS, Factor, Mbps, Seconds
from gossamer.config.registry import Component, register
from gossamer.errors import BadInput, GossamerError, cause
from gossamer.network.inputs import SomeNodes, for_each
from gossamer.randomness import generator

BYTES_PER_MEGABIT = 125_000
Probability = Annotated[float, Field(ge=0, lt=1)]


class Path(Struct, frozen=True):
    """The path of a message from one node to another.

    The latency of each message is drawn from a normal distribution; a negative one counts as 0. Messages between the same
    pair of nodes do not overtake each other. Both make the mean latency larger than ``latency_s``, if there is jitter. A
    lost message still takes its time on the sender's uplink."""

    # The links on the path, in order: the sender's uplink first, the receiver's downlink last.
    links: tuple[int, ...]
    latency_s: float = 0.0  # from the departure of the first bit to its arrival
    jitter_s: float = 0.0  # standard deviation of the latency, as drawn
    loss: float = 0.0  # probability that a message is lost
    rate: float = math.inf  # maximum rate of a transfer on this path, bytes per second

    def __post_init__(self) -> None:
        times = 0 <= self.latency_s < math.inf and 0 <= self.jitter_s < math.inf
        if not (times and 0 <= self.loss <= 1 and self.rate >= 0):
            accepted = "finite seconds from 0, a loss from 0 to 1, a rate from 0"
            raise BadInput(f"network: {self}; accepted: {accepted}")


def delivery(path: Path | None, seed: int, source: int, to: int, k: int) -> float | None:
    """Seconds from the departure of a message's first bit to its arrival. None if the message is lost or
    there is no path.

    The draw depends only on the number k of the message between these nodes, so both engines lose the same messages."""
    if path is None or path.loss >= 1:
        return None
    if path.loss > 0 and generator(seed, "network/loss", source, to, k).random() < path.loss:
        return None
    if path.jitter_s == 0:
        return path.latency_s
    drawn = generator(seed, "network/jitter", source, to, k).normal(path.latency_s, path.jitter_s)
    return max(float(drawn), 0.0)


class Conditions(ABC):
    """The state of a network between two changes. ``rates`` has the rate of every link in bytes per second
    (``math.inf`` is unlimited)."""

    rates: Float[np.ndarray, " links"]

    @abstractmethod
    def path(self, source: int, to: int) -> Path | None:
        """The path from one node to another; None if they are not connected, in which case the message is lost."""

    def common_latency(self) -> float | None:
        """The latency, if it is the same for all pairs and there is neither jitter nor loss; else None."""
        return None

    def loses(self, nodes: int) -> bool:
        """Whether a message may be lost. The default checks every path."""
        if self.common_latency() is not None:
            return False
        paths = (self.path(source, to) for source in range(nodes) for to in range(nodes) if source != to)
        return any(path is None or path.loss > 0 for path in paths)


class Network(Component):
    """The paths and links of messages between nodes."""

    # How transfers share links. "fifo": a node sends one message at a time over all peers, and receives one
    # at a time, first come, first served; an inner link limits the rate of a transfer but is not shared.
    # "in-turn": a node sends one message at a time over all peers; the transfers of all nodes share all links
    # max-min fairly, and a slow receiver slows down its senders. "fair": each pair of nodes has one
    # connection, on which messages are sent one after the other; all connections share all links max-min
    # fairly. "rtt-fair": the same, in proportion to the inverse of the round-trip time, as TCP does and
    # Kollaps assumes.
    sharing: Literal["fifo", "in-turn", "fair", "rtt-fair"] = "fifo"

    @abstractmethod
    def conditions(self, nodes: int, seed: int) -> Conditions:
        """The network at the start. BadInput for a field that does not fit the number of nodes."""

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        """The changes: pairs of seconds since the start, ascending, and the network from then on. May be infinite."""
        return islice(self._states(nodes, seed), 1, None)

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        """The network at the start and after each change, with ascending seconds from 0."""
        yield 0.0, self.conditions(nodes, seed)

    def loses(self, nodes: int, seed: int) -> bool:
        """Whether messages can be lost. The default is True for a network that changes, since a path may disappear."""
        return self.conditions(nodes, seed).loses(nodes) or next(self.changes(nodes, seed), None) is not None


def try_out(network: Network, nodes: int, seed: int) -> None:
    """Refuse a network that is not as its base class says: its state at the start, and two paths."""
    name, n = network.name_of(), nodes

    def refused(problem: str, accepted: str) -> BadInput:
        return BadInput(f"network: {name} {problem}; accepted: {accepted}")

    try:
        state = network.conditions(nodes, seed)
        pairs = {(0, n - 1), (n - 1, 0)} if n > 1 else set()
        paths = {pair: state.path(*pair) for pair in pairs} if isinstance(state, Conditions) else {}
    except GossamerError:
        raise
    except Exception as error:  # it may be the user's own
        raise refused(f"raised {cause(error)}", "a state of the network") from error
    if not isinstance(state, Conditions):
        raise refused(f"returns {type(state).__name__}", "gossamer.network.network.Conditions")
    rates = np.asarray(state.rates)
    if rates.ndim != 1 or len(rates) < 2 * n:
        raise refused(f"has rates of the shape {list(rates.shape)}", f"at least {2 * n}")
    check_conditions(state)
    for (source, to), path in paths.items():
        ends = None if path is None else path.links[:1] + path.links[-1:]
        if path is not None and (ends != (source, n + to) or max(path.links) >= len(rates)):
            accepted = f"links below {len(rates)}, from {source} to {n + to}"
            raise refused(f"has the path {path.links} from node {source} to {to}", accepted)


def check_conditions(conditions: Conditions, time_s: float = 0.0) -> None:
    """Refuse the state of a network whose time or rates are no numbers from 0 on."""
    if not 0 <= time_s < math.inf:
        raise BadInput(f"network: a change at {time_s} s; accepted: finite seconds, at least 0")
    if len(wrong := conditions.rates[~(conditions.rates >= 0)]):
        problem = f"{wrong[0]} bytes per second on a link from {time_s:g} s on"
        raise BadInput(f"network: {problem}; accepted: a number, at least 0")


def checked_changes(network: Network, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
    """The changes of a network, each of which is checked when it is taken."""
    for time_s, conditions in network.changes(nodes, seed):
        check_conditions(conditions, time_s)
        yield time_s, conditions


def states_of(
    base: Network, nodes: int, seed: int, times_s: Iterable[float]
) -> Iterator[tuple[float, Conditions]]:
    """The states of a network by time from 0, repeated at some additional times, for a network that modifies
    another one."""
    state = base.conditions(nodes, seed)
    extra: list[tuple[float, Conditions | None]] = [(time_s, None) for time_s in sorted({0.0, *times_s})]
    changes = merge(extra, base.changes(nodes, seed), key=itemgetter(0))
    for time_s, simultaneous in groupby(changes, key=itemgetter(0)):
        for _, changed in simultaneous:
            state = changed or state
        yield time_s, state


def bytes_per_second(mbps: float | None) -> float:
    """The rate in bytes per second; None is unlimited."""
    return math.inf if mbps is None else mbps * BYTES_PER_MEGABIT


@dataclass(frozen=True, eq=False)
class Access(Conditions):
    """Nodes with uplinks and downlinks, bytes per second, float64 [2 nodes], and the latency, jitter and loss
    of every pair. ``own`` has the latency, jitter and loss of each node's own link, float64 [3, nodes]; a
    message also crosses two of these."""

    rates: Float[np.ndarray, " links"]
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    own: Float[np.ndarray, "3 nodes"] | None = None

    def path(self, source: int, to: int) -> Path | None:
        links = source, len(self.rates) // 2 + to
        if self.own is None:
            return Path(links, self.latency_s, self.jitter_s, self.loss)
        (latency1_s, jitter1_s, loss1), (latency2_s, jitter2_s, loss2) = self.own[:, (source, to)].T.tolist()
        loss = loss1 + loss2 - loss1 * loss2
        return Path(
            links,
            self.latency_s + (latency1_s + latency2_s),
            math.hypot(self.jitter_s, jitter1_s, jitter2_s),
            self.loss + loss - self.loss * loss,
        )

    def common_latency(self) -> float | None:
        if self.jitter_s or self.loss:
            return None
        if self.own is None:
            return self.latency_s
        alike = not (np.ptp(self.own[0]) or self.own[1:].any())
        return self.latency_s + 2 * float(self.own[0, 0]) if alike else None

    def loses(self, nodes: int) -> bool:
        return self.loss > 0 or (self.own is not None and bool(self.own[2].any()))


@register("network", "uniform")
class UniformNetwork(Network):
    """The same latency between all pairs, the same bandwidth at all nodes.

    With jitter, the mean delay is larger than ``latency_s``: a negative delay counts as 0, and no message overtakes an
    earlier one of its pair (docs/networks.md has an example)."""

    latency_s: Seconds = 0.0  # one-way delay of every pair, seconds
    jitter_s: Seconds = 0.0  # standard deviation of the delay as drawn, seconds
    loss: Probability = 0.0  # probability that a message is lost
    # Uplink and downlink of every node, 10^6 bits per second; null is unlimited.
    bandwidth_mbps: Mbps | None = None
    uplink_mbps: Mbps | None = None  # the uplink, instead of bandwidth_mbps
    downlink_mbps: Mbps | None = None  # the downlink, instead of bandwidth_mbps

    def conditions(self, nodes: int, seed: int) -> Conditions:
        up = bytes_per_second(self.bandwidth_mbps if self.uplink_mbps is None else self.uplink_mbps)
        down = bytes_per_second(self.bandwidth_mbps if self.downlink_mbps is None else self.downlink_mbps)
        rates = np.repeat(np.array([up, down]), nodes)
        return Access(rates, self.latency_s, self.jitter_s, self.loss)


@register("network", "stragglers")
class Stragglers(UniformNetwork, SomeNodes):
    """Like ``uniform``, but the bandwidth of some nodes is divided by ``factor``, with a normal deviation.

    DivShare's published experiments use ``bandwidth_mbps: 60, factor: 5, spread_mbps: 1``, with the
    stragglers at the first ranks. The stragglers are chosen by ``count``, ``fraction`` or ``ranks``."""

    factor: Factor = 5.0  # divisor of a straggler's bandwidth
    # Standard deviation of a straggler's bandwidth, 10^6 bits per second. The deviation is drawn once per
    # node for uplink and downlink, and redrawn if the bandwidth would not be positive.
    spread_mbps: Annotated[float, Field(ge=0, le=LARGEST_MBPS)] = 0.0

    def conditions(self, nodes: int, seed: int) -> Conditions:
        links = super().conditions(nodes, seed).rates.reshape(2, nodes)  # uplinks and downlinks
        if not np.isfinite(links).any():
            raise BadInput("network.bandwidth_mbps: null; accepted: a bandwidth for network.factor to divide")
        for rank in self.chosen(nodes, seed, "network"):
            rng, mean = generator(seed, "network.spread", rank), links[:, rank] / self.factor
            links[:, rank] = 0
            while (links[:, rank] <= 0).any():
                links[:, rank] = mean + self.spread_mbps * BYTES_PER_MEGABIT * rng.standard_normal()
        return Access(links.ravel(), self.latency_s, self.jitter_s, self.loss)


@register("network", "star")
class StarNetwork(Network):
    """A link from each node to a centre. Each parameter is one value for all nodes, or a list with one value
    per node.

    A message crosses two links. Their latencies and the variances of their jitter add up, and each may lose
    the message. With jitter, the mean delay is larger than the latency, as with ``uniform``."""

    # Towards the centre, 10^6 bits per second; null is unlimited.
    uplink_mbps: Mbps | tuple[Mbps, ...] | None = None
    # From the centre; null is unlimited.
    downlink_mbps: Mbps | tuple[Mbps, ...] | None = None
    latency_s: Seconds | tuple[Seconds, ...] = 0.0  # delay of a link, seconds
    # Standard deviation of the delay as drawn, seconds.
    jitter_s: Seconds | tuple[Seconds, ...] = 0.0
    loss: Probability | tuple[Probability, ...] = 0.0  # probability that a link loses a message

    def conditions(self, nodes: int, seed: int) -> Conditions:
        fields = "uplink_mbps", "downlink_mbps", "latency_s", "jitter_s", "loss"
        values = (for_each(getattr(self, field), nodes, f"network.{field}") for field in fields)
        up, down, *own = values
        return Access(BYTES_PER_MEGABIT * np.concatenate([up, down]), own=np.array(own))
