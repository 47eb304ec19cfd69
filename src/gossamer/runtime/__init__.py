"""The engines, which run an experiment. They share only the setup, recording and reporting of a run."""
