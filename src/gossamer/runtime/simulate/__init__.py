"""The engine ``simulate``: all nodes in virtual time on one machine."""
