"""Proof of identity between nodes, workers and the coordinator, and limits for strangers."""
