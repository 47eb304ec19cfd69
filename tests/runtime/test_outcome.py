"""The description of how a run ended."""

from __future__ import annotations

from gossamer.runtime.outcome import describe_waits


def test_nodes_with_the_same_wait_are_named_together() -> None:
    waits = {rank: ["tag 'never' from anyone"] for rank in range(20)} | {20: ["tag 'm' from ranks [1]"]}
    named = ", ".join(map(str, range(16)))
    assert describe_waits(waits, {21: 3}) == (
        f"nodes {named} and 4 more for tag 'never' from anyone; node 20 for tag 'm' from ranks [1];"
        " node 21 returned after 3 rounds"
    )


def test_only_a_few_different_waits_are_described() -> None:
    waits = {rank: [f"tag 'm' from ranks [{rank + 1}]"] for rank in range(8)}
    first = "; ".join(f"node {rank} for tag 'm' from ranks [{rank + 1}]" for rank in range(5))
    assert describe_waits(waits, {}) == f"{first}; and 3 more waits"
