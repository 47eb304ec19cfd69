"""What all nodes of a simulation share."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.learning.rows import Rows
from gossamer.runtime.simulate.clock import Clock
from gossamer.runtime.simulate.compute import Compute
from gossamer.runtime.simulate.links import Links
from gossamer.runtime.simulate.mixing import Mixing


@dataclass(frozen=True, eq=False)
class SimContext:
    """The parts of a simulator that nodes reach through their hosts.

    Args:
        clock: virtual time.
        rows: where vectors are kept.
        links: carry messages.
        compute: carries out computations.
        mixing: carries out mixing steps.
    """

    clock: Clock
    rows: Rows
    links: Links
    compute: Compute
    mixing: Mixing
