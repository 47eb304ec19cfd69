"""Recorded programs: the same bits as the function, and nothing recorded that can't be."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.learning.capture import MOST_SHAPES, Captured, Function, Program, record


def captured(function: Function, most_shapes: int = MOST_SHAPES) -> tuple[Captured, list[int]]:
    """The function captured, and a list that grows with every call that really goes through it."""
    calls: list[int] = []

    def counted(*arguments: Tensor) -> tuple[Tensor, ...]:
        calls.append(1)
        return function(*arguments)

    return Captured(lambda: counted, most_shapes), calls


def slope(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.huber_loss((torch.tanh(leaf) @ y).sum(0), y.sum(0), delta=0.5)
        (gradient,) = torch.autograd.grad(loss, [leaf])
    return loss.detach(), gradient


@given(st.integers(1, 5), st.integers(0, 2**30))
def test_a_program_has_the_bits_of_its_function(rows: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    run, calls = captured(slope)
    for _ in range(5):
        x, y = torch.randn(rows, 3, generator=draw), torch.randn(3, 2, generator=draw)
        for got, expected in zip(run(x, y), slope(x, y), strict=True):
            assert torch.equal(got, expected)
    assert len(calls) == 2  # recorded twice, then only the program ran


def decides(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2,) if x.sum() > 0 else (x * 3,)


def draws(x: Tensor) -> tuple[Tensor, ...]:
    return (F.dropout(x, 0.5),)


def counts(x: Tensor) -> tuple[Tensor, ...]:
    counts.calls = getattr(counts, "calls", 0) + 1  # type: ignore[attr-defined]
    return (x * counts.calls,)  # type: ignore[attr-defined]


def goes_through_numpy(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.from_numpy(x.numpy() * 2),)


memory = torch.zeros(3)


def remembers(x: Tensor) -> tuple[Tensor, ...]:
    memory.view(-1).add_(1)
    return (x + memory,)


def measures_by_numpy(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.full((), float((x.numpy() > 10).mean())),)  # the same number nearly always


def branches_on_a_list(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2000,) if max(x.tolist()) < 10 else (x * 0,)


def drops_at_random(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2,) if np.random.random() < 2 else (x,)


def adds_to_many(x: Tensor) -> tuple[Tensor, ...]:
    torch._foreach_add_([memory, memory.flip(0)], 1.0)
    return (x + memory,)


def writes_by_keyword(x: Tensor) -> tuple[Tensor, ...]:
    torch.add(memory, 1, out=memory)
    return (x + memory,)


def normalizes(x: Tensor) -> tuple[Tensor, ...]:
    return (F.batch_norm(x[:, None], memory[:1], memory[1:2], training=True),)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (decides, "values leave torch|decides by values"),
        (draws, "may draw random numbers \\(aten::"),
        (goes_through_numpy, "values leave torch"),
        (remembers, "writes tensors that it did not create"),
        (counts, "two calls are not the same operations"),
        (measures_by_numpy, "values leave torch"),
        (branches_on_a_list, "values leave torch"),
        (drops_at_random, "draws random numbers"),
        (adds_to_many, "writes tensors that it did not create"),
        (writes_by_keyword, "writes tensors that it did not create"),
        (normalizes, "writes tensors that it did not create"),
    ],
)
def test_what_is_no_pure_function_of_tensors_goes_on_through_python_and_says_why(
    function: Function, reason: str
) -> None:
    run, calls = captured(function)
    for number in range(6):
        run(torch.full((3,), 1.0 - number % 2 * 3 + number / 8))
    assert len(calls) == 6
    assert "recorded" not in run.forms()
    [form] = run.forms()
    assert form.startswith("eager: ")
    assert re.search(reason, form)


def test_operations_whose_bits_depend_on_the_call_run_eagerly_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As matrix products do on some processors, whose bits depend on memory alignment."""
    program_call = Program.__call__

    def other_bits(program: Program, *arguments: Tensor) -> tuple[Tensor, ...]:
        return tuple(result * (1 + 2**-20) for result in program_call(program, *arguments))

    monkeypatch.setattr(Program, "__call__", other_bits)
    run, _ = captured(slope)
    for number in range(4):
        x, y = torch.full((2, 3), number / 8), torch.ones(3, 2)
        for got, expected in zip(run(x, y), slope(x, y), strict=True):
            assert torch.equal(got, expected)
    assert run.forms() == {"eager: the recorded operations give other bits": 1}


