"""Turns pydantic's errors into gossamer's: one line per problem, with the field, the value and what is
accepted."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError, WrapValidator
from pydantic_core import ErrorDetails

from gossamer.errors import BadInput, listed, shown, suggest


def bad_input(error: ValidationError, model: type[BaseModel], prefix: str = "") -> BadInput:
    """The problems of a validation error, one line for each field; ``prefix`` is the field that holds the model."""
    values: dict[str, str] = {}
    expected: dict[str, list[str]] = {}  # a union has one error for each of its branches
    # A misspelt field comes before the field that is missing because of it.
    for problem in sorted(
        error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden"
    ):
        unknown = problem["type"] == "extra_forbidden"
        given = (
            len(problem["loc"]) - unknown
        )  # an unknown field is written by the user, so it is not a branch
        location = [part for k, part in enumerate(problem["loc"]) if k == given or not _is_branch(part)]
        name = ".".join([*([prefix] if prefix else []), *map(str, location)]) or model.__name__
        if unknown:
            fields = [f.alias or key for key, f in _model_at(model, location[:-1]).model_fields.items()]
            values[name] = f"unknown field{suggest(str(location[-1]), fields)}; accepted: "
            expected[name] = [listed(fields)]
        elif problem["type"] == "missing":
            values[name], expected[name] = "missing; a value is required", []
        else:
            values[name] = f"got {shown(problem['input'])}; accepted: "
            expected.setdefault(name, []).append(accepted(problem))
    return BadInput(
        *(
            f"{name}: {value}{' or '.join(dict.fromkeys(expected[name]))}"
            for name, value in values.items()
            # A problem inside a value is more informative than the other branches' refusal of the whole
            # value.
            if not any(other.startswith(f"{name}.") for other in values)
        )
    )


def accepted(problem: ErrorDetails) -> str:
    """The accepted values, in words that require no knowledge of pydantic."""
    match problem["type"]:
        case "string_pattern_mismatch":
            return f"text that matches {problem['ctx']['pattern']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "a mapping of fields"
        case "path_type":
            return "a path"
        case "tuple_type" | "list_type":
            return "a list"
        case "int_parsing_size":
            return "a smaller integer"
        case "too_short":
            return f"a list of at least {problem['ctx']['min_length']}"
        case "too_long":
            return f"a list of at most {problem['ctx']['max_length']}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    message = message.replace("a valid integer", "an integer").replace("a valid number", "a number")
    message = re.split(", unable to|, got", message)[0]
    return re.sub(
        r"\d+0{8,}(\.0)?$", lambda number: f"{float(number[0]):g}", message
    )  # 4e+09, not 4000000000


class _Boolean:
    """Stands for a boolean where a number is expected. Pydantic refuses this object, but would accept the
    boolean as 0 or 1."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)


def without_booleans(value: Any, annotation: Any) -> Any:
    """The value for a field of this type, with booleans replaced where only a number is valid, so that they
    are refused."""
    types = set(_types_in(annotation))
    if types.isdisjoint((int, float)) or not types.isdisjoint((bool, Any)):
        return value
    if isinstance(value, list | tuple):
        return [_Boolean(item) if isinstance(item, bool) else item for item in value]
    return _Boolean(value) if isinstance(value, bool) else value


def _types_in(annotation: Any) -> Iterator[Any]:
    """All types that an annotation names."""
    if get_origin(annotation) is not Literal:
        yield annotation
        for inner in get_args(annotation):
            yield from _types_in(inner)


def accepting(text: str) -> WrapValidator:
    """Pydantic annotation that replaces pydantic's message for an invalid value by "accepted: ``text``"."""

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(text) from None

    return WrapValidator(validate)


def not_called_with(function: Callable[..., Any], *arguments: Any) -> str | None:
    """The reason why a function can't be called with these arguments; None if it can, or if that is unknown."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # some functions that are written in C have no signature
        return None
    return None


def _is_branch(part: int | str) -> bool:
    """Whether a part of a location names the branch of a union, such as "int", "list[int]" or "literal['full']"."""
    return isinstance(part, str) and (
        "[" in part or "-" in part or part in {"int", "float", "str", "bool"} or part[:1].isupper()
    )


def _model_at(model: type[BaseModel], location: list[int | str]) -> type[BaseModel]:
    for part in location:
        field = model.model_fields.get(str(part))
        model = (field and _model_in(field.annotation)) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
