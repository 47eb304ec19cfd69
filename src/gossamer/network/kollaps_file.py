"""Topology files of Kollaps: services, bridges, links and a schedule, checked and in gossamer's units."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import AttributesImpl

from defusedxml import DefusedXmlException
from defusedxml.sax import parseString
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
)

from gossamer.config.validation import bad_input
from gossamer.errors import BadInput, listed, suggest

_CHILDREN = {
    "experiment": ("config", "services", "bridges", "links", "dynamic"),
    "services": ("service",),
    "bridges": ("bridge",),
    "links": ("link",),
    "dynamic": ("schedule",),
}
_EMULATION = {
    *("boot", "pool_period", "max_age", "image", "command", "port", "tags", "ip", "machinename"),
    *("topology_file", "controller_ip", "script", "activepaths"),
}
"""Attributes that start containers and machines, and are ignored."""
_BITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class _Element:
    """An XML element without text: Kollaps uses attributes only. ``where`` is its location, for errors."""

    tag: str
    attributes: dict[str, str]
    where: str
    children: list[_Element] = field(default_factory=list)

    def refuse(self, problem: str) -> BadInput:
        return BadInput(f"{self.where} {problem}")


class _Builder(ContentHandler):
    """Builds a tree of elements; ``where`` is the file and its field in the experiment."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._file = where
        self._locator: Any = None
        self._open = [_Element("", {}, where)]

    @property
    def where(self) -> str:
        """The current location in the file."""
        return f"{self._file}, line {self._locator.getLineNumber()}:"

    @property
    def root(self) -> _Element:
        return self._open[0].children[0]

    def setDocumentLocator(self, locator: Any) -> None:  # noqa: N802
        self._locator = locator

    def startElement(self, name: str, attrs: AttributesImpl) -> None:  # noqa: N802
        element = _Element(name, dict(attrs.items()), f"{self.where} <{name}>")
        self._open[-1].children.append(element)
        self._open.append(element)

    def endElement(self, name: str) -> None:  # noqa: N802
        self._open.pop()

    def characters(self, content: str) -> None:
        if content.strip():
            raise BadInput(f"{self.where} {content.strip()!r}; accepted: elements and comments, without text")


def _read_xml(path: Path, field: str) -> _Element:
    builder = _Builder(f"{field}: {path}")
    try:
        # A document type is refused, because its entities could stand for anything.
        parseString(path.read_bytes(), builder, forbid_dtd=True)
    except OSError as error:
        raise BadInput(f"{field}: {path}: {error.strerror}; accepted: an XML file") from None
    except SAXParseException as error:
        raise BadInput(f"{builder.where} {error.getMessage()}; accepted: well-formed XML") from None
    except DefusedXmlException:
        raise BadInput(f"{builder.where} a document type; accepted: XML without one") from None
    return builder.root


def _bytes_per_second(text: Any) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)bps", str(text))
    rate = float(found[1]) * _BITS[found[2]] / 8 if found else 0.0
    if rate <= 0:
        raise ValueError("a number above 0 with Kbps, Mbps or Gbps")
    return rate


