from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gossamer.cores import cores
from gossamer.learning.thread_pool import ThreadPool


@pytest.fixture(params=[1, 2, 5])
def workers(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    shared = ThreadPool(request.param)
    yield shared
    shared.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 100), max_size=30))
def test_map_returns_results_in_the_order_of_the_items(workers: ThreadPool, items: list[int]) -> None:
    def square(item: int) -> int:
        time.sleep(0.0001 * (item % 3))
        return item * item

    assert workers.map(square, iter(items)) == [item * item for item in items]


def test_exception_is_raised_after_all_items_have_ended(workers: ThreadPool) -> None:
    running, peak = set(), 0
    lock = threading.Lock()

    def work(item: int) -> int:
        nonlocal peak
        with lock:
            running.add(item)
            peak = max(peak, len(running))
        try:
            time.sleep(0.002)
            if item == 7:
                raise KeyError("seven")
            return -item
        finally:
            with lock:
                running.discard(item)

    for _ in range(3):
        with pytest.raises(KeyError, match="seven"):
            workers.map(work, range(20))
        assert not running
        assert workers.map(work, range(7)) == [-item for item in range(7)]
    assert peak <= workers.count


def test_pool_works_after_every_item_has_failed(workers: ThreadPool) -> None:
    def fail(item: int) -> int:
        raise ValueError(item)

    for _ in range(3):
        with pytest.raises(ValueError, match=r"\d"):
            workers.map(fail, range(10))
    assert workers.map(abs, [-1, 2, -3]) == [1, 2, 3]


def test_each_thread_has_its_own_object(workers: ThreadPool) -> None:
    def make() -> list[int]:
        return []

    def note(item: int) -> tuple[int, int]:
        mine = workers.own(make)
        mine.append(item)
        time.sleep(0.001)
        assert mine[-1] == item  # no other thread writes this list
        return threading.get_ident(), id(mine)

    pairs = set(workers.map(note, range(30)))
    assert len({thread for thread, _ in pairs}) == len({made for _, made in pairs}) == len(pairs)
    assert len(pairs) <= workers.count


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("items", [1, 50])
def test_between_is_called_in_the_calling_thread_after_its_items(count: int, items: int) -> None:
    called: list[int] = []
    shared = ThreadPool(count, between=lambda: called.append(threading.get_ident()))
    threads = shared.map(lambda _: threading.get_ident(), range(items))
    mine = threading.get_ident()
    assert called == [mine] * threads.count(mine)
    assert count > 1 or len(called) == items
    shared.close()


def test_closed_pool_can_be_used_again(workers: ThreadPool) -> None:
    for _ in range(2):
        assert workers.map(abs, range(5)) == list(range(5))
        workers.close()
        workers.close()


def test_default_is_one_thread_per_core() -> None:
    assert ThreadPool().count == cores() >= 1
