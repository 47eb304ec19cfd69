"""References for every engine: the algorithms in NumPy and float64, for least squares with full batches.

Independent of gossamer. ``X`` has the models of all nodes, one per row [nodes, params]; a learner
holds one node's data and optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Edges = Sequence[tuple[int, int]]


class Learner:
    """One node's half mean squared residual, 1/(2n) ||A x - b||^2, and heavy-ball descent on it."""

    def __init__(self, A: Array, b: Array, lr: float, momentum: float = 0.0) -> None:
        self.A, self.b, self.lr, self.momentum = A, b, lr, momentum
        self.reset()

    @property
    def samples(self) -> int:
        return len(self.b)

    def reset(self) -> None:
        self.velocity: Array = np.zeros(self.A.shape[1])

    def gradient(self, x: Array) -> Array:
        return self.A.T @ (self.A @ x - self.b) / self.samples

    def descend(self, x: Array, steps: int) -> Array:
        for _ in range(steps):
            self.velocity = self.momentum * self.velocity + self.gradient(x)
            x = x - self.lr * self.velocity
        return x


def d_psgd(
    learners: Sequence[Learner],
    X: Array,
    rounds: int,
    W: Callable[[int], Array],
    steps: int = 1,
    overlap: bool = False,
    reset: bool = False,
) -> Array:
    """Steps then mixing, X <- W (X - eta G); overlapped, X <- W X - (displacement of the steps)."""
    for r in range(rounds):
        if reset:
            for learner in learners:
                learner.reset()
        stepped = np.stack([learner.descend(x, steps) for learner, x in zip(learners, X, strict=True)])
        X = W(r) @ X + (stepped - X) if overlap else W(r) @ stepped
    return X


def topology_aware(
    learners: Sequence[Learner],
    X: Array,
    rounds: int,
    C: Array,
    epochs: int = 1,
    mixing: Callable[[int], Iterable[int]] | None = None,
    pull: Callable[[Array, Array], Array] | None = None,
    sequential: bool = False,
) -> Array:
    """Epochs, then X <- C X for the nodes that mix in a round; in sequential order, with rows mixed earlier in the round.
    ``pull`` is the gradient of the proximal term at x for one anchor."""
    X = X.copy()
    for r in range(rounds):
        ranks = sorted(range(len(X)) if mixing is None else mixing(r))
        anchors, trained = X.copy(), X.copy()
        for i in ranks:
            near = [k for k in range(len(X)) if k != i and C[i, k]]
            for _ in range(epochs):
                gradient = learners[i].gradient(trained[i])
                if pull is not None:
                    gradient = gradient + sum(pull(trained[i], anchors[k]) for k in near)
                trained[i] = trained[i] - learners[i].lr * gradient
        mixed = trained.copy()
        for i in ranks:
            mixed[i] = C[i] @ (mixed if sequential else trained)
        X = mixed
    return X


def gossiped_centrality(
    learners: Sequence[Learner],
    X: Array,
    rounds: int,
    A: Array,
    measure: str,
    temperature: float | None = None,
    damping: float = 0.85,
) -> Array:
    """One step, then mixing by a score over the closed neighbourhood: the degree, or the PageRank after r iterations."""
    n, degrees = len(A), A.sum(1)
    p = np.full(n, 1 / n)
    for _ in range(rounds):
        stepped = np.stack([learner.descend(x, 1) for learner, x in zip(learners, X, strict=True)])
        scores = degrees / (n - 1) if measure == "degree" else p
        shares = scores if temperature is None else np.exp(scores / temperature)
        C = (A + np.eye(n)) * shares
        X = C / C.sum(1, keepdims=True) @ stepped
        p = (1 - damping) / n + damping * A @ (p / degrees)
    return X


def influence_corrected(
    learners: Sequence[Learner], X: Array, rounds: int, W: Array, steps: int = 1, most: float = 10.0
) -> Array:
    """X <- W (X + D (stepped - X)), with D the reciprocals of n times the diagonal of W^r."""
    power = np.eye(len(W))
    for _ in range(rounds):
        stepped = np.stack([learner.descend(x, steps) for learner, x in zip(learners, X, strict=True)])
        factors = np.minimum(1 / (len(W) * power.diagonal()), most)
        X = W @ (X + factors[:, None] * (stepped - X))
        power = W @ power
    return X


def epidemic(
    learners: Sequence[Learner],
    X: Array,
    rounds: int,
    sent: Callable[[int], Iterable[tuple[int, int]]],
    steps: int = 1,
) -> Array:
    """The plain mean of a node's model and those it received."""
    for r in range(rounds):
        stepped = [learner.descend(x, steps) for learner, x in zip(learners, X, strict=True)]
        received = [[x] for x in stepped]
        for source, to in sent(r):
            received[to].append(stepped[source])
        X = np.stack([np.mean(models, axis=0) for models in received])
    return X


def fedavg(
    learners: Sequence[Learner],
    X: Array,
    rounds: int,
    clients: Callable[[int], Iterable[int]],
    steps: int = 1,
    server: int = 0,
    by_data: bool = True,
) -> Array:
    """The clients' weighted mean becomes the server's model; a client keeps the model that it trained last."""
    X = X.copy()
    for r in range(rounds):
        chosen = list(clients(r))
        for k in chosen:
            learners[k].reset()
            X[k] = learners[k].descend(X[server], steps)
        weights = [learners[k].samples if by_data else 1 for k in chosen]
        X[server] = np.average(X[chosen], axis=0, weights=weights)
    return X


def alone(learners: Sequence[Learner], X: Array, rounds: int, ranks: Iterable[int], steps: int = 1) -> Array:
    """Some nodes train alone; the others keep their initial models."""
    X = X.copy()
    for rank in ranks:
        X[rank] = learners[rank].descend(X[rank], rounds * steps)
    return X


