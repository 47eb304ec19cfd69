"""pydantic's errors as gossamer's: one line a problem, naming the field, the value and what is accepted."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError, WrapValidator
from pydantic_core import ErrorDetails

from gossamer.errors import BadInput, listed, shown, suggest


def bad_input(error: ValidationError, model: type[BaseModel], prefix: str = "") -> BadInput:
    """The problems of a validation error.

    Args:
        error: what pydantic raised.
        model: the model that was validated.
        prefix: where the model stands in the experiment, e.g. "algorithm".
    """
    lines: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        location = [part for part in problem["loc"] if not _is_branch(part)]
        name = ".".join([*([prefix] if prefix else []), *map(str, location)]) or model.__name__
        if problem["type"] == "extra_forbidden":
            fields = _fields_at(model, location[:-1])
            text = f"unknown field{suggest(str(location[-1]), fields)}; accepted: {listed(fields)}"
        elif problem["type"] == "missing":
            text = "missing; a value is required"
        else:
            text = f"got {shown(problem['input'])}; accepted: {accepted(problem)}"
        lines.setdefault(name, []).append(text)
    _forget_mistyped(lines)
    _forget_other_branches(lines)
    return BadInput(*(f"{name}: {_merged(texts)}" for name, texts in lines.items()))


def accepted(problem: ErrorDetails) -> str:
    """What would have been accepted, in words that don't need to know pydantic."""
    match problem["type"]:
        case "string_pattern_mismatch":
            return f"text that matches {problem['ctx']['pattern']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "a mapping of fields"
        case "path_type":
            return "a path"
        case "tuple_type" | "list_type":
            return "a list"
        case "too_short":
            return f"a list of at least {problem['ctx']['min_length']}"
        case "too_long":
            return f"a list of at most {problem['ctx']['max_length']}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return re.split(", unable to|, got", message)[0]


def accepting(what: str) -> WrapValidator:
    """For a type of which pydantic would say too much: whatever is wrong with a value, ``what`` is accepted."""

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(what) from None

    return WrapValidator(validate)


def _forget_mistyped(lines: dict[str, list[str]]) -> None:
    """A required field that is there under a mistyped name is one problem, not two."""
    for name, texts in list(lines.items()):
        parent = name.rpartition(".")[0]
        for missing in [other for other, said in lines.items() if said[0].startswith("missing;")]:
            place, _, field = missing.rpartition(".")
            if place == parent and f"did you mean {field!r}" in texts[0]:
                del lines[missing]


def _forget_other_branches(lines: dict[str, list[str]]) -> None:
    """What is wrong inside a value says more than that the other branches of a union don't take such values at all."""
    for name in list(lines):
        if any(other.startswith(f"{name}.") for other in lines):
            del lines[name]


def _merged(texts: list[str]) -> str:
    """The branches of a union refuse one value each in their own words: say them once, joined."""
    head, separator, _ = texts[0].partition("; accepted: ")
    if len(texts) == 1 or not separator:
        return texts[0]
    return head + separator + " or ".join(dict.fromkeys(text.partition("; accepted: ")[2] for text in texts))


def _is_branch(part: int | str) -> bool:
    # pydantic puts the names of a union's branches into the location: "int", "literal['full']", "list[int]",
    # ...
    return isinstance(part, str) and (
        "[" in part or "-" in part or part in {"int", "float", "str", "bool"} or part[:1].isupper()
    )


def _fields_at(model: type[BaseModel], location: list[int | str]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        inner = _model_in(field.annotation) if field is not None else None
        if inner is None:
            continue
        model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, list, tuple):
        for argument in get_args(annotation):
            if (found := _model_in(argument)) is not None:
                return found
    return None
