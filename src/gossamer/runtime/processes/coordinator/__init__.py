"""Starts the nodes of a run, watches over them, records what they say, and ends them."""
