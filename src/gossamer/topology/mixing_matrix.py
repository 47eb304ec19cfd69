"""The matrix with which an algorithm mixes, and its measures. Import this module locally: it imports scipy, which runs
do not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import networkx as nx
import numpy as np
from jaxtyping import Float
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import breadth_first_order  # type: ignore[import-untyped]
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh  # type: ignore[import-untyped]

from gossamer.randomness import generator
from gossamer.topology.graph import Direction, Graph
from gossamer.topology.mixing import BY_TOPOLOGY, Mixing, topology_row
from gossamer.topology.topology import TopologySchedule
from gossamer.topology.weights import Row

DENSE_NODES = 1000  # up to this many nodes, measures of W are computed from its full spectrum
Matrix: TypeAlias = Float[np.ndarray, "nodes nodes"] | csr_array


def sparse_matrix(schedule: TopologySchedule, round: int) -> csr_array:
    """The matrix W [nodes, nodes] of ``topology.weights`` in a round, float64: row = receiver; every row sums to 1."""
    return _matrix([topology_row(schedule, rank, round) for rank in range(schedule.nodes)])


def mixing_matrix(mixing: Mixing, schedule: TopologySchedule, round: int) -> csr_array | None:
    """The matrix [nodes, nodes] with which an algorithm mixes in a round, float64: row = receiver. Its rows sum to 1, or its
    columns for push-sum. None if no matrix describes the round."""
    if (row := mixing.row) is None:
        return None
    return _matrix([row(schedule, rank, round) for rank in range(schedule.nodes)])


def _matrix(rows: Sequence[Row]) -> csr_array:
    values = [value for row in rows for value in row.values()]
    columns = [column for row in rows for column in row]
    bounds = np.cumsum([0, *map(len, rows)])
    return csr_array((values, columns, bounds), shape=(len(rows), len(rows)))


def describe(schedule: TopologySchedule, round: int = 0, mixing: Mixing = BY_TOPOLOGY) -> dict[str, Any]:
    """All measures of the graph and the matrix with which an algorithm mixes in a round.

    Returns:
        ``nodes``, ``edges``, ``degree_min``, ``degree_mean``, ``degree_max`` (``in_degree_*`` and ``out_degree_*`` if
        directed), ``components`` (strongly connected if directed), ``diameter``, ``clustering`` (the average
        coefficient of Watts & Strogatz, 1998; directed: Fagiolo, 2007), ``spectral_gap``; ``influence``, a list; and
        ``effective_nodes``, 1 / sum_j pi_j^2 with pi the influence (Kish, 1965): the number of nodes if all
        have equal influence, 1 if one node has it all. The last two are None without a spectral gap, all three
        if no matrix describes the round. ``nodes`` alone for an algorithm that does not use the topology."""
    if mixing.links is None:
        return {"nodes": schedule.nodes}
    graph, W = mixing.links(schedule, round), mixing_matrix(mixing, schedule, round)
    gap = None if W is None else spectral_gap(W)
    pi = influence(W) if W is not None and gap else None
    return {
        "nodes": graph.nodes,
        "edges": graph.arcs if graph.directed else graph.arcs // 2,
        **_degrees(graph),
        "components": graph.components(),
        "diameter": diameter(graph),
        "clustering": float(nx.average_clustering(graph.to_networkx())),
        "spectral_gap": gap,
        "effective_nodes": None if pi is None else float(1 / (pi @ pi)),
        "influence": None if pi is None else pi.tolist(),
    }


def _degrees(graph: Graph) -> dict[str, float]:
    """The least, mean and largest degree, of each direction if the graph is directed."""
    directions: dict[str, Direction] = {"in_": "in", "out_": "out"} if graph.directed else {"": "both"}
    figures: dict[str, float] = {}
    for prefix, direction in directions.items():
        degrees = [graph.degree(rank, direction) for rank in range(graph.nodes)]
        measures = {"min": min(degrees), "mean": sum(degrees) / graph.nodes, "max": max(degrees)}
        figures |= {f"{prefix}degree_{name}": value for name, value in measures.items()}
    return figures


def diameter(graph: Graph) -> int | None:
    """The largest distance between two nodes, in hops; None if some node can't be reached from another."""
    adjacency = csr_array(nx.to_scipy_sparse_array(graph.to_networkx()))
    longest = 0
    for rank in range(graph.nodes):
        order, parents = breadth_first_order(adjacency, rank)
        if len(order) < graph.nodes:
            return None
        # The search ends at a farthest node; the length of the path back is the eccentricity.
        node, hops = order[-1], 0
        while node != rank:
            node, hops = parents[node], hops + 1
        longest = max(longest, hops)
    return longest


