"""Algorithms: the protocol one node follows, one file per family."""

from gossamer.algorithms.ad_psgd import ADPSGD as ADPSGD
from gossamer.algorithms.algorithm import Algorithm as Algorithm
from gossamer.algorithms.compressed import BEER as BEER
from gossamer.algorithms.compressed import ChocoSGD as ChocoSGD
from gossamer.algorithms.compressed import DeepSqueeze as DeepSqueeze
from gossamer.algorithms.corrected import D2 as D2
from gossamer.algorithms.corrected import GradientTracking as GradientTracking
from gossamer.algorithms.corrected import QuasiGlobalMomentum as QuasiGlobalMomentum
from gossamer.algorithms.d_psgd import DPSGD as DPSGD
from gossamer.algorithms.divshare import ADPSGDArtifact as ADPSGDArtifact
from gossamer.algorithms.divshare import DivShare as DivShare
from gossamer.algorithms.divshare import SwiftArtifact as SwiftArtifact
from gossamer.algorithms.epidemic import EpidemicLocal as EpidemicLocal
from gossamer.algorithms.epidemic import EpidemicOracle as EpidemicOracle
from gossamer.algorithms.fedavg import FedAvg as FedAvg
from gossamer.algorithms.gossip_learning import GossipLearning as GossipLearning
from gossamer.algorithms.reference import AllReduce as AllReduce
from gossamer.algorithms.reference import Centralized as Centralized
from gossamer.algorithms.reference import Local as Local
from gossamer.algorithms.relay_sum import RelaySum as RelaySum
from gossamer.algorithms.sgp import SGP as SGP
from gossamer.algorithms.swift import Swift as Swift
