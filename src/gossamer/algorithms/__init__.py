"""Algorithms: the protocol one node follows, one file per family."""

from gossamer.algorithms.ad_psgd import ADPSGD
from gossamer.algorithms.algorithm import Algorithm
from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.d2 import D2
from gossamer.algorithms.d_psgd import DPSGD
from gossamer.algorithms.divshare import DivShare
from gossamer.algorithms.divshare_baselines import ADPSGDArtifact, SwiftArtifact
from gossamer.algorithms.epidemic import EpidemicLocal, EpidemicOracle
from gossamer.algorithms.fedavg import FedAvg
from gossamer.algorithms.gossip_learning import GossipLearning
from gossamer.algorithms.gradient_tracking import GradientTracking
from gossamer.algorithms.quasi_global import QuasiGlobalMomentum
from gossamer.algorithms.reference import Centralized, Local
from gossamer.algorithms.relay_sum import RelaySum
from gossamer.algorithms.sgp import SGP
from gossamer.algorithms.swift import Swift

__all__ = [
    "ADPSGD",
    "D2",
    "DPSGD",
    "SGP",
    "ADPSGDArtifact",
    "Algorithm",
    "AllReduce",
    "Centralized",
    "DivShare",
    "EpidemicLocal",
    "EpidemicOracle",
    "FedAvg",
    "GossipLearning",
    "GradientTracking",
    "Local",
    "QuasiGlobalMomentum",
    "RelaySum",
    "Swift",
    "SwiftArtifact",
]
