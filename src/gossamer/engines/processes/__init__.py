"""The engine ``processes``: one node, one process, over TCP."""
