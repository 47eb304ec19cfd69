"""Engines: what carries an experiment out. They share how a run is set up, recorded and reported, and nothing else."""
