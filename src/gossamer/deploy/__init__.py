"""A run on several machines: its nodes, starting them, and putting together what they recorded."""
