"""Algorithms: the protocol one node follows, one file per family."""

from gossamer.algorithms.ad_psgd import ADPSGD
from gossamer.algorithms.algorithm import Algorithm
from gossamer.algorithms.compressed import BEER, ChocoSGD, DeepSqueeze
from gossamer.algorithms.corrected import D2, GradientTracking, QuasiGlobalMomentum
from gossamer.algorithms.d_psgd import DPSGD
from gossamer.algorithms.divshare import ADPSGDArtifact, DivShare, SwiftArtifact
from gossamer.algorithms.epidemic import EpidemicLocal, EpidemicOracle
from gossamer.algorithms.gossip_learning import GossipLearning
from gossamer.algorithms.gossip_on_receipt import GossipLearningOnReceipt
from gossamer.algorithms.gossiped_centrality import GossipedCentrality
from gossamer.algorithms.influence_corrected import InfluenceCorrected
from gossamer.algorithms.powergossip import PowerGossip
from gossamer.algorithms.reference import AllReduce, Centralized, FedAvg, Local
from gossamer.algorithms.relay_sum import RelaySum
from gossamer.algorithms.sgp import SGP
from gossamer.algorithms.swift import Swift
from gossamer.algorithms.topology_aware import TopologyAware

__all__ = ["ADPSGD", "BEER", "D2", "DPSGD", "ADPSGDArtifact", "Algorithm", "AllReduce", "Centralized"]
__all__ += ["ChocoSGD", "DeepSqueeze", "DivShare", "EpidemicLocal", "EpidemicOracle", "FedAvg"]
__all__ += [
    "SGP",
    "GossipLearning",
    "GossipLearningOnReceipt",
    "GossipedCentrality",
    "GradientTracking",
    "InfluenceCorrected",
    "Local",
]
__all__ += ["PowerGossip", "QuasiGlobalMomentum", "RelaySum", "Swift", "SwiftArtifact", "TopologyAware"]
