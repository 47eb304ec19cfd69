"""Names for everything pluggable, looked up in this order: the built-in names (:func:`register`), entry points of the group
``gossamer.<kind>``, and ``"package.module:Class"``. A plain function, or a class of another library, is a component too: its
parameters are the fields.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PydanticUserError,
    ValidationError,
    create_model,
    field_validator,
)
from pydantic_core import PydanticSerializationError, core_schema, to_jsonable_python

from gossamer.config.validation import bad_input, without_booleans
from gossamer.errors import BadInput, GossamerError, cause, listed, place, shown, suggest
from gossamer.startup import make_importable

KINDS: dict[str, tuple[str, str]] = {
    "aggregator": ("gossamer.learning", "Aggregator"),
    "algorithm": ("gossamer.algorithms", "Algorithm"),
    "codec": ("gossamer.codecs", "Codec"),
    "compute": ("gossamer.network", "ComputeProfile"),
    "fault": ("gossamer.faults", "Fault"),
    "gradient": ("gossamer.learning", "Gradient"),
    "middleware": ("gossamer.node", "Middleware"),
    "model": ("gossamer.tasks", ""),
    "network": ("gossamer.network", "Network"),
    "optimizer": ("gossamer.learning", "Optimizer"),
    "partition": ("gossamer.tasks", "Partition"),
    "poison": ("gossamer.tasks", "Poison"),
    "schedule": ("gossamer.learning", "LearningRateSchedule"),
    "task": ("gossamer.tasks", ""),
    "temperature": ("gossamer.topology", "TemperatureSchedule"),
    "topology": ("gossamer.topology", ""),
    "tracker": ("gossamer.results.trackers", "Tracker"),
    "weights": ("gossamer.topology", "Weights"),
    "wrapper": ("gossamer.algorithms", "NodeWrapper"),
}
"""Kind -> the package that registers its built-in names, and the base class (empty if functions are accepted
too)."""

OFFERED: dict[str, frozenset[str]] = {
    "model": frozenset({"shape", "classes", "users", "items", "mean_rating"}),
    "task": frozenset({"data_root", "seed"}),
}
"""Kind -> parameters of its functions that the run fills in if the experiment leaves them out."""

_builtin: dict[str, dict[str, type[Component]]] = {kind: {} for kind in KINDS}


class Section(BaseModel):
    """A frozen group of fields in an experiment file. Unknown fields are refused, and so are booleans in
    place of numbers. A relative path (a field of type ``Path``) is relative to the file's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: Any) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        if Path in (annotation, *get_args(annotation)):
            return _resolved(value, info)
        return without_booleans(value, annotation)


import_times: dict[str, datetime] = {}
"""When modules were imported: those with a component class, and those that an experiment has named first. An edit of their
files since then does not count in this process."""


class Component(Section):
    """Base class of everything that an experiment names. Its fields are its parameters. BadInput for a field
    ``name``."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    registered_name: ClassVar[str] = ""
    _state_goes_to: ClassVar[str] = "local variables, or functools.cached_property for derived values"
    _has_state: ClassVar[bool] = False  # whether private attributes can be assigned

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        import_times[cls.__module__] = datetime.now(UTC)
        if "name" in cls.model_fields:
            raise BadInput(f"{cls.__name__}.name: the name of the component; accepted: another field name")

    if not TYPE_CHECKING:  # type checkers know from pydantic that the object is frozen

        def __setattr__(self, name: str, value: Any) -> None:
            private = self._has_state and name in type(self).__private_attributes__
            if not private and not isinstance(getattr(type(self), name, None), property):
                raise AttributeError(
                    f"{type(self).__name__}.{name} can't be set: the object holds settings only, and all nodes of a"
                    f" simulation share it; accepted: {self._state_goes_to}"
                )
            super().__setattr__(name, value)

    @classmethod
    def name_of(cls) -> str:
        """The name by which an experiment file finds this class."""
        return cls.__dict__.get("registered_name") or _path_of(cls)

    @classmethod
    def module_of(cls) -> str:
        """The name of the module that defines this class or, for a plain function, the function."""
        return cls.__module__

    def spec(self) -> dict[str, Any]:
        """The entry for this component in an experiment file: its name and every parameter."""
        return {"name": self.name_of(), **self.model_dump(mode="json")}


class FunctionComponent(Component):
    """A plain function, or a class of another library, under a name. Its parameters are the fields."""

    function: ClassVar[Callable[..., Any]]
    _offered: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def module_of(cls) -> str:
        return str(getattr(cls.function, "__module__", ""))

    def call(self, **offered: Any) -> Any:
        """Call the function with its parameters, and with the offered values for parameters that the experiment
        does not set."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        given = {name: v for name, v in fields.items() if v is not None or name not in self._offered}
        filled = {name: v for name, v in offered.items() if name in fields and name not in given}
        return type(self).function(**given, **filled, **(self.model_extra or {}))


class OpenFunctionComponent(FunctionComponent):
    """A function that takes any parameter (``**kwargs``)."""

    model_config = ConfigDict(extra="allow")


