"""The same rounds by other simulators, one function each. ``peers.py`` calls them in the environment of the peer, where
nothing else of this project can be imported. Each prints its figures from the second round on."""

# mypy: disable-error-code="import-not-found, misc, untyped-decorator"

from __future__ import annotations

import json
import sys
import time
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

NODES, DEGREE, SAMPLES, BATCH, LR = 100, 5, 160, 16, 0.01


class Marks:
    """When rounds ended, and how many training steps had been done."""

    def __init__(self) -> None:
        self.steps = 0
        self._ends: list[tuple[float, int]] = []

    def round_ended(self) -> None:
        self._ends.append((time.perf_counter(), self.steps))

    def report(self) -> None:
        (begun, before), *_, (ended, after) = self._ends
        node_rounds, seconds = NODES * (len(self._ends) - 1), ended - begun
        print()
        print(
            json.dumps({"node_rounds": node_rounds / seconds, "steps": (after - before) / seconds}),
            flush=True,
        )


@cache
def images() -> tuple[Tensor, Tensor]:
    """Random images of ten classes, as rows."""
    draw = torch.Generator().manual_seed(0)
    count = NODES * SAMPLES
    return torch.randn(count, 784, generator=draw), torch.randint(10, (count,), generator=draw)


def module(model: str) -> nn.Module:
    if model == "logistic":
        return nn.Linear(784, 10)
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def graph() -> Any:
    import networkx

    return networkx.random_regular_graph(DEGREE, NODES, seed=1)


def allow_torchvision() -> None:
    """Import torchvision, without its operators if they can't be loaded, as with a CPU build of torch. gossipy and fluke
    import it, but do not use it here."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        sys.modules["torchvision._meta_registrations"] = ModuleType("of no operators")


def gossipy(model: str, steps: int, rounds: int) -> None:
    """Every node merges the received models, trains, and sends its model to all neighbours with All2AllGossipSimulator, which
    the release on PyPI lacks, or else to one neighbour, which merges it and trains. A round is one tick of the clock."""
    allow_torchvision()
    import networkx
    from gossipy import core, node, simul
    from gossipy.data import DataDispatcher
    from gossipy.data.handler import ClassificationDataHandler
    from gossipy.model import TorchModel, handler

    marks, all_to_all = Marks(), hasattr(simul, "All2AllGossipSimulator")
    base: Any = handler.WeightedTMH if all_to_all else handler.TorchModelHandler

    class Net(TorchModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module(model)

        def forward(self, inputs: Tensor) -> Any:
            return self.layers(inputs)

        def init_weights(self) -> None:
            pass

    class Counting(base):
        def _update(self, data: Any) -> None:
            super()._update(data)
            marks.steps += steps

    class Receiver(simul.SimulationEventReceiver):
        def update_message(self, failed: bool, msg: Any = None) -> None:
            pass

        def update_end(self) -> None:
            pass

        def update_timestep(self, t: int) -> None:
            marks.round_ended()

    data = ClassificationDataHandler(*images(), test_size=0)
    dispatcher = DataDispatcher(data, n=NODES, eval_on_user=False, auto_assign=True)
    network = core.StaticP2PNetwork(NODES, topology=networkx.to_numpy_array(graph()))
    nodes = (node.All2AllGossipNode if all_to_all else node.GossipNode).generate(
        data_dispatcher=dispatcher,
        p2p_net=network,
        model_proto=Counting(
            net=Net(),
            optimizer=torch.optim.SGD,
            optimizer_params={"lr": LR},
            criterion=nn.CrossEntropyLoss(),
            local_epochs=0 if steps == 1 else 1,
            batch_size=BATCH,
            create_model_mode=core.CreateModelMode.MERGE_UPDATE,
        ),
        round_len=1,
        sync=True,
    )
    simulator = (simul.All2AllGossipSimulator if all_to_all else simul.GossipSimulator)(
        nodes=nodes, data_dispatcher=dispatcher, delta=1, protocol=core.AntiEntropyProtocol.PUSH
    )
    simulator.add_receiver(Receiver())
    simulator.init_nodes(seed=1)
    simulator.start(*([core.UniformMixing(network)] if all_to_all else []), n_rounds=rounds)
    marks.report()


def fluke(model: str, steps: int, rounds: int) -> None:
    """GossipDFL, policy aggregate: every node that has received models takes their mean and trains; every node sends its
    model to one neighbour."""
    allow_torchvision()
    from fluke import DDict
    from fluke.algorithms.decentralized import GossipDFL, Topology
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
    from fluke.utils import ClientObserver, FederationObserver

    marks = Marks()

    class Observer(ClientObserver, FederationObserver):
        def end_fit(self, *_: Any, **__: Any) -> None:
            marks.steps += steps

        def end_round(self, round: int) -> None:
            marks.round_ended()

    parts = zip(*(torch.split(part, SAMPLES) for part in images()), strict=True)
    options = {"num_labels": 10, "batch_size": BATCH, "shuffle": True, "single_batch": steps == 1}
    loaders = [FastDataLoader(*part, **options) for part in parts]
    client = {
        "batch_size": BATCH,
        "optimizer": {"name": "SGD", "lr": LR},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        "loss": "CrossEntropyLoss",
        "local_epochs": 1,
        "policy": "aggregate",
    }
    data = DummyDataContainer(loaders, [None] * NODES, None, 10)
    parameters = DDict(model=module(model), client=client)
    federation = GossipDFL(NODES, DataSplitter(data), parameters, Topology(graph()))
    federation.set_callbacks(Observer())
    federation.run(rounds)
    marks.report()


def flower(model: str, steps: int, rounds: int) -> None:
    """FedAvg with all clients in each round, one actor per core: every client takes the server's model, trains, and sends
    its own; the server takes the mean."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    marks, client, server = Marks(), ClientApp(), ServerApp()

    class Timed(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            assert len(replies) == NODES
            assert not any(reply.has_error() for reply in replies)
            result = super().aggregate_train(server_round, replies)
            marks.steps += steps * NODES
            marks.round_ended()
            return result

    @client.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        net = module(model)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        inputs, targets = (part[number * SAMPLES : (number + 1) * SAMPLES] for part in images())
        for batch in torch.randperm(SAMPLES).view(-1, BATCH)[:steps]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": SAMPLES}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_evaluate=0.0, min_train_nodes=NODES, min_available_nodes=NODES)
        strategy.start(grid, ArrayRecord(module(model).state_dict()), num_rounds=rounds)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=NODES, backend_config=resources)
    marks.report()
