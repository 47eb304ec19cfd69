from __future__ import annotations

import gc
import random
import sys
import threading
import time
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.learning.rows import ALIGNMENT, Rows


@given(st.integers(1, 300), st.integers(1, 10))
def test_rows_are_aligned_and_do_not_overlap(length: int, count: int) -> None:
    rows = Rows(length)
    taken = [rows.fresh().fill_(float(number)) for number in range(count)]
    for number, row in enumerate(taken):
        assert row.shape == (length,)
        assert row.data_ptr() % ALIGNMENT == 0
        assert torch.equal(row, torch.full((length,), float(number)))
    assert rows.peak == count
    assert rows.rows >= count


def test_unreferenced_row_is_free_again() -> None:
    rows = Rows(5)
    for _ in range(50):
        rows.fresh()
    assert rows.rows == 1
    assert rows.peak == 1


@pytest.mark.parametrize("hold", [lambda row: row[3:5], lambda row: row.view(2, 5), lambda row: row.detach()])
def test_slice_or_view_keeps_its_row(hold: object) -> None:
    rows = Rows(10)
    row = rows.fresh().fill_(7.0)
    part = hold(row)  # type: ignore[operator]
    del row
    gc.collect()
    rows.fresh().fill_(1.0)
    assert rows.rows == 2
    assert part.unique().tolist() == [7.0]
    assert rows.owns(part)
    del part
    rows.fresh(), rows.fresh()
    assert rows.rows == 2


def test_numpy_view_keeps_its_row() -> None:
    rows = Rows(4)
    array = rows.fresh().fill_(3.0).numpy()
    rows.fresh().fill_(1.0)
    assert array.tolist() == [3.0] * 4


def test_store_copies_vectors_but_not_rows() -> None:
    rows = Rows(3)
    vector = torch.tensor([1.0, 2.0, 3.0])
    stored = rows.store(vector)
    vector.zero_()
    assert stored.tolist() == [1.0, 2.0, 3.0]
    assert rows.store(stored) is stored
    assert rows.owns(stored)
    assert not rows.owns(vector)
    assert not rows.owns(torch.empty(0))


def test_row_of_another_store_is_not_owned() -> None:
    assert not Rows(3).owns(Rows(3).fresh())


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_peak_is_the_largest_number_of_rows_in_use(steps: list[int]) -> None:
    rows = Rows(2)
    held: dict[int, torch.Tensor] = {}
    peak = 0
    for step in steps:
        if step in held:
            del held[step]
        else:
            held[step] = rows.fresh().fill_(float(step))
        peak = max(peak, len(held))
        assert all(float(row[0]) == key for key, row in held.items())
    assert rows.peak == peak
    assert rows.rows == peak  # no row is allocated while one is free


def test_only_a_whole_row_counts_as_a_row() -> None:
    rows = Rows(5)
    row = rows.fresh()
    assert rows.is_row(row)
    assert not rows.is_row(row[1:])
    assert not rows.is_row(torch.zeros(5))


def test_freed_rows_are_reused_lowest_first() -> None:
    rows = Rows(5)
    held = [rows.fresh() for _ in range(6)]
    addresses = [row.data_ptr() for row in held]
    del held[1:4]
    again = [rows.fresh() for _ in range(3)]
    assert [row.data_ptr() for row in again] == addresses[1:4]


@pytest.mark.parametrize("traced", [False, True])
def test_threads_never_get_the_same_row(traced: bool) -> None:
    """Each thread marks the rows it takes, and its marks last whatever the other threads do."""
    rows = Rows(16)
    wrong: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> object:
        if not frame.f_code.co_filename.endswith("rows.py"):
            return None
        time.sleep(0)  # lets another thread run between any two lines of the store
        return trace

    def live(name: int) -> None:
        draw = random.Random(name)
        held: list[tuple[float, torch.Tensor]] = []
        try:
            for step in range(80 if traced else 1500):
                mark = float(name * 10_000 + step)
                held.append((mark, rows.fresh().fill_(mark)))
                while len(held) > draw.randrange(1, 8):
                    mark, row = held.pop(draw.randrange(len(held)))
                    if not bool((row == mark).all()):
                        wrong.append(f"thread {name}, step {step}: {row[0]} for {mark}")
                        return
        except Exception as error:  # noqa: BLE001 - any error fails the test
            wrong.append(f"thread {name}: {error!r}")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threading.settrace(trace if traced else None)  # type: ignore[arg-type]
    try:
        threads = [threading.Thread(target=live, args=(name,)) for name in range(1, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
        sys.setswitchinterval(before)
    assert wrong == []
    assert rows.rows <= 3 * 9
    assert rows.peak <= rows.rows


def test_stack_is_a_copy_with_the_stride_of_the_store() -> None:
    rows = Rows(5)
    held = [rows.fresh().fill_(float(k)) for k in range(4)]
    stack = rows.stack([held[3], held[0], torch.full((5,), 9.0)])
    assert stack[:, 0].tolist() == [3.0, 0.0, 9.0]
    assert stack.stride() == (16, 1)
    assert stack.data_ptr() % ALIGNMENT == 0


def test_store_on_another_device_copies_vectors_but_not_rows() -> None:
    rows = Rows(5, "meta")  # stands in for a GPU, whose memory is not the CPU's
    row, other = rows.fresh(), torch.empty(5, device="meta")
    assert rows.owns(row)
    assert rows.store(row) is row
    assert not rows.owns(other)
    stored = rows.store(other)
    assert stored is not other
    assert rows.owns(stored)


def test_only_contiguous_vectors_are_rows_off_the_cpu() -> None:
    """A kernel reads rows by their addresses."""
    rows, matrix = Rows(8, "meta"), torch.empty(8, 8, device="meta")
    assert rows.is_row(matrix[0])
    assert not rows.is_row(matrix[:, 0])
    assert not rows.is_row(torch.empty((), device="meta").expand(8))