def test_each_of_some_shapes_has_a_program() -> None:
    run, calls = captured(slope, most_shapes=2)
    for rows in (1, 2, 1):
        run(torch.randn(rows, 3), torch.ones(3, 2))
    assert run.forms() == {
        "recorded": 1,
        "eager: called with one set of values only; a call with others completes the recording": 1,
    }
    for rows in (2, 3, 3, 1, 2):
        run(torch.randn(rows, 3), torch.ones(3, 2))
    assert run.forms() == {"recorded": 2, "eager: more than 2 shapes of input": 1}
    assert run.forms()["recorded"] == 2
    assert len(calls) == 6  # two of each recorded shape, and those of the third


def test_a_memory_of_its_own_is_written_once_a_call() -> None:
    memory.zero_()
    run, _ = captured(remembers)
    for number in range(1, 5):
        assert run(torch.zeros(3))[0].tolist() == [number] * 3


def test_arguments_that_a_function_writes_are_written_once_a_call() -> None:
    def add(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.add_(y)
        return (x * 2,)

    run, calls = captured(add)
    x = torch.zeros(2)
    for number in range(1, 6):
        assert run(x, torch.ones(2))[0].tolist() == [2.0 * number] * 2
        assert not run.only_reads(x, torch.ones(2))
    assert x.tolist() == [5.0, 5.0]
    assert len(calls) == 5  # what may be written is the caller's business; it is not recorded


def test_a_tensor_that_is_not_an_argument_is_read_as_it_is_now() -> None:
    scale = torch.ones(1)
    run, calls = captured(lambda x: (x * scale,))
    for number in range(5):
        scale.fill_(number)
        assert run(torch.full((2,), 3.0 + number))[0].tolist() == [(3.0 + number) * number] * 2
    assert len(calls) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.where(x > 0, x, float("-inf")),),
        lambda x: (x / 0 * 0,),  # not a number, the same each time
        lambda x: (F.pad(x[None, None], (1, 1), "reflect"), x.to(torch.float64)),
        lambda x: (x.split(3)[0],),  # a list of one
        lambda x: tuple(x.split(1)),
        lambda x: (F.gelu(x, approximate="tanh"), x.std(), x.max(0).values),
    ],
)
def test_literals_of_every_kind_can_be_written_down(function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    results, program = record(function, [torch.tensor([1.0, -2.0, 0.5])])
    assert isinstance(program, Program)
    again = program(torch.tensor([1.0, -2.0, 0.5]))
    for one, other in zip(results, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_recording_does_not_load_the_compiler() -> None:
    """Loading it takes a second, which is more than many a run."""
    code = """
import sys, torch
from gossamer.learning.capture import Program, record
_, program = record(lambda x: (x * 2,), [torch.ones(2)])
assert isinstance(program, Program)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_values_must_differ_before_a_program_is_trusted() -> None:
    run, calls = captured(slope)
    for _ in range(4):
        run(torch.ones(2, 3), torch.ones(3, 2))
    assert len(calls) == 4
    run(torch.zeros(2, 3), torch.ones(3, 2))
    run(torch.zeros(2, 3), torch.ones(3, 2))
    assert len(calls) == 5


def test_a_program_keeps_no_graph() -> None:
    """A loss may close over something that requires a gradient."""
    teacher = torch.nn.Parameter(torch.ones(3))
    run, calls = captured(lambda x: ((x * teacher).detach(),))
    for number in range(4):
        assert not run(torch.full((3,), float(number)))[0].requires_grad
    assert len(calls) == 2


def test_an_error_of_the_function_is_the_functions_own() -> None:
    def wrong(x: Tensor) -> tuple[Tensor, ...]:
        raise ValueError("mine")

    run, _ = captured(wrong)
    with pytest.raises(ValueError, match="mine"):
        run(torch.ones(1))
