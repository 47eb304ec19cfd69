"""Secure aggregation: a node learns the weighted sum of its neighbours' models, but no individual model.

``masking`` has the arithmetic and the cryptography, ``protocol`` the messages between nodes."""
