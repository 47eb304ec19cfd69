"""The totals of a run, from the reports of its nodes."""

from __future__ import annotations

import random

from gossamer.messages.tags import Traffic
from gossamer.runtime.processes.coordinator.reports import MAX_HISTORY, TrafficReports


def sent(nbytes: int) -> Traffic:
    return Traffic(bytes_sent=nbytes, messages_sent=nbytes // 10)


def test_total_is_the_sum_of_last_reports() -> None:
    reports = TrafficReports()
    reports.take(0, sent(100), 1.0, 50.0)
    reports.take(1, sent(30), 2.0, 51.0)
    reports.take(0, sent(150), 3.0, 52.0)
    assert reports.bytes_sent == 180
    assert [reports.bytes_by(time_s) for time_s in (0.5, 1.0, 1.9, 2.0, 3.0, 9.0)] == [
        0,
        100,
        100,
        130,
        180,
        180,
    ]
    assert reports.of(0) == sent(150)
    assert reports.of(7) == Traffic()
    assert sorted(traffic.bytes_sent for traffic in reports.all()) == [30, 150]


def test_process_that_ends_before_it_takes_part_takes_nothing_from_the_total() -> None:
    reports = TrafficReports()
    reports.take(0, sent(100), 1.0, 50.0)
    reports.take(1, sent(30), 2.0, 51.0)
    reports.ends(0, 52.0)
    reports.take(0, Traffic(messages_received=1), 3.0, 53.0)  # of the next process, which was not let in
    assert reports.bytes_sent == 130
    assert reports.of(0) == sent(100)
    assert sum(traffic.messages_sent for traffic in reports.all()) == 13


def test_report_that_comes_late_counts_from_its_own_instant() -> None:
    reports = TrafficReports()
    reports.take(0, sent(100), 10.0, 0.0)
    reports.take(1, sent(7), 9.0, 0.0)
    assert [reports.bytes_by(time_s) for time_s in (8.9, 9.0, 9.9, 10.0)] == [0, 7, 7, 107]


def test_restarted_process_continues_from_the_last_report() -> None:
    reports = TrafficReports()
    reports.take(0, sent(100), 1.0, 0.0)
    reports.ends(0, 0.5)
    assert reports.bytes_sent == 100
    reports.begins(0, 4.0)
    again = sent(20)
    again.add(reports.of(0))
    reports.take(0, again, 5.0, 4.2)
    assert reports.bytes_sent == 120


def test_age_is_that_of_the_oldest_last_report() -> None:
    reports = TrafficReports()
    for rank in range(3):
        reports.begins(rank, 0.0)
    reports.take(0, sent(1), 1.0, 1.0)
    reports.ends(0, 1.25)  # killed
    reports.take(1, sent(1), 5.0, 5.0)
    reports.ends(1, 5.1)
    reports.ends(1, 99.0)  # its process ends after its last report
    assert reports.age_s == 0.25
    reports.ends(2, 6.0)  # it has never reported
    assert reports.age_s == 6.0


def test_long_history_is_thinned_and_stays_bounded() -> None:
    reports, rng, truth, total = TrafficReports(), random.Random(1), [], 0
    for k in range(5 * MAX_HISTORY):
        total += rng.randrange(1000)
        reports.take(0, sent(total), 0.01 * k, 0.0)
        truth.append((0.01 * k, total))
    assert len(reports._times_s) <= MAX_HISTORY
    assert reports.bytes_by(truth[-1][0]) == total
    for time_s, known in rng.sample(truth, 200):
        assert reports.bytes_by(time_s) <= known
    for time_s, known in truth[-MAX_HISTORY // 4 :]:  # recent instants are kept
        assert reports.bytes_by(time_s) == known
