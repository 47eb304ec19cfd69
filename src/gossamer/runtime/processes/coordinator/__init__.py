"""The coordinator starts the nodes of a run, monitors them, records their reports, and ends them."""
