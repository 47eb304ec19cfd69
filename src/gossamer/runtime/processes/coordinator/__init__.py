"""Who starts the nodes of a run on one machine, watches over them, and ends them."""
