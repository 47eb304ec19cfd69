"""The whole mixing matrix of a round, for measures and tests; a run only asks for rows."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from gossamer.topology.schedule import TopologySchedule


def matrix(schedule: TopologySchedule, round: int) -> Float[np.ndarray, "nodes nodes"]:
    """The mixing matrix W of a round: row = receiver; every row sums to 1."""
    dense: Float[np.ndarray, "nodes nodes"] = sparse_matrix(schedule, round).toarray()
    return dense


def sparse_matrix(schedule: TopologySchedule, round: int) -> csr_array:
    """The same matrix [nodes, nodes], float64, as compressed sparse rows."""
    values: list[float] = []
    columns: list[int] = []
    bounds = [0]
    for rank in range(schedule.nodes):
        row = schedule.mixing_weights(rank, round)
        columns += [rank, *row]
        values += [1.0 - sum(row.values()), *row.values()]
        bounds.append(len(columns))
    return csr_array((values, columns, bounds), shape=(schedule.nodes, schedule.nodes))
