"""Where the picture of a small graph shows its nodes."""

from __future__ import annotations

import networkx as nx
import numpy as np
from jaxtyping import Float

STEPS = 200
"""At most so many are taken."""
_CONVERGED = 1e-5


def by_distance(graph: nx.Graph) -> Float[np.ndarray, "nodes 2"]:  # type: ignore[type-arg]  # generic in its stubs only
    """CpuSlots whose distances follow those in the graph.

    What is made small is the energy of Kamada and Kawai (1989), the sum over pairs of ((place distance - hops) / hops)^2,
    by stress majorization (Gansner, Koren, North, 2004). (networkx leaves it to scipy, which takes longer to import than
    this to end, and ends higher.)

    Args:
        graph: a connected graph of at least two nodes.
    """
    hops = _hops(graph)
    weights = np.divide(1, hops**2, where=hops > 0, out=np.zeros_like(hops))
    inverse = np.linalg.pinv(np.diag(weights.sum(axis=1)) - weights)
    places, before = _first_places(hops), np.inf
    for _ in range(STEPS):
        distances = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1))
        energy = float((weights * (distances - hops) ** 2).sum())
        if energy >= before * (1 - _CONVERGED):
            break
        before = energy
        pulls = np.divide(weights * hops, distances, where=distances > 0, out=np.zeros_like(hops))
        places = inverse @ (np.diag(pulls.sum(axis=1)) - pulls) @ places
    return places


def _hops(graph: nx.Graph) -> Float[np.ndarray, "nodes nodes"]:  # type: ignore[type-arg]
    found = np.zeros((len(graph), len(graph)))
    number = {node: index for index, node in enumerate(graph)}
    for node, lengths in nx.all_pairs_shortest_path_length(graph):
        for other, length in lengths.items():
            found[number[node], number[other]] = length
    return found


def _first_places(hops: Float[np.ndarray, "nodes nodes"]) -> Float[np.ndarray, "nodes 2"]:
    """The plane in which the nodes lie farthest apart, if they lie in a space where hops are distances (Torgerson, 1952);
    and a little of a circle, which parts nodes that lie behind each other."""
    nodes = len(hops)
    centring = np.eye(nodes) - 1 / nodes
    values, vectors = np.linalg.eigh(centring @ hops**2 @ centring / -2)
    turns = np.linspace(0, 2 * np.pi, nodes, endpoint=False)
    circle = np.stack((np.cos(turns), np.sin(turns)), axis=1)
    plane = vectors[:, -2:] * np.sqrt(values[-2:].clip(0))
    places: Float[np.ndarray, "nodes 2"] = plane + 1e-3 * hops.max() * circle
    return places
