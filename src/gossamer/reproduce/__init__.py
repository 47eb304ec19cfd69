"""Reproductions: sweeps with a paper's claims, and the results obtained here."""

from gossamer.reproduce.claims import Claim, Condition, Finding, Verdict, find
from gossamer.reproduce.reproduction import Reproduction, load, names, write_page

__all__ = ["Claim", "Condition", "Finding", "Reproduction", "Verdict", "find", "load", "names", "write_page"]
