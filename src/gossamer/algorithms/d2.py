"""D2: decentralized training over decentralized data.

Tang et al., "D2: Decentralized Training over Decentralized Data", ICML 2018, Algorithm 1. With the mixing matrix W,
symmetric and doubly stochastic, and the step size eta,

    x^1     = W (x^0 - eta g^0)
    x^{t+1} = W (2 x^t - x^{t-1} - eta g^t + eta g^{t-1})

which equals carrying a correction c, zero at first, from round to round:

    u_i = -eta g_i(x_i),   x'_i = sum_j W_ij (x_j + u_j + c_j),   c_i <- x'_i - x_i - u_i

The second form, with any optimizer's step instead of u, was checked against epfml/relaysgd (``algorithms.d2``). When the
learning rate changes, c is scaled with it, as in "D2+" of Lin et al. (2021; epfml/quasi-global-momentum). The condition on W
is as the paper is commonly cited.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gossamer.algorithms.algorithm import Algorithm
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.node import Node, Setting
from gossamer.topology import TopologySchedule

LOWEST = -1 / 3
"""D2 converges if every eigenvalue of W is above this."""


@register("algorithm", "d2")
class D2(Algorithm):
    """D2 (Tang et al., 2018): the optimum of the average loss, however the data differ from node to node; weights come
    from ``topology.weights``.

    A round is one local step. A neighbour that is missing from a round counts as the node itself, as for d-psgd.

    A static topology has to have a symmetric W with eigenvalues above -1/3; one that changes is not checked, because the
    analysis does not cover it.

    Args:
        exact_diffusion: mix with (W + I) / 2, which fits every W (Yuan et al., "Exact Diffusion", 2019).
    """

    exact_diffusion: bool = False

    def check(self, setting: Setting) -> None:
        topology = setting.topology
        if not topology.static:
            return
        from gossamer.topology.measures import smallest_eigenvalue, sparse_matrix  # they bring scipy

        W = sparse_matrix(topology, 0)
        if abs(W - W.T).max() > 1e-6:
            raise BadInput(
                "topology.weights: not symmetric, for d2; accepted: e.g. metropolis-hastings on an undirected graph"
            )
        lowest = smallest_eigenvalue(W)
        if lowest is not None and self._damped(lowest - 1) + 1 <= LOWEST + 1e-9:
            raise BadInput(
                f"topology: the smallest eigenvalue of its mixing matrix is {lowest:.6g}, for d2; accepted: above -1/3, or"
                " algorithm.exact_diffusion: true"
            )

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            before = node.parameters
            await node.train()
            step = node.parameters - before
            node.parameters = node.parameters + correction(node)
            node.broadcast(await node.neighbors(r, "out"), node.model, tag=r)
            inbox = await node.gather(await node.neighbors(r, "in"), tag=r)
            await node.mix(inbox, {j: self._damped(w) for j, w in node.mixing_weights(r).items()})
            del inbox  # frees this round's vectors before the next round's are computed
            node.state["correction"] = node.parameters - before - step
            node.state["lr"] = node.lr

    def _damped(self, weight: float) -> float:
        """A weight of W, or of (W + I) / 2 with ``exact_diffusion``."""
        return weight / 2 if self.exact_diffusion else weight


def check_doubly_stochastic(topology: TopologySchedule, algorithm: str) -> None:
    """Refuse a static topology whose mixing moves the nodes' average; one that changes is not checked."""
    if not topology.static:
        return
    from gossamer.topology.measures import sparse_matrix

    off = abs(sparse_matrix(topology, 0).sum(axis=0) - 1)
    if off.max() > 1e-6:
        raise BadInput(
            f"topology.weights: not doubly stochastic (column {off.argmax()} does not sum to 1), for {algorithm};"
            " accepted: e.g. metropolis-hastings on an undirected graph"
        )


def correction(node: Node) -> Float[Tensor, " params"]:
    """The correction that the last round left, scaled to this round's learning rate; zero in the first round."""
    if "correction" not in node.state:
        return torch.zeros_like(node.parameters)
    last = node.state["lr"]
    scaled: Tensor = node.state["correction"] * (node.lr / last if last else 0.0)
    return scaled
