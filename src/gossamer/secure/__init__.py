"""Secure aggregation: a node learns the weighted sum of its neighbours' models, and no single one.

``masking`` has the arithmetic and the cryptography, ``protocol`` what nodes send each other."""