F = TypeVar("F", bound=Callable[..., Any])


def register(kind: str, name: str) -> Callable[[F], F]:
    """Decorator that gives a built-in component, a class or a function, its name."""

    def add(component: F) -> F:
        if name in _builtin[kind]:
            raise ValueError(f"{kind} {name!r} is registered twice: {_builtin[kind][name]} and {component}")
        _builtin[kind][name] = _as_component(kind, component, name, f"{kind} {name!r}")
        return component

    return add


def names(kind: str) -> dict[str, type[Component]]:
    """Every name of a kind that needs no module path: built-in names and entry points."""
    importlib.import_module(KINDS[kind][0])
    points = {point.name: point for point in entry_points(group=f"gossamer.{kind}")}
    plugins = {
        name: _as_component(kind, point.load(), name, f"{kind} {name!r}")
        for name, point in points.items()
        if name not in _builtin[kind]
    }
    return _builtin[kind] | plugins


def find(kind: str, name: str, field: str | None = None) -> type[Component]:
    """The component class with a name. ``field`` is the field that holds it, for messages (default: the
    kind). BadInput for an unknown name, and for a module or attribute that can't be imported."""
    field = field or kind
    if ":" in name:
        source = f"{field} {name!r}"
        return _as_component(kind, imported(name, source), name, source)
    importlib.import_module(KINDS[kind][0])
    known = _builtin[kind] if name in _builtin[kind] else names(kind)  # names() loads entry points
    if name not in known:
        accepted = f'{listed(known)}{" or " if known else ""}"package.module:Class"'
        raise BadInput(f"{field}: unknown name {name!r}{suggest(name, known)}; accepted: {accepted}")
    return known[name]


def build(kind: str, value: Any, context: Any = None, field: str | None = None) -> Component:
    """Build a component of a kind from an entry of an experiment file: a mapping with ``name`` and
    parameters, or a bare name. A class or function stands for its name; a component is returned unchanged.
    Relative paths are relative to the ``folder`` in the context. ``field`` is the field that holds the value,
    for messages (default: the kind). BadInput for an unknown name, and for parameters that the component
    refuses."""
    field = field or kind
    if isinstance(value, Component):
        return value
    entry = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = entry.pop("name", None)
    if inspect.isclass(name) or inspect.isfunction(name):
        name = name.name_of() if inspect.isclass(name) and issubclass(name, Component) else _path_of(name)
    if not isinstance(name, str):
        raise BadInput(
            f"{field}: got {shown(value)}; accepted: a name, or a mapping with 'name' and its parameters"
        )
    cls = find(kind, name, field)
    source = f"{field} {name!r}"
    if inspect.isabstract(cls):
        missing = ", ".join(f"{name}()" for name in sorted(cls.__abstractmethods__))
        raise BadInput(f"{source}: {cls.__name__} has no {missing}; accepted: a class that defines {missing}")
    try:
        return cls.model_validate(entry, context=context)
    except ValidationError as error:
        raise bad_input(error, cls, field) from None
    except GossamerError:
        raise
    except Exception as error:  # the user's own __init__ may raise anything
        raise BadInput(f"{source}: {cause(error)}") from error


def _path_of(target: type | Callable[..., Any]) -> str:
    """ "module:name" of a class or function. For the running script, it names the script's module, so that
    other processes find it."""
    module = script_module() if target.__module__ == "__main__" else None
    return f"{module or target.__module__}:{target.__qualname__}"


def script_module() -> str | None:
    """The module that this process runs as a script; None for a notebook, a prompt, or a program that is not
    a module."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name)
    file = Path(getattr(main, "__file__", None) or "")
    return file.stem if file.suffix == ".py" else None


_imported: list[str] = []  # modules being imported, innermost last


def check_not_importing(call: str) -> None:
    """Refuse to start work while the module of a component is being imported. Otherwise, a script whose
    classes other processes import would start the work in each of them."""
    if _imported:
        raise BadInput(
            f'{call}: called while {_imported[-1]!r} is being imported; accepted: below if __name__ == "__main__":'
        )


def imported(path: str, source: str) -> Any:
    """The object named by ``"package.module:attribute"``. BadInput, with ``source``, if it does not exist."""
    module_name, _, attribute = path.partition(":")
    make_importable(str(Path.cwd()))
    _imported.append(module_name)
    if module_name not in sys.modules:
        import_times[module_name] = datetime.now(UTC)
    try:
        module = importlib.import_module("__main__" if module_name == script_module() else module_name)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{source}: no module named {error.name!r} (the working directory is searched too)"
        ) from None
    except Exception as error:
        if isinstance(error, PydanticUserError) and error.code == "model-field-missing-annotation":
            fault = error.message.partition(". ")[0]
            raise BadInput(
                f"{source}: {fault}{place(error)}; accepted: a type, such as steps: int = 5"
            ) from None
        raise BadInput(f"{source}: importing {module_name!r} raised {cause(error)}") from error
    finally:
        _imported.pop()
    if (target := getattr(module, attribute, None)) is None:
        if module_name == "__main__":  # a notebook or a prompt, which other processes can't import
            raise BadInput(
                f"{source}: other processes can't import it; accepted: a class in a module (begin the cell with"
                f" %%writefile mine.py, then: from mine import {attribute})"
            )
        raise BadInput(f"{source}: {module_name!r} has no {attribute!r}{suggest(attribute, vars(module))}")
    return target


def _as_component(kind: str, target: Any, name: str, source: str) -> type[Component]:
    """The component class for a user's object."""
    if inspect.isclass(target) and issubclass(target, Component):
        target.registered_name = target.__dict__.get("registered_name") or name
        return target
    if base := KINDS[kind][1]:
        raise BadInput(f"{source}: not a component class; accepted: a subclass of gossamer's {base}")
    if not callable(target):
        raise BadInput(f"{source} is {type(target).__name__}; accepted: a Component class or a function")
    return _from_function(kind, target, name, source)


