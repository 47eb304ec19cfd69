"""Run a function's tensor operations without Python: recorded once, they are a program for torch's interpreter.

A step of a small model is some fifty tensor operations that take microseconds each; going through Python, autograd
and ``vmap`` for every one of them costs as much again, and holds Python's lock while the other threads wait for it.
The recorded program runs below all that, as one call without the lock. It has the same operations in the same order,
hence the same bits.

Only pure functions of tensors can be recorded: no random draws, no control flow that depends on values. So a
function is recorded twice, on different values, while it runs as usual, and the program must be the same both times
and reproduce the second result to the bit; otherwise the function goes on as usual.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Function = Callable[..., tuple[Tensor, ...]]
"""Tensors in, tensors out."""

_COMPILING = threading.Lock()


class Program:
    """Recorded operations.

    Args:
        source: the operations in order, as TorchScript; its arguments are the function's and the constants.
        constants: tensors that the function read and was not given.
    """

    def __init__(self, source: str, constants: Sequence[Tensor]) -> None:
        self.source, self.constants = source, tuple(constants)
        with _COMPILING:
            self._run = torch.jit.CompilationUnit(source).run

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        # Unoptimized, that is with no operations fused, whose bits would differ.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            result: tuple[Tensor, ...] = self._run(*arguments, *self.constants)
        return result

    def same(self, other: Program) -> bool:
        """Whether two recordings are of the same operations."""
        together = zip(self.constants, other.constants, strict=False)
        return self.source == other.source and all(one is another for one, another in together)


class Captured:
    """A function that is recorded, once for each shape of its arguments, when it is first called, and runs as a
    program from its third call on.

    Args:
        function: gives the function, or this thread's own one.
    """

    def __init__(self, function: Callable[[], Function]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._recorded: dict[Hashable, Program | None] = {}
        self._programs: dict[Hashable, Program | None] = {}

    @property
    def programs(self) -> list[Program]:
        """The programs that were found to do what the function does."""
        return [program for program in self._programs.values() if program is not None]

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in arguments)
        if key not in self._programs:
            return self._record(key, arguments)
        program = self._programs[key]
        return self._function()(*arguments) if program is None else program(*arguments)

    def _record(self, key: Hashable, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        before = [tensor.clone() for tensor in arguments]  # the function may write its arguments
        results, program = record(self._function(), arguments)
        with self._lock:
            if program is None:
                self._programs[key] = None
            elif key not in self._recorded:
                self._recorded[key] = program
            elif key not in self._programs:
                same = program.same(self._recorded[key])  # type: ignore[arg-type]
                self._programs[key] = program if same and _reproduces(program, before, results) else None
        return results


def record(function: Function, arguments: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Program | None]:
    """Call a function; its results, and the program of what it did (None where it can't be one)."""
    with _Recorder() as recorder:
        results = function(*arguments)
    try:
        return results, _write(recorder.calls, arguments, results)
    except _CannotRecord:
        return results, None


class _CannotRecord(Exception):
    pass


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations below autograd and vmap."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # nothing is compiled here; to say so to the compiler would load it, which takes a second
        )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # They hold every tensor, so that no two have the same id.
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def _write(calls: Sequence[Any], arguments: Sequence[Tensor], results: Sequence[Tensor]) -> Program:
    names = {id(tensor): f"a{number}" for number, tensor in enumerate(arguments)}
    constants: list[Tensor] = []
    lines: list[str] = []
    for func, args, kwargs, result in _needed(calls, results):
        for tensor in _tensors((args, kwargs)):
            if id(tensor) not in names:
                names[id(tensor)] = f"c{len(constants)}"
                constants.append(tensor)
        if func._schema.is_mutable and _storage(args[0]) in map(_storage, constants):
            raise _CannotRecord  # it has a memory of its own
        if func is torch.ops.aten.detach.default:  # another name, where there is no autograd
            names[id(result)] = names[id(args[0])]
            continue
        given = [_literal(value, names) for value in args]
        given += [f"{name}={_literal(value, names)}" for name, value in kwargs.items()]
        targets: list[str] = []
        for output in result if isinstance(result, tuple | list) else (result,):
            if not (output is None or isinstance(output, Tensor)):
                raise _CannotRecord  # a number that Python may decide by
            targets.append(f"v{len(lines)}_{len(targets)}")
            names.setdefault(id(output), targets[-1])
        name = func._schema.name.replace("::", ".")
        assigned = f"{', '.join(targets)} = " if targets else ""
        lines.append(f"    {assigned}torch.ops.{name}({', '.join(given)})")
    if any(id(tensor) not in names for tensor in results):
        raise _CannotRecord
    inputs = [f"a{number}" for number in range(len(arguments))] + [f"c{n}" for n in range(len(constants))]
    returned = "".join(f"{names[id(tensor)]}, " for tensor in results)
    source = "\n".join([f"def run({', '.join(inputs)}):", *lines, f"    return ({returned})\n"])
    try:
        return Program(source, constants)
    except RuntimeError as error:  # something that torch's interpreter has no words for
        raise _CannotRecord from error


def _needed(calls: Sequence[Any], results: Sequence[Tensor]) -> list[Any]:
    """The calls that the results depend on, or that write something."""
    wanted = {id(tensor) for tensor in results}
    needed = []
    for call in reversed(calls):
        func, args, kwargs, result = call
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _CannotRecord
        outputs = tree_leaves(result)
        numbers = any(not (output is None or isinstance(output, Tensor)) for output in outputs)
        if func._schema.is_mutable or numbers or any(id(output) in wanted for output in outputs):
            needed.append(call)
            wanted.update(id(tensor) for tensor in _tensors((args, kwargs)))
    return needed[::-1]


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _literal(value: Any, names: dict[int, str]) -> str:
    if isinstance(value, Tensor):
        return names[id(value)]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(each, names) for each in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if value is None or isinstance(
        value, bool | int | float | str | torch.dtype | torch.memory_format | torch.layout
    ):
        return repr(value)
    raise _CannotRecord


def _reproduces(program: Program, arguments: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    try:
        again = program(*arguments)
    except RuntimeError:
        return False
    return all(
        one.shape == other.shape and one.dtype == other.dtype and bool(_same_bits(one, other).all())
        for one, other in zip(results, again, strict=True)
    )


def _same_bits(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())
