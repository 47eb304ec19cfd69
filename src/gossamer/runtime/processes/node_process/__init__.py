"""The process of one node."""