def spectral_gap(W: Matrix) -> float | None:
    """1 - abs(lambda_2) of a row- or column-stochastic matrix [nodes, nodes], the rate at which repeated mixing converges
    (of push-sum, if the columns sum to 1): 0 for a disconnected graph, 1 if one round averages exactly. None if the matrix is
    large and the iteration does not converge, because the second eigenvalue is close to others (a ring of many thousand
    nodes)."""
    if W.shape[0] == 1:
        return 1.0
    # W 1 = 1 (or 1^T W = 1^T), so subtracting 1 1^T / n moves that eigenvalue to 0 and keeps the others (Brauer, 1952).
    second = _eigenvalue(csr_array(W), "LM", shift=1.0)
    gap = None if second is None else 1 - abs(second)
    return 0.0 if gap is not None and abs(gap) <= 1e-12 else gap  # (a rounding error)


def influence(W: Matrix) -> Float[np.ndarray, " nodes"] | None:
    """The stationary influence pi [nodes] of the nodes for a row-stochastic W [nodes, nodes] with a spectral
    gap above 0: pi W = pi, with sum 1. None if W is large and the iteration does not converge.

    Under repeated mixing all nodes agree on sum_j pi_j x_j (DeGroot, "Reaching a consensus", 1974). It is the mean of the x_j
    if W is doubly stochastic. Push-sum over a column-stochastic W also converges to the mean."""
    nodes, W = W.shape[0], csr_array(W)
    uniform: Float[np.ndarray, " nodes"] = np.full(nodes, 1 / nodes)
    if np.allclose(W.sum(axis=0), 1, rtol=0, atol=1e-12):
        return uniform
    if nodes <= DENSE_NODES:
        # The only solution of (I - W^T + 1 1^T / n) pi = 1 / n, since the eigenvalue 1 of W is simple.
        return np.asarray(np.linalg.solve(np.eye(nodes) - W.T.toarray() + 1 / nodes, uniform))
    try:
        vector = eigs(W.T, k=1, v0=uniform)[1][:, 0].real
    except ArpackNoConvergence:
        return None
    return np.asarray(vector / vector.sum())


def smallest_eigenvalue(W: Matrix) -> float | None:
    """lambda_n of a symmetric mixing matrix [nodes, nodes]; if it is below 0, mixing overshoots. None if the matrix is large
    and the iteration does not converge."""
    value = _eigenvalue(csr_array(W), "SA", shift=0.0)
    return None if value is None else value.real


def _eigenvalue(W: csr_array, which: Literal["LM", "SA"], shift: float) -> complex | None:
    """The eigenvalue of W - shift 1 1^T / n with the largest modulus ("LM") or the smallest real part ("SA"); None if the
    iteration does not converge."""
    nodes, symmetric = W.shape[0], abs(W - W.T).max() <= 1e-12
    if nodes <= DENSE_NODES:
        dense = W.toarray() - shift / nodes
        values = np.linalg.eigvalsh(dense) if symmetric else np.linalg.eigvals(dense)
        return complex(values[np.argmax(abs(values)) if which == "LM" else np.argmin(values.real)])
    operator = LinearOperator(W.shape, matvec=lambda x: W @ x - shift * x.mean(), dtype=np.float64)
    start = generator(0, "eigenvalue").standard_normal(nodes)
    solve, options = eigsh if symmetric else eigs, {"k": 1, "v0": start, "ncv": 40, "maxiter": 500}
    try:
        return complex(solve(operator, which=which, return_eigenvectors=False, **options)[0])
    except ArpackNoConvergence:
        return None
