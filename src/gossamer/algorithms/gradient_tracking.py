"""Gradient tracking: each node descends along an estimate of the average gradient.

The estimate y follows the gradients, and mixing makes it their average:

    y_i^{t+1} = sum_j W_ij y_j^t + g_i^{t+1} - g_i^t,   y_i^0 = g_i^0

- dsgt: x_i^{t+1} = sum_j W_ij (x_j^t - eta y_j^t). Pu and Nedic, "Distributed Stochastic Gradient Tracking Methods",
  Mathematical Programming 2021; Algorithm GT-DSGD of others.
- diging: x_i^{t+1} = sum_j W_ij x_j^t - eta y_i^t. Nedic, Olshevsky and Shi, "Achieving Geometric Convergence for
  Distributed Optimization over Time-Varying Graphs", SIAM Journal on Optimization 2017, there DIGing.

With the local step u_i = -eta g_i and a correction c_i = -eta (y_i - g_i), zero at first, this is

    -eta y_i = u_i + c_i,   c_i <- sum_j W_ij (u_j + c_j) - u_i

with any optimizer's step in the place of u. dsgt was checked against epfml/relaysgd (``algorithms.gradient_tracking``),
diging against epfml/quasi-global-momentum (``decentralized_sgd_with_gradient_tracking.py``), not against the papers. Where
the learning rate changes, c is scaled with it.
"""

from __future__ import annotations

from typing import Literal

from gossamer.algorithms.algorithm import Algorithm
from gossamer.algorithms.d2 import check_doubly_stochastic, correction
from gossamer.config.registry import register
from gossamer.node import Node, Setting


@register("algorithm", "gradient-tracking")
class GradientTracking(Algorithm):
    """Gradient tracking: the optimum of the average loss, however the data differ from node to node, for twice the traffic
       of d-psgd; weights come from ``topology.weights``.

       A round is one local step and two messages to each neighbour, the model and the direction u + c. A message that is
       missing from a round counts as the node's own, as for d-psgd.
    W of a static topology has to be doubly
       stochastic.

       Args:
           variant: "dsgt" mixes what the step gives, "diging" mixes what the step starts from.
    """

    variant: Literal["dsgt", "diging"] = "dsgt"

    def check(self, setting: Setting) -> None:
        check_doubly_stochastic(setting.topology, self.name_of())

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            before = node.parameters
            await node.train()
            step = node.parameters - before
            direction = step + correction(node)
            node.parameters = before + direction if self.variant == "dsgt" else before
            to, peers = await node.neighbors(r, "out"), await node.neighbors(r, "in")
            weights = node.mixing_weights(r)
            node.broadcast(to, node.model, tag=("model", r))
            node.broadcast(to, direction, tag=("direction", r))
            await node.mix(await node.gather(peers, tag=("model", r)), weights)
            if self.variant == "diging":
                node.parameters = node.parameters + direction
            directions = await node.gather(peers, tag=("direction", r))
            node.state["correction"] = await node.combine(direction, directions, weights) - step
            node.state["lr"] = node.lr
            del directions  # frees this round's vectors before the next round's are computed
