"""Names for everything pluggable: a registered name, ``"package.module:Class"`` or an entry point.

A component is a frozen pydantic model: its fields are its parameters. A component is found by name in three
places, in this order: the built-in names (given with :func:`register`), entry points of the group
``gossamer.<kind>``, and ``"package.module:Class"`` (or ``":function"``, whose keyword parameters are then the
parameters).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, create_model

from gossamer.config.definition import Definition, settable
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput, GossamerError, cause, listed, shown, suggest

KINDS: dict[str, tuple[str, ...]] = {
    "algorithm": ("gossamer.algorithms",),
    "codec": ("gossamer.codecs",),
    "compute": ("gossamer.network",),
    "fault": ("gossamer.faults",),
    "network": ("gossamer.network",),
    "optimizer": ("gossamer.learning",),
    "partition": ("gossamer.tasks",),
    "schedule": ("gossamer.learning",),
    "task": ("gossamer.tasks",),
    "topology": ("gossamer.topology",),
    "weights": ("gossamer.topology",),
    "wrapper": ("gossamer.algorithms",),
}
"""Pluggable kind -> the packages whose import registers the built-in names."""

_builtin: dict[str, dict[str, type[Component]]] = {kind: {} for kind in KINDS}


_CLASSES = {
    "algorithm": "Algorithm",
    "codec": "Codec",
    "compute": "ComputeProfile",
    "fault": "Fault",
    "network": "Network",
    "optimizer": "Optimizer",
    "partition": "Partition",
    "schedule": "Schedule",
    "weights": "Weights",
    "wrapper": "NodeWrapper",
}
"""Kind that no function may give -> what its classes are subclasses of."""


class Component(BaseModel, metaclass=Definition):
    """Base of everything that an experiment names: frozen, no unknown fields, fields = parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    registered_name: ClassVar[str] = ""
    _state_goes_to: ClassVar[str] = (
        "local variables, or functools.cached_property for what follows from the settings"
    )

    if not TYPE_CHECKING:  # to a type checker, it is pydantic's: frozen

        def __setattr__(self, name: str, value: Any) -> None:
            if not settable(type(self), name):
                raise AttributeError(
                    f"{type(self).__name__}.{name} can't be set: the object holds settings only, and all nodes of a"
                    f" simulation share it; accepted: {self._state_goes_to}"
                )
            super().__setattr__(name, value)

    @classmethod
    def name_of(cls) -> str:
        """The name under which an experiment file finds this class."""
        return cls.__dict__.get("registered_name") or f"{cls.__module__}:{cls.__qualname__}"

    def spec(self) -> dict[str, Any]:
        """What an experiment file says to get this component: its name and every parameter."""
        return {"name": self.name_of(), **self.model_dump(mode="json")}


class FunctionComponent(Component):
    """A plain function under a name; its keyword parameters are the fields and :meth:`call` calls it."""

    function: ClassVar[Callable[..., Any]]

    def call(self) -> Any:
        """The function's value for these parameters."""
        return type(self).function(**{name: getattr(self, name) for name in type(self).model_fields})


C = TypeVar("C", bound=type[Component])


def register(kind: str, name: str) -> Callable[[C], C]:
    """Class decorator: give a built-in component its name."""

    def add(cls: C) -> C:
        if name in _builtin[kind]:
            raise ValueError(f"{kind} {name!r} is registered twice: {_builtin[kind][name]} and {cls}")
        cls.registered_name = name
        _builtin[kind][name] = cls
        return cls

    return add


def names(kind: str) -> dict[str, type[Component]]:
    """Every name of a kind that can be used without a module path, built in or by entry point."""
    _load_builtin(kind)
    found = dict(_builtin[kind])
    for point in entry_points(group=f"gossamer.{kind}"):
        found.setdefault(point.name, _as_component(point.load(), point.name, point.value))
    return found


def find(kind: str, name: str, field: str | None = None) -> type[Component]:
    """The component class that a name stands for.

    Args:
        kind: one of :data:`KINDS`.
        name: a registered name or ``"package.module:Class"``.
        field: where the name stands, for messages; None is the kind's name.

    Raises:
        BadInput: for a name that is not registered (it lists the accepted ones and the nearest), or a module
            or attribute that can't be imported.
    """
    field = field or kind
    if ":" in name:
        return _import(field, name)
    _load_builtin(kind)
    if name in _builtin[kind]:
        return _builtin[kind][name]
    accepted = names(kind)
    if name not in accepted:
        known = [listed(list(accepted))] if accepted else []
        raise BadInput(
            f"{field}: unknown name {name!r}{suggest(name, accepted)}; accepted: "
            + " or ".join([*known, '"package.module:Class"'])
        )
    return accepted[name]