@cache
def _from_function(kind: str, function: Callable[..., Any], name: str, source: str) -> type[Component]:
    function, doc = _configured(function), function.__doc__
    fields: dict[str, Any] = {}
    offered, hints = OFFERED.get(kind, frozenset()), _hints(function)
    base: type[FunctionComponent] = FunctionComponent
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if kind != "model":
                raise BadInput(f"{source}: parameter {parameter}; accepted: parameters by name")
            base = OpenFunctionComponent if parameter.kind is parameter.VAR_KEYWORD else base
        elif parameter.name in offered:
            fields[parameter.name] = (Optional[hints.get(parameter.name, Any)], None)  # noqa: UP045
        elif parameter.default is parameter.empty or _is_plain(parameter.default):
            default = ... if parameter.default is parameter.empty else parameter.default
            given = Field(default, validate_default=isinstance(default, Path))  # validation makes it absolute
            fields[parameter.name] = (hints.get(parameter.name, Any), given)
    cls = create_model(getattr(function, "__name__", name), __base__=base, __doc__=doc, **fields)
    cls.function, cls.registered_name = staticmethod(function), name
    cls._offered = offered & fields.keys()
    return cls


def _configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """A model class of transformers takes a configuration, so the parameters are those of the
    configuration."""
    config = getattr(function, "config_class", None)
    return function if config is None else lambda **parameters: function(config(**parameters))


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters' annotations, if they can be evaluated."""
    called = function.__init__ if inspect.isclass(function) else function
    try:
        return inspect.get_annotations(called, eval_str=True)
    except (AttributeError, NameError, TypeError):  # names that exist for type checkers only
        return {}


def _is_plain(default: object) -> bool:
    """Whether a file can hold a default value. (In other libraries' functions it may be a class.)"""
    try:
        to_jsonable_python(default)
    except PydanticSerializationError:
        return False
    return True


@dataclass(frozen=True)
class ComponentField:
    """Pydantic annotation of a field that holds a component of a kind; a list of them if ``many``; or null if ``optional``.
    ``field`` is its path in the experiment file, for messages; the kind by default."""

    kind: str
    field: str = ""
    many: bool = False
    optional: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        specs = core_schema.plain_serializer_function_ser_schema(self._specs)
        return core_schema.with_info_before_validator_function(
            self._build, handler(source), serialization=specs
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        # An earlier validator has its own schema, which says what it accepts.
        if "json_schema_input_schema" in schema["schema"]:
            return dict(handler(schema))
        entry = {"component": self.kind}  # gossamer.config.schema puts a reference in its place
        if self.many:
            return {"type": "array", "items": entry}
        return {"anyOf": [entry, {"type": "null"}]} if self.optional else entry

    def _build(self, value: Any, info: Any) -> Any:
        field = self.field or self.kind
        if value is None and self.optional:
            return None
        if not self.many:
            return build(self.kind, value, info.context, field)
        if not isinstance(value, list | tuple):
            return value
        return tuple(build(self.kind, item, info.context, f"{field}.{k}") for k, item in enumerate(value))

    @staticmethod
    def _specs(value: Any) -> Any:
        return [item.spec() for item in value] if isinstance(value, tuple) else value and value.spec()


class Placed(str):
    """Text from outside the file. A path in it is relative to its ``folder``."""

    folder: Path


def placed(value: Any, folder: Path | None) -> Any:
    """A copy of a file's value in which texts, which may be paths, are marked as relative to a folder unless
    they are already marked."""
    if isinstance(value, list):
        return [placed(item, folder) for item in value]
    if isinstance(value, Mapping):
        return {key: placed(item, folder) for key, item in value.items()}
    if folder is None or not isinstance(value, str) or isinstance(value, Placed):
        return value
    marked = Placed(value)
    marked.folder = folder
    return marked


def _resolved(value: Any, info: Any) -> Any:
    if not isinstance(value, str | Path):
        return value
    folder = value.folder if isinstance(value, Placed) else Path((info.context or {}).get("folder") or "")
    return (folder / Path(value)).resolve()


FilePath = Annotated[Path, BeforeValidator(_resolved)]
"""A path. A relative path is resolved from the folder of the file that contains it, or else from the working
directory."""
