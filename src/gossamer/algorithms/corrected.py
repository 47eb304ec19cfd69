"""Algorithms that correct for heterogeneous data: D2, gradient tracking, quasi-global momentum.

The formulas were checked against the published code, not against the papers: ``algorithms.d2`` and
``algorithms.gradient_tracking`` of epfml/relaysgd; ``decentralized_sgd_with_gradient_tracking.py`` and
``decentralized_qg_sgd.py`` of epfml/quasi-global-momentum.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gossamer.algorithms.algorithm import Algorithm
from gossamer.config.ranges import Decay
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.learning.optimizer import SGD
from gossamer.node import CheckContext, Node
from gossamer.topology import BY_TOPOLOGY, Mixing, TopologySchedule
from gossamer.topology.mixing import damped

LOWEST = -1 / 3  # D2 converges if every eigenvalue of W is above this


@register("algorithm", "d2")
class D2(Algorithm):
    """D2 (Tang et al., 2018): converges to the optimum of the average loss on heterogeneous data.

    Tang et al., "D2: Decentralized Training over Decentralized Data", ICML 2018, Algorithm 1, with W of ``topology.weights``,

        x^1     = W (x^0 - eta g^0)
        x^{t+1} = W (2 x^t - x^{t-1} - eta g^t + eta g^{t-1})

    in an equivalent form, with any optimizer's step u and a correction c, zero at first:

        v_i = x_i + u_i + c_i,   d_i = sum_j W_ij (v_j - v_i),   x_i <- v_i + d_i,   c_i <- c_i + d_i

    Since the differences are formed before they are summed, rounding enters c in proportion to them. In the form c_i
    <- x'_i - x_i - u_i it would be in proportion to x, and stay: float32 would then stop far from the optimum.

    When the learning rate changes, c is scaled with it ("D2+" of Lin et al., 2021). A round is one local
    step. The node's own model replaces that of a missing neighbour; the corrections then no longer sum to
    zero, which leaves a bias. A static W has to be symmetric with eigenvalues above -1/3.

    Args:
        exact_diffusion: mix with (W + I) / 2, which fits every W (Yuan et al., "Exact Diffusion", 2019)."""

    exact_diffusion: bool = False

    def mixing(self) -> Mixing:
        if not self.exact_diffusion:
            return BY_TOPOLOGY
        return Mixing(weights="(W + I) / 2, with W of topology.weights", row=damped(1 / 2))

    def check(self, context: CheckContext) -> None:
        topology = context.topology
        if not topology.static:
            return
        from gossamer.topology.mixing_matrix import smallest_eigenvalue, sparse_matrix  # imports scipy

        check_symmetric(topology, self.name_of())
        lowest = smallest_eigenvalue(sparse_matrix(topology, 0))
        if lowest is not None and self._damped(lowest - 1) + 1 <= LOWEST + 1e-9:
            problem = f"the smallest eigenvalue of its mixing matrix is {lowest:.6g}, for d2"
            raise BadInput(f"topology: {problem}; accepted: above -1/3, or algorithm.exact_diffusion: true")

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            c = correction(node)
            node.parameters = node.parameters + c
            node.broadcast(await node.neighbors(r, "out"), node.model, tag=r)
            inbox = await node.gather(await node.neighbors(r, "in"), tag=r)
            weights = {j: self._damped(w) for j, w in node.mixing_weights(r).items()}
            drift = await node.combine(node.model, inbox, weights, differences=True)
            del inbox  # frees this round's vectors before the next round's are computed
            node.model = node.model + drift
            node.mixed = node.model
            node.state["correction"] = c + drift.parameters
            node.state["lr"] = node.lr

    def _damped(self, weight: float) -> float:
        """A weight of W, or of (W + I) / 2 with ``exact_diffusion``."""
        return weight / 2 if self.exact_diffusion else weight


def check_symmetric(topology: TopologySchedule, algorithm: str) -> None:
    """Refuse a static topology with weights that differ between the ends of a link."""
    if not topology.static:
        return
    from gossamer.topology.mixing_matrix import sparse_matrix

    W = sparse_matrix(topology, 0)
    if abs(W - W.T).max() > 1e-6:
        raise BadInput(f"topology.weights: not symmetric, for {algorithm}; accepted: metropolis-hastings")


def check_doubly_stochastic(topology: TopologySchedule, algorithm: str) -> None:
    """Refuse a static topology whose mixing changes the nodes' average. A topology that changes over time is not
    checked."""
    if not topology.static:
        return
    from gossamer.topology.mixing_matrix import sparse_matrix

    errors = abs(sparse_matrix(topology, 0).sum(axis=0) - 1)
    if errors.max() > 1e-6:
        problem = f"not doubly stochastic (column {errors.argmax()} does not sum to 1), for {algorithm}"
        raise BadInput(f"topology.weights: {problem}; accepted: metropolis-hastings, for example")


def correction(node: Node) -> Float[Tensor, " params"]:
    """The correction from the last round, scaled to this round's learning rate; zero in the first round."""
    if "correction" not in node.state:
        return torch.zeros_like(node.parameters)
    last_lr = node.state["lr"]
    scaled: Tensor = node.state["correction"] * (node.lr / last_lr if last_lr else 0.0)
    return scaled