def build(kind: str, value: Any, context: Any = None, field: str | None = None) -> Component:
    """A component from what an experiment file says: a mapping with ``name``, a bare name, or a component.

    Args:
        kind: one of :data:`KINDS`.
        value: what the file says.
        context: pydantic's validation context; ``folder`` is what relative paths are relative to.
        field: where the value stands, for messages; None is the kind's name.

    Raises:
        BadInput: for an unknown name, or parameters that the component refuses.
    """
    field = field or kind
    if isinstance(value, Component):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise BadInput(
            f"{field}: got {shown(value)}; accepted: a name, or a mapping with 'name' and its parameters"
        )
    parameters = {key: item for key, item in value.items() if key != "name"}
    cls = find(kind, value["name"], field)
    _check_class(kind, cls, f"{field} {value['name']!r}")
    try:
        return cls.model_validate(parameters, context=context)
    except ValidationError as error:
        raise bad_input(error, cls, field) from None
    except GossamerError:
        raise
    except Exception as error:  # the user's own __init__, of any kind
        raise BadInput(f"{field} {value['name']!r}: {cause(error)}") from error


def _check_class(kind: str, cls: type[Component], said: str) -> None:
    if issubclass(cls, FunctionComponent) and kind in _CLASSES:
        what = "a plain class" if inspect.isclass(cls.function) else "a function"
        raise BadInput(f"{said}: {what}; accepted: a subclass of gossamer's {_CLASSES[kind]}")
    if inspect.isabstract(cls):
        lacks = ", ".join(f"{name}()" for name in sorted(cls.__abstractmethods__))
        own = [f"{name}()" for name, each in vars(cls).items() if inspect.isfunction(each) and name[0] != "_"]
        raise BadInput(
            f"{said}: {cls.__name__} has no {lacks}{f' (it has {listed(own)})' if own else ''}; accepted: a class with"
            f" {lacks}"
        )


def _load_builtin(kind: str) -> None:
    for package in KINDS[kind]:
        importlib.import_module(package)


def _import(field: str, path: str) -> type[Component]:
    module_name, _, attribute = path.partition(":")
    # The working directory is importable, as under `python -m`.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{field} {path!r}: no module named {error.name!r} (the working directory is searched too)"
        ) from None
    except BadInput as error:
        raise BadInput(*(f"{field} {path!r}: {problem}" for problem in error.problems)) from None
    except Exception as error:
        raise BadInput(f"{field} {path!r}: importing {module_name!r} raised {cause(error)}") from error
    found = getattr(module, attribute, None)
    if found is None:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise BadInput(f"{field} {path!r}: {module_name!r} has no {attribute!r}{suggest(attribute, public)}")
    return _as_component(found, path, path)


def _as_component(found: Any, name: str, path: str) -> type[Component]:
    if inspect.isclass(found) and issubclass(found, Component):
        if not found.registered_name:
            found.registered_name = name
        return found
    if not callable(found):
        raise BadInput(f"{path!r} is {type(found).__name__}; accepted: a Component class or a function")
    return _from_function(found, name)


_functions: dict[tuple[Callable[..., Any], str], type[Component]] = {}


def _from_function(function: Callable[..., Any], name: str) -> type[Component]:
    if (function, name) not in _functions:
        fields: dict[str, Any] = {}
        hints = inspect.get_annotations(function, eval_str=True)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise BadInput(f"{name!r}: parameter {parameter}; accepted: parameters by name")
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, Any), default)
        cls = create_model(function.__name__, __base__=FunctionComponent, **fields)
        cls.function = staticmethod(function)
        cls.registered_name = name
        _functions[function, name] = cls
    return _functions[function, name]


class FromCommandLine(str):
    """A value given on the command line: a relative path in it is relative to the working directory."""


class FromFolder(str):
    """A value whose relative paths are relative to a folder of its own, whatever file it is put into."""

    folder: Path


def _component_validator(kind: str) -> BeforeValidator:
    def validate(value: Any, info: Any) -> Component:
        return build(kind, value, info.context, info.field_name or kind)

    return BeforeValidator(validate)


def component(kind: str) -> Any:
    """The pydantic type of a field that holds a component of a kind."""
    return Annotated[Component, _component_validator(kind)]


def _keep_origin(value: Any, info: Any) -> Any:
    if isinstance(value, FromFolder):
        return value.folder / value
    if isinstance(value, str) and not isinstance(value, FromCommandLine):
        base = (info.context or {}).get("folder")
        return Path(base) / value if base is not None else Path(value)
    return value


FilePath = Annotated[Path, AfterValidator(lambda path: path.resolve()), BeforeValidator(_keep_origin)]
"""A path: relative to the experiment file where it stands in one, else to the working directory; resolved on
reading."""
