"""Local steps of small models in compiled kernels; see :mod:`gossamer.learning.fused.trainer`."""
