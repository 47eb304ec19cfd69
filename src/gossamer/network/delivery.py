"""What becomes of one message on its path: how long it's under way, or that it's lost."""

from __future__ import annotations

from gossamer.network.network import Path
from gossamer.randomness import generator


def fate(path: Path | None, seed: int, source: int, to: int, k: int) -> float | None:
    """Seconds from a message's first bit's departure to its arrival; None if it's lost.

    What is drawn depends on the message's place among those of its pair of nodes and on nothing else, so that all
    engines lose the same messages. Nothing is drawn for a path without loss and jitter.

    Args:
        path: of the message; None where there is none. One that loses everything is none either.
        seed: the experiment's seed.
        source: its sender.
        to: its receiver.
        k: how many messages left from that sender to that receiver before.
    """
    if path is None or path.loss >= 1:
        return None
    if path.loss > 0 and generator(seed, "network/loss", source, to, k).random() < path.loss:
        return None
    if path.jitter_s == 0:
        return path.latency_s
    drawn = generator(seed, "network/jitter", source, to, k).normal(path.latency_s, path.jitter_s)
    return max(float(drawn), 0.0)
