"""What an author can observe of a run: the order in which calls of nodes return, and in which messages arrive.

A line of a trace has the virtual time in nanoseconds, the rank, what happened, and what an algorithm sees of it. Nothing in
it depends on values of models, or on how an engine is built. So traces show whether a change of the simulator keeps the
order of everything that algorithms can notice, and where it first does not.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from gossamer import Message, Node, NodeWrapper, PeerLost
from gossamer.node.node import AsyncRounds

CALLS = (
    *("train", "gradient", "apply", "evaluate", "mix", "combine", "sleep", "receive", "gather", "ask"),
    *("next_answer", "neighbors", "drain", "drain_answers"),
)

_lines: list[str] = []
_calling: ContextVar[bool] = ContextVar("calling", default=False)


def _note(node: Node, what: str, detail: str = "") -> None:
    _lines.append(f"{round(node.now() * 1e9)} {node.rank} {what} {detail}".rstrip())


def _tag(tag: Any) -> str:
    return "/".join(map(str, tag if isinstance(tag, tuple) else (tag,)))


def _seen(call: str, arguments: tuple[Any, ...], result: Any) -> str:
    """What an author sees of a result, without values of models."""
    if isinstance(result, Message):
        return f"{result.source} {_tag(result.tag)}"
    if call == "drain":
        return ", ".join(f"{message.source} {_tag(message.tag)}" for message in result)
    if call == "drain_answers":
        return str(len(result))
    if call == "gather":
        return f"{_tag(arguments[1]) if len(arguments) > 1 else ''} {list(result)} without {list(result.missing)}"
    if call == "neighbors":
        return str(list(result))
    return "nothing" if result is None and call == "next_answer" else ""


def _traced(call: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that notes when it returns, or how it fails, unless another noted method has called it."""

    def by_place(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        bound = inspect.signature(original).bind(None, *args, **named)
        return tuple(bound.arguments.values())[1:]

    def ended(node: Node, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        _note(node, call, _seen(call, by_place(args, named), result))

    def failed(node: Node, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError | TimeoutError | PeerLost | ValueError | TypeError):
            _note(node, call, type(error).__name__)

    if inspect.iscoroutinefunction(original):

        @wraps(original)
        async def waited(node: Node, *args: Any, **named: Any) -> Any:
            if _calling.get():
                return await original(node, *args, **named)
            token = _calling.set(True)
            try:
                result = await original(node, *args, **named)
            except BaseException as error:
                failed(node, error)
                raise
            finally:
                _calling.reset(token)
            ended(node, args, named, result)
            return result

        return waited

    @wraps(original)
    def called(node: Node, *args: Any, **named: Any) -> Any:
        if _calling.get():
            return original(node, *args, **named)
        token = _calling.set(True)
        try:
            result = original(node, *args, **named)
        except Exception as error:
            failed(node, error)
            raise
        finally:
            _calling.reset(token)
        ended(node, args, named, result)
        return result

    return called


class Arrivals(NodeWrapper):
    """Notes each message that arrives."""

    def incoming(self, node: Node, message: Message) -> Message:
        _note(node, "arrival", f"{message.source} {_tag(message.tag)}")
        return message


def _kinds(kind: type[Node]) -> list[type[Node]]:
    """A class of nodes with all its subclasses."""
    return [kind, *(below for subclass in kind.__subclasses__() for below in _kinds(subclass))]


@contextmanager
def observing() -> Iterator[list[str]]:
    """Collect the lines of all nodes of this process."""
    _lines.clear()
    originals = [
        (kind, call, vars(kind)[call]) for kind in _kinds(Node) for call in CALLS if call in vars(kind)
    ]
    next_round = AsyncRounds.__anext__

    async def counted(rounds: AsyncRounds) -> int:
        token = _calling.set(True)  # what an engine calls between rounds is its own affair
        try:
            r = await next_round(rounds)
        except StopAsyncIteration:
            _note(rounds._node, "rounds", "over")
            raise
        finally:
            _calling.reset(token)
        _note(rounds._node, "rounds", str(r))
        return r

    for kind, call, original in originals:
        setattr(kind, call, _traced(call, original))
    AsyncRounds.__anext__ = counted  # type: ignore[method-assign]
    try:
        yield _lines
    finally:
        for kind, call, original in originals:
            setattr(kind, call, original)
        AsyncRounds.__anext__ = next_round  # type: ignore[method-assign]
