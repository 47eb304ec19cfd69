"""Recorded runs: the run folder, the recorder, summaries over nodes, plots and the report."""
