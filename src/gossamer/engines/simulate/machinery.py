"""What all nodes of a simulation share."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.engines.simulate.clock import Clock
from gossamer.engines.simulate.compute import Compute
from gossamer.engines.simulate.links import Links
from gossamer.engines.simulate.mixing import Mixing
from gossamer.learning.rows import Rows


@dataclass(frozen=True, eq=False)
class Machinery:
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
