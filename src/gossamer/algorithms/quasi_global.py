"""Quasi-global momentum: the momentum follows the mixed models, not the node's own gradients.

Lin et al., "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data", ICML 2021, Algorithm 1
(QG-DSGDm). With the mixing matrix W and the step size eta,

    m_i      = beta mhat_i + g_i(x_i)
    x'_i     = sum_j W_ij (x_j - eta m_j)               Nesterov (QG-DSGDm-N): g_j + beta m_j in the place of m_j
    mhat_i  <- mu mhat_i + (1 - mu) (x_i - x'_i) / eta   mhat_i = 0 at first

Checked against the authors' code (epfml/quasi-global-momentum, ``decentralized_qg_sgd.py``, with a slow buffer of one
local step, whose ``factor`` is 1 - mu), not against the paper's text.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gossamer.algorithms.algorithm import Algorithm
from gossamer.algorithms.d2 import check_doubly_stochastic
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.learning.optimizer import SGD
from gossamer.node import Node, Setting


@register("algorithm", "qg-momentum")
class QuasiGlobalMomentum(Algorithm):
    """Quasi-global momentum (Lin et al., 2021); weights come from ``topology.weights``.

    A round is one local step, and its messages are those of d-psgd. A neighbour that is missing from a round counts as the
    node itself. Weight decay, clipping and schedule are the optimizer's, which has to be SGD without momentum. W of a static
    topology has to be doubly stochastic.

    Args:
        beta: factor of the momentum in a step.
        mu: share of the old momentum that remains when a round's movement is added.
        nesterov: look ahead along the momentum.
    """

    mixes_models: ClassVar[bool] = True

    beta: float = Field(default=0.9, ge=0, lt=1)
    mu: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False

    def check(self, setting: Setting) -> None:
        if not isinstance(setting.optimizer, SGD):
            raise BadInput(f"optimizer.name: {setting.optimizer.name_of()} for qg-momentum; accepted: sgd")
        if momentum := setting.optimizer.momentum:
            raise BadInput(
                f"optimizer.momentum: {momentum:g} for qg-momentum (see algorithm.beta); accepted: 0"
            )
        check_doubly_stochastic(setting.topology, self.name_of())

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
            if node.lr:  # at a rate of zero there is no movement to learn from
                moved = (before - node.parameters) / node.lr
                node.state["momentum"] = self.mu * momentum + (1 - self.mu) * moved

    def _accelerated(
        self, step: Float[Tensor, " params"], momentum: Float[Tensor, " params"]
    ) -> Float[Tensor, " params"]:
        """-eta m, or -eta (g + beta m), of the plain step -eta g and eta mhat."""
        if self.nesterov:
            return (1 + self.beta) * step - self.beta**2 * momentum
        return step - self.beta * momentum