@register("algorithm", "gradient-tracking")
class GradientTracking(Algorithm):
    """Gradient tracking: converges to the optimum of the average loss on heterogeneous data, at twice the
    traffic of d-psgd.

    Nodes descend along an estimate of the average gradient, y_i <- sum_j W_ij y_j + g_i(new x_i) - g_i(old x_i):

        dsgt:    x_i <- sum_j W_ij (x_j - eta y_j)     Pu and Nedic, "Distributed Stochastic Gradient Tracking Methods", 2021
        diging:  x_i <- sum_j W_ij x_j - eta y_i       Nedic, Olshevsky and Shi, SIAM Journal on Optimization 2017

    With any optimizer's step u_i, and a correction c_i = -eta (y_i - g_i), zero at first and scaled with the learning rate:

        -eta y_i = u_i + c_i,   c_i <- sum_j W_ij (u_j + c_j) - u_i

    A round is one local step and two messages to each neighbour: the model and the direction u + c. The
    node's own values replace those of a missing message, which leaves a bias. W of ``topology.weights`` has
    to be doubly stochastic, which is checked if it is static.

    Args:
        variant: "dsgt" mixes the models after the step, "diging" those before it."""

    variant: Literal["dsgt", "diging"] = "dsgt"

    def ends_with_steps(self) -> bool:
        return self.variant == "diging"

    def unencoded(self, topology: TopologySchedule) -> str:
        return "its directions"

    def mixing(self) -> Mixing:
        return BY_TOPOLOGY

    def check(self, context: CheckContext) -> None:
        check_doubly_stochastic(context.topology, self.name_of())

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            before = node.parameters
            await node.train()
            step = node.parameters - before
            direction = step + correction(node)
            node.parameters = before + direction if self.variant == "dsgt" else before
            receivers, senders = await node.neighbors(r, "out"), await node.neighbors(r, "in")
            weights = node.mixing_weights(r)
            node.broadcast(receivers, node.model, tag=("model", r))
            node.broadcast(receivers, direction, tag=("direction", r), exact=True)
            await node.mix(await node.gather(senders, tag=("model", r)), weights)
            if self.variant == "diging":
                node.parameters = node.parameters + direction
            directions = await node.gather(senders, tag=("direction", r))
            node.state["correction"] = await node.combine(direction, directions, weights) - step
            node.state["lr"] = node.lr
            del directions  # frees this round's vectors before the next round's are computed


@register("algorithm", "qg-momentum")
class QuasiGlobalMomentum(Algorithm):
    """Quasi-global momentum (Lin et al., 2021): the momentum follows the mixed models, not the node's own gradients.

    Lin et al., "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data", ICML 2021,
    Algorithm 1 (QG-DSGDm), with W of ``topology.weights``, doubly stochastic where it is static:

        m_i      = beta mhat_i + g_i(x_i)
        x'_i     = sum_j W_ij (x_j - eta m_j)               Nesterov (QG-DSGDm-N): g_j + beta m_j in place of m_j
        mhat_i  <- mu mhat_i + (1 - mu) (x_i - x'_i) / eta   mhat_i = 0 at first

    A round is one local step. The node's own model replaces that of a missing neighbour. The optimizer has to
    be SGD without momentum.

    Args:
        beta: factor of the momentum in a step.
        mu: fraction of the old momentum that is kept when a round's displacement is added.
        nesterov: use Nesterov momentum."""

    mixes_models: ClassVar[bool] = True
    sums_suffice: ClassVar[bool] = True
    beta: Decay = 0.9
    mu: Decay = 0.9
    nesterov: bool = False

    def mixing(self) -> Mixing:
        return BY_TOPOLOGY

    def check(self, context: CheckContext) -> None:
        if not isinstance(context.optimizer, SGD):
            raise BadInput(f"optimizer.name: {context.optimizer.name_of()} for qg-momentum; accepted: sgd")
        if momentum := context.optimizer.momentum:
            raise BadInput(f"optimizer.momentum: {momentum:g} for qg-momentum; accepted: 0 (algorithm.beta)")
        check_doubly_stochastic(context.topology, self.name_of())

    async def run(self, node: Node) -> None:
        node.state.setdefault("momentum", torch.zeros_like(node.parameters))
        async for r in node.rounds():
            before, momentum = node.parameters, node.state["momentum"]
            await node.train()
            node.parameters = before + self._accelerated(node.parameters - before, node.lr * momentum)
            node.broadcast(await node.neighbors(r, "out"), node.model, tag=r)
            inbox = await node.gather(await node.neighbors(r, "in"), tag=r)
            await node.mix(inbox, node.mixing_weights(r))
            del inbox  # frees this round's vectors before the next round's are computed
            if node.lr:  # the displacement is divided by the rate; if that is zero, the momentum stays
                displacement = (before - node.parameters) / node.lr
                node.state["momentum"] = self.mu * momentum + (1 - self.mu) * displacement

    def _accelerated(self, step: Tensor, momentum: Tensor) -> Float[Tensor, " params"]:
        """-eta m, or -eta (g + beta m) with Nesterov momentum, from the plain step -eta g and eta mhat."""
        if self.nesterov:
            return (1 + self.beta) * step - self.beta**2 * momentum
        return step - self.beta * momentum
