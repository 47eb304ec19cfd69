"""Codecs: compressors of the models that nodes send each other, one file per family."""

from gossamer.codecs.codec import Chain, Codec, Coder, Identity
from gossamer.codecs.quantize import Float16, Quantize
from gossamer.codecs.sparsify import RandomK, TopK

__all__ = ["Chain", "Codec", "Coder", "Float16", "Identity", "Quantize", "RandomK", "TopK"]