def all_reduce(learners: Sequence[Learner], X: Array, rounds: int, steps: int = 1) -> Array:
    """Every node gets the mean of all models."""
    n = len(learners)
    return d_psgd(learners, X, rounds, lambda r: np.full((n, n), 1 / n), steps)


def displacements(learners: Sequence[Learner], X: Array, steps: int = 1) -> Array:
    """The change of each node's model by its steps."""
    return np.stack([learner.descend(x, steps) - x for learner, x in zip(learners, X, strict=True)])


def d2(learners: Sequence[Learner], X: Array, rounds: int, W: Array) -> Array:
    """X^1 = W (X^0 + U^0), then X^{t+1} = W (2 X^t - X^{t-1} + U^t - U^{t-1}), with U = -eta G for plain descent."""
    U = displacements(learners, X)
    before, before_U, X = X, U, W @ (X + U)
    for _ in range(rounds - 1):
        U = displacements(learners, X)
        before, before_U, X = X, U, W @ (2 * X - before + U - before_U)
    return X


def gradient_tracking(
    learners: Sequence[Learner], X: Array, rounds: int, W: Array, step_first: bool = True
) -> Array:
    """Y^0 = G^0, Y^{t+1} = W Y^t + G^{t+1} - G^t; X <- W (X - eta Y), or W X - eta Y."""
    lr = learners[0].lr
    G = np.stack([learner.gradient(x) for learner, x in zip(learners, X, strict=True)])
    Y = G
    for _ in range(rounds):
        X = W @ (X - lr * Y) if step_first else W @ X - lr * Y
        before, G = G, np.stack([learner.gradient(x) for learner, x in zip(learners, X, strict=True)])
        Y = W @ Y + G - before
    return X


def quasi_global(
    learners: Sequence[Learner],
    X: Array,
    rounds: int,
    W: Array,
    beta: float = 0.9,
    mu: float = 0.9,
    nesterov: bool = False,
) -> Array:
    """M = beta Mhat + G; X <- W (X - eta M), or G + beta M for M; Mhat <- mu Mhat + (1 - mu) (movement / eta)."""
    lr = learners[0].lr
    Mhat = np.zeros_like(X)
    for _ in range(rounds):
        G = np.stack([learner.gradient(x) for learner, x in zip(learners, X, strict=True)])
        M = beta * Mhat + G
        before, X = X, W @ (X - lr * (G + beta * M if nesterov else M))
        Mhat = mu * Mhat + (1 - mu) * (before - X) / lr
    return X


def push_sum(
    learners: Sequence[Learner], Z: Array, rounds: int, P: Callable[[int], Array], steps: int = 1
) -> Array:
    """Numerators X and weights w, both multiplied by a column-stochastic P; gradients at Z = X / w."""
    X, w = Z, np.ones(len(Z))
    for r in range(rounds):
        for _ in range(steps):
            Z = X / w[:, None]
            X = X + displacements(learners, Z)
        X, w = P(r) @ X, P(r) @ w
    return X / w[:, None]


def relay_sum(
    learners: Sequence[Learner],
    X: Array,
    rounds: int,
    hops: Array,
    steps: int = 1,
    initial: bool = False,
) -> Array:
    """The mean of all models, each (hops - 1) rounds old; before the first round, a node's own or initial model stands in."""
    n, start, stepped = len(X), X, []
    for r in range(rounds):
        stepped.append(X + displacements(learners, X, steps))
        X = np.zeros_like(start)
        for i in range(n):
            for j in range(n):
                then = r if i == j else r - int(hops[i, j]) + 1
                missing = start[i] if initial else stepped[r][i]
                X[i] += (stepped[then][j] if then >= 0 else missing) / n
    return X


# --- mixing matrices ---


def adjacency(nodes: int, edges: Edges) -> Array:
    """A[i, j] = 1 where i and j are neighbours."""
    A = np.zeros((nodes, nodes))
    for i, j in edges:
        A[i, j] = A[j, i] = 1
    return A


def metropolis_hastings(A: Array) -> Array:
    """W_ij = 1 / (1 + max(d_i, d_j)) on edges."""
    degree = A.sum(axis=1)
    W: Array = A / (1 + np.maximum.outer(degree, degree))
    return W + np.diag(1 - W.sum(axis=1))


def uniform(A: Array) -> Array:
    """W_ij = 1 / (1 + d_i) on edges and the diagonal."""
    closed = A + np.eye(len(A))
    return closed / closed.sum(axis=1, keepdims=True)


def data_size(A: Array, samples: Sequence[int]) -> Array:
    """W_ij proportional to n_j on edges and the diagonal."""
    shares = (A + np.eye(len(A))) * np.asarray(samples)
    return shares / shares.sum(axis=1, keepdims=True)


def push_weights(nodes: int, arcs: Edges) -> Array:
    """P[j, i] = 1 / (1 + out-degree of i) where i sends to j, and on the diagonal: columns sum to 1."""
    P = np.eye(nodes)
    for i, j in arcs:
        P[j, i] = 1
    return P / P.sum(axis=0)


def hops(A: Array) -> Array:
    """The distance between every two nodes of a connected graph; 1 on the diagonal."""
    distance, reach = np.zeros_like(A), np.eye(len(A))
    while not reach.all():
        reach = np.minimum(reach @ (A + np.eye(len(A))), 1)
        distance += reach == 0
    return distance + (1 - np.eye(len(A)))


def one_peer_exponential(nodes: int, r: int) -> Array:
    """Half of a node's own model, half of the model of the node 2^(r mod log2 n) before it."""
    hop = 2 ** (r % round(np.log2(nodes)))
    return (np.eye(nodes) + np.roll(np.eye(nodes), hop, axis=0)) / 2
