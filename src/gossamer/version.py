"""The version of gossamer."""

__version__ = "0.1.0"
