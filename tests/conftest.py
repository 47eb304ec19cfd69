"""Known defects: tests that were written first and wait for their fix. Take a line out with the fix."""

from __future__ import annotations

import pytest

KNOWN = {
    "test_cancelling_in_flight_lets_the_next_one_go_at_once": "links: a cancelled transfer still holds the downlink",
    "test_a_cancelled_message_frees_the_receivers_downlink": "links: a cancelled transfer still holds the downlink",
    "test_a_message_that_waits_behind_a_cancelled_one_does_not_leave": "links: a cancelled transfer still holds the downlink",
    "test_a_cancelled_message_wakes_who_awaits_it": "links: an awaited send is not woken when it is cancelled after its arrival",
    "test_bytes_are_counted_as_they_leave": "links: bytes in flight round down by a nanosecond",
    "test_waiting_for_ever_is_found_under_evaluation_by_time_too": "clock: evaluation ticks hide a deadlock",
    "test_a_protocol_that_dies_of_a_cancelled_task": "node: an awaited task that was cancelled",
    "test_a_gather_waits_for_all_even_where": "gather: a message that another task takes",
    "test_auto_falls_back_to_sequential": "trainer auto: a model that vmap can't run",
    "test_a_spinner_is_named": "clock: the name of a spinner",
    "test_a_timer_of_asyncios_is_refused": "clock: asyncio timers",
    "test_time_changes_no_synchronous_algorithm": "all-reduce: alignment of received segments differs with time",
    "test_a_loss_that_raises_is_the_failure_of_the_node": "compute: a batch's failure is put on its first node",
    "test_an_error_of_one_node_is_not_blamed": "compute: a batch's failure is put on its first node",
    "test_cancelling_at_any_instant_counts": "links: bytes in flight round down by a nanosecond",
    "test_label_counts_are_those": "tests of the node's model, not yet looked at",
    "test_buffers_": "tests of the node's model, not yet looked at",
    "test_training_moves_the_buffers": "tests of the node's model, not yet looked at",
    "test_modifying_the_buffers": "tests of the node's model, not yet looked at",
    "test_the_layout_names": "tests of the node's model, not yet looked at",
    "test_a_whole_model_can_be_sent": "tests of the node's model, not yet looked at",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the known failures."""
    for item in items:
        for name, reason in KNOWN.items():
            if item.name.startswith(name):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
