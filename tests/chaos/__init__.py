"""Faults as experiments, in the manner of Jepsen and FoundationDB: seeded schedules, two engines, invariants (docs/faults.md)."""