Name = Annotated[str, Field(min_length=1)]
Flag = Literal["true", "false"]
Rate = Annotated[float, BeforeValidator(_bytes_per_second)]
"""A bandwidth, converted to bytes per second."""
Delay = Annotated[NonNegativeFloat, Field(allow_inf_nan=False), AfterValidator(lambda ms: ms / 1000)]
"""Milliseconds, converted to seconds."""
Drop = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Attributes(BaseModel):
    """The attributes of an element, in gossamer's units."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    _where: str = PrivateAttr(default="")

    def refuse(self, problem: str) -> BadInput:
        """An error with the location of the element."""
        return BadInput(f"{self._where} {problem}")


class _Config(_Attributes):
    shortest_path: Literal["hop", "latency"] = "hop"


class Service(_Attributes):
    """A service. ``replicas`` counts unless replicas join by the schedule."""

    name: Name
    replicas: PositiveInt = 1
    share: Flag = "false"
    reuse: Flag = "true"
    supervisor: Flag = "false"


class Bridge(_Attributes):
    """A bridge between links."""

    name: Name


class _Ends(_Attributes):
    origin: Name
    dest: Name
    network: str | None = None


class KollapsLink(_Ends):
    """A link between each replica of one name and each of another. Without a download it leads one way."""

    upload: Rate
    download: Rate | None = None
    latency: Delay
    jitter: Delay = 0.0
    drop: Drop = 0.0


class LinkEvent(_Ends):
    """A link changes (without an action), leaves or joins. None leaves a value unchanged."""

    time: Seconds
    action: Literal["join", "leave"] | None = None
    upload: Rate | None = None
    download: Rate | None = None
    latency: Delay | None = None
    jitter: Delay | None = None
    drop: Drop | None = None


class NodeEvent(_Attributes):
    """Replicas of a service, or a bridge, join or leave."""

    time: Seconds
    name: Name
    action: Literal["join", "leave", "crash", "disconnect", "reconnect"]
    amount: PositiveInt = 1


@dataclass(frozen=True, slots=True)
class KollapsFile:
    """The contents of a file. Events are in order of time; ``metric`` is what shortest paths minimize."""

    services: dict[str, Service]
    bridges: dict[str, Bridge]
    links: list[KollapsLink]
    events: list[NodeEvent | LinkEvent]
    metric: Literal["hop", "latency"]


def read_kollaps(path: Path, field: str) -> KollapsFile:
    """Read a topology file.

    Args:
        path: the file.
        field: the experiment's field that names it, for errors.

    Raises:
        BadInput: for anything that is not Kollaps, or is not supported; names line and element.
    """
    root = _read_xml(path, field)
    if root.tag != "experiment":
        raise root.refuse("is the root; accepted: <experiment>")
    _check_children(root)
    _parse(_Attributes, root)
    parts = {part.tag: part for part in root.children}
    if len(parts) < len(root.children):
        raise root.refuse(f"has a part twice; accepted: each of {listed(list(parts))} once")
    for tag in ("services", "links"):
        if tag not in parts:
            raise root.refuse(f"has no <{tag}>; accepted: one")
    elements = {tag: parts[tag].children if tag in parts else [] for tag in _CHILDREN["experiment"]}
    services: dict[str, Service] = {}
    bridges: dict[str, Bridge] = {}
    for element in (*elements["services"], *elements["bridges"]):
        owner = _parse(Service, element) if element.tag == "service" else _parse(Bridge, element)
        if owner.name in services or owner.name in bridges:
            raise owner.refuse(f"name: {owner.name!r} again; accepted: a name for each service and bridge")
        if isinstance(owner, Service):
            services[owner.name] = owner
        else:
            bridges[owner.name] = owner
    names = {*services, *bridges}
    links = [_check_ends(_parse(KollapsLink, element), names) for element in elements["links"]]
    events = [_event(element, names, bridges) for element in elements["dynamic"]]
    networks = {each.network for each in (*links, *events) if not isinstance(each, NodeEvent)} - {None}
    if len(networks) > 1:
        raise root.refuse(
            f"has the networks {listed(sorted(map(str, networks)))}; accepted: one for all links"
        )
    metric = _parse(_Config, parts["config"]).shortest_path if "config" in parts else "hop"
    return KollapsFile(services, bridges, links, sorted(events, key=lambda event: event.time), metric)


A = TypeVar("A", bound=_Attributes)
E = TypeVar("E", bound=_Ends)


def _parse(model: type[A], element: _Element) -> A:
    """The checked attributes of an element, without those that only matter to emulation."""
    given = {name: text for name, text in element.attributes.items() if name not in _EMULATION}
    try:
        attributes = model.model_validate(given)
    except ValidationError as error:
        raise bad_input(error, model, element.where) from None
    attributes._where = element.where
    return attributes


def _check_ends(link: E, names: set[str]) -> E:
    """The same link, if it leads from one service or bridge to another."""
    for end, name in (("origin", link.origin), ("dest", link.dest)):
        if name not in names:
            raise link.refuse(f"{end}: {name!r}{suggest(name, names)}; accepted: a service or a bridge")
    if link.origin == link.dest:
        raise link.refuse(f"from {link.origin!r} to itself; accepted: two ends")
    return link


def _check_children(element: _Element) -> None:
    accepted = _CHILDREN.get(element.tag, ())
    for child in element.children:
        if child.tag not in accepted:
            raise child.refuse(f"in <{element.tag}>; accepted: {listed(accepted) or 'nothing'}")
        _check_children(child)


def _event(element: _Element, names: set[str], bridges: dict[str, Bridge]) -> NodeEvent | LinkEvent:
    if "name" not in element.attributes:
        change = _check_ends(_parse(LinkEvent, element), names)
        if change.model_fields_set <= {"time", "origin", "dest", "network"}:
            raise change.refuse("changes nothing; accepted: some of upload, download, latency, jitter, drop")
        return change
    event = _parse(NodeEvent, element)
    if event.name not in names:
        raise event.refuse(
            f"name: {event.name!r}{suggest(event.name, names)}; accepted: a service or a bridge"
        )
    if event.name in bridges and event.action not in ("join", "leave"):
        raise event.refuse(f"action: {event.action!r} of a bridge; accepted: join, leave")
    return event
