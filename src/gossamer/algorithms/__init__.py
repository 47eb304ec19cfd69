"""Algorithms: the protocol one node follows, one file per family."""

from gossamer.algorithms.algorithm import Algorithm, shared_model
from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.d_psgd import DPSGD
from gossamer.algorithms.epidemic import EpidemicLocal, EpidemicOracle
from gossamer.algorithms.fedavg import FedAvg
from gossamer.algorithms.reference import Centralized, Local

__all__ = [
    "DPSGD",
    "Algorithm",
    "AllReduce",
    "Centralized",
    "EpidemicLocal",
    "EpidemicOracle",
    "FedAvg",
    "Local",
    "shared_model",
]
