"""Run a function's tensor operations without Python: recorded once, they are a program for torch's interpreter.

A step of a small model is some fifty tensor operations that take microseconds each; going through Python, autograd
and ``vmap`` for every one of them costs as much again, and holds Python's lock while the other threads wait for it.
The recorded program has the same operations in the same order, hence the same bits.

Only pure functions of tensors can be recorded: no random draws, no control flow that depends on values, nothing written but
what the function created. So a function is recorded twice, on different values; the program must be the same both times and
reproduce the second result to the bit. Otherwise the function goes on as usual, and :meth:`Captured.forms` says why. (Draws
from Python's own ``random`` go unnoticed.)
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Function = Callable[..., tuple[Tensor, ...]]  # tensors in, tensors out

MOST_SHAPES = 64  # of one function that are recorded; further ones go on through Python

_LEAVING = ("numpy", "tolist", "item", "data_ptr", "__array__", "__dlpack__")
# These write their running statistics, and their schemas don't say so.
_STATISTICS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
_SEEN_ONCE = "called with one set of values only; a call with others completes the recording"
_COMPILING = threading.Lock()


class Program:
    """Recorded operations: TorchScript whose arguments are the function's, and the tensors that it read and was not given."""

    def __init__(self, source: str, constants: Sequence[Tensor]) -> None:
        self.source, self.constants = source, tuple(constants)
        with _COMPILING:
            self._run = torch.jit.CompilationUnit(source).run

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        # Unoptimized, that is with no operations fused, whose bits would differ.
        with torch.no_grad(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            result: tuple[Tensor, ...] = self._run(*arguments, *self.constants)
        return result


class Captured:
    """A function that is recorded, for each of the first ``most_shapes`` shapes of its arguments, in its first two calls on
    different values, and then runs as a program. ``function`` gives the function, or this thread's own one."""

    def __init__(self, function: Callable[[], Function], most_shapes: int = MOST_SHAPES) -> None:
        self._function, self._most_shapes = function, most_shapes
        self._lock = threading.Lock()
        self.programs: dict[Hashable, Program] = {}
        self._once: dict[Hashable, tuple[Program, list[Tensor]]] = {}  # recorded once, with these arguments
        self._reasons: dict[Hashable, str] = {}  # why a shape has no program

    def forms(self) -> dict[str, int]:
        """The number of shapes of the arguments by form, ``"recorded"`` or ``"eager: "`` and the reason."""
        reasons = [*self._reasons.values(), *[_SEEN_ONCE] * len(self._once)]
        return dict(Counter(["recorded"] * len(self.programs) + [f"eager: {reason}" for reason in reasons]))

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        key = _key(arguments)
        if (program := self.programs.get(key)) is not None:
            return program(*arguments)
        if key not in self._reasons:
            shapes = len(self.programs) + len(self._reasons) + len(self._once)
            if key in self._once or shapes < self._most_shapes:
                return self._record(key, arguments)
            self._reasons[None] = f"more than {self._most_shapes} shapes of input"
        return self._function()(*arguments)

    def only_reads(self, *arguments: Tensor) -> bool:
        """Whether a call is known not to write its arguments."""
        return _key(arguments) in self.programs

    def _record(self, key: Hashable, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        before = [tensor.clone() for tensor in arguments]  # the function may write its arguments
        results, program = record(self._function(), arguments)
        with self._lock:
            if key in self.programs or key in self._reasons:
                return results  # another thread was first
            first = self._once.get(key)
            if isinstance(program, str):
                self._reasons[key] = program
            elif first is None:
                self._once[key] = program, before
                return results
            elif all(map(torch.equal, before, first[1])):
                return results
            elif problem := _difference(first[0], program, before, results):
                self._reasons[key] = problem
            else:
                self.programs[key] = program
            self._once.pop(key, None)
        return results


def _key(arguments: Sequence[Tensor]) -> Hashable:
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in arguments)


def _difference(
    first: Program, program: Program, arguments: Sequence[Tensor], results: Sequence[Tensor]
) -> str | None:
    if first.source != program.source:
        return "two calls are not the same operations"
    if any(one is not other for one, other in zip(first.constants, program.constants, strict=True)):
        return "a call reads tensors that another one does not"
    try:
        again = program(*arguments)
    except RuntimeError as error:
        return f"the recorded operations fail ({_brief(error)})"
    for one, other in zip(results, again, strict=True):
        alike = one.shape == other.shape and one.dtype == other.dtype
        if not (alike and bool(((one == other) | (one.isnan() & other.isnan())).all())):
            return "the recorded operations give other bits"
    return None


class _CannotRecord(Exception):
    """The reason why a call can't be written down as a program."""


def record(function: Function, arguments: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Program | str]:
    """Call a function; gives its results, and the program of its operations or the reason why there is none."""
    chance = _numpy_state()
    recorder, watch = _Recorder(), _Watch()
    results: tuple[Tensor, ...] | None = None
    try:
        with watch, recorder:
            results = function(*arguments)
        if watch.left_torch:
            raise _CannotRecord("values leave torch (item(), numpy(), ...)")
        if recorder.wrote():
            raise _CannotRecord("it writes tensors that it did not create")
        if chance != _numpy_state():
            raise _CannotRecord("it draws random numbers")
        return results, _write(recorder.calls, arguments, results)
    except _CannotRecord as reason:
        said = str(reason)
    except Exception as error:  # noqa: BLE001 - the user's own, which comes again, or something that can't be recorded
        said = f"an operation can't be recorded ({_brief(error)})"
    return function(*arguments) if results is None else results, said


def _numpy_state() -> tuple[bytes, int]:
    """The state of NumPy's global generator: what a draw changes."""
    state = np.random.get_state(legacy=False)["state"]
    return state["key"].tobytes(), state["pos"]


def _brief(error: Exception) -> str:
    """The last line of an error: torch's interpreter puts a traceback before it."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:120]}"


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of modes that see the operations below autograd and vmap."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here; to say so to the compiler would load it, which takes a second.
        return False


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # They hold every tensor, so that no two have the same id.
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._made: set[int] = set()  # storages that the function itself made
        self._given: set[int] = set()  # the other storages
        self._versions: dict[int, tuple[Tensor, int]] = {}  # of tensors over these, as they were first seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if storage_of(tensor) not in self._made:
                self._given.add(storage_of(tensor))
                self._versions.setdefault(id(tensor), (tensor, tensor._version))
        result = func(*args, **kwargs)
        self._made |= {storage_of(tensor) for tensor in _tensors(result)} - self._given
        self.calls.append((func, args, kwargs, result))
        return result

    def wrote(self) -> bool:
        if any(tensor._version != version for tensor, version in self._versions.values()):
            return True
        return any(storage_of(tensor) in self._given for call in self.calls for tensor in _written(*call[:3]))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
    return written + (_tensors(args[3:5]) if func._schema.name in _STATISTICS else [])


class _Watch(TorchFunctionMode):
    left_torch = False  # whether values have left torch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left_torch |= getattr(func, "__name__", "") in _LEAVING
        return func(*args, **(kwargs or {}))


def _write(calls: Sequence[Any], arguments: Sequence[Tensor], results: Sequence[Tensor]) -> Program:
    names = {id(tensor): f"a{number}" for number, tensor in enumerate(arguments)}
    constants: list[Tensor] = []
    lines: list[str] = []
    for func, args, kwargs, result in _needed(calls, results):
        for tensor in _tensors((args, kwargs)):
            if id(tensor) not in names:
                names[id(tensor)] = f"c{len(constants)}"
                constants.append(tensor)
        if func is torch.ops.aten.detach.default:  # another name, where there is no autograd
            names[id(result)] = names[id(args[0])]
            continue
        given = [_literal(value, names) for value in args]
        given += [f"{name}={_literal(value, names)}" for name, value in kwargs.items()]
        targets: list[str] = []
        for output in result if isinstance(result, tuple | list) else (result,):
            if not (output is None or isinstance(output, Tensor)):
                raise _CannotRecord("it decides by values")
            targets.append(f"v{len(lines)}_{len(targets)}")
            names.setdefault(id(output), targets[-1])
        comma = "," if isinstance(result, tuple | list) and len(targets) == 1 else ""
        assigned = f"{', '.join(targets)}{comma} = " if targets else ""
        lines.append(f"    {assigned}torch.ops.{func._schema.name.replace('::', '.')}({', '.join(given)})")
    if any(id(tensor) not in names for tensor in results):
        raise _CannotRecord("a result comes from no operation of torch's")
    inputs = [f"a{number}" for number in range(len(arguments))] + [f"c{n}" for n in range(len(constants))]
    returned = "".join(f"{names[id(tensor)]}, " for tensor in results)
    lines = [f"def run({', '.join(inputs)}):", *lines, f"    return ({returned})\n"]
    return Program("\n".join(lines), constants)


def _needed(calls: Sequence[Any], results: Sequence[Tensor]) -> list[Any]:
    """The calls that the results depend on, or that write something."""
    wanted = {id(tensor) for tensor in results}
    needed = []
    for call in reversed(calls):
        func, args, kwargs, result = call
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _CannotRecord(f"it has an operation that may draw random numbers ({func._schema.name})")
        outputs = tree_leaves(result)
        numbers = any(not (output is None or isinstance(output, Tensor)) for output in outputs)
        if func._schema.is_mutable or numbers or any(id(output) in wanted for output in outputs):
            needed.append(call)
            wanted.update(id(tensor) for tensor in _tensors((args, kwargs)))
    return needed[::-1]


def _literal(value: Any, names: dict[int, str]) -> str:
    if isinstance(value, Tensor):
        return names[id(value)]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(each, names) for each in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    plain = bool | int | float | str | torch.dtype | torch.memory_format | torch.layout
    if value is None or isinstance(value, plain):
        return repr(value)
    raise _CannotRecord(f"an operation takes a value of type {type(value).__name__}")


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """The same number for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)
