"""Reproductions: sweeps that say what a paper claims, and what came of it here."""

from gossamer.reproduce.claims import Check, Claim, Finding, Verdict, find
from gossamer.reproduce.reproduction import Reproduction, load, names, write_page

__all__ = ["Check", "Claim", "Finding", "Reproduction", "Verdict", "find", "load", "names", "write_page"]
