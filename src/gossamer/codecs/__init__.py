"""Codecs: compressors of the models that nodes send each other, one file per family."""

from gossamer.codecs.codec import Chain, Codec, Identity
from gossamer.codecs.entropy import Entropy
from gossamer.codecs.low_rank import LowRank
from gossamer.codecs.quantize import QSGD, BFloat16, Float16, Quantize, Sign
from gossamer.codecs.sparsify import STC, RandomK, RoundRobin, Threshold, TopK
from gossamer.codecs.wavelet import JWINS, Wavelet

__all__ = ["JWINS", "QSGD", "STC", "BFloat16", "Chain", "Codec", "Entropy", "Float16", "Identity"]
__all__ += ["LowRank", "Quantize", "RandomK", "RoundRobin", "Sign", "Threshold", "TopK", "Wavelet"]
