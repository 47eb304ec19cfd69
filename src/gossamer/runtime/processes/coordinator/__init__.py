"""The coordinator starts the nodes of a run, watches over them, records their reports, and ends them."""
