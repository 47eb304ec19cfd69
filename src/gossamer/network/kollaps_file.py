"""Topology files of Kollaps: services, bridges, links and a schedule, checked and in gossamer's units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from xml.etree.ElementTree import ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gossamer.config.validation import bad_input
from gossamer.errors import BadInput, listed, suggest

_PARTS = {"config": "", "services": "service", "bridges": "bridge", "links": "link", "dynamic": "schedule"}
"""The parts of a file, and the elements in each."""
_EMULATION = {
    *("boot", "pool_period", "max_age", "image", "command", "port", "tags", "ip", "machinename"),
    *("topology_file", "controller_ip", "script", "activepaths"),
}
"""Attributes that start containers and machines, and are ignored."""
_UNCHANGING = {"time", "origin", "dest", "network"}
_BITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


def _bytes_per_second(text: Any) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)bps", str(text))
    rate = float(found[1]) * _BITS[found[2]] / 8 if found else 0.0
    if rate <= 0:
        raise ValueError("a number above 0 with Kbps, Mbps or Gbps")
    return rate


Name = Annotated[str, Field(min_length=1)]
Flag = Literal["true", "false"]
Rate = Annotated[float, BeforeValidator(_bytes_per_second)]  # a bandwidth, converted to bytes per second
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Delay = Annotated[Seconds, AfterValidator(lambda ms: ms / 1000)]  # milliseconds, converted to seconds
Drop = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0)]


class _Attributes(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Config(_Attributes):
    shortest_path: Literal["hop", "latency"] = "hop"


class Bridge(_Attributes):
    """A bridge between links."""

    name: Name


class Service(Bridge):
    """A service. ``replicas`` counts unless replicas join by the schedule."""

    replicas: Count = 1
    share: Flag = "false"
    reuse: Flag = "true"
    supervisor: Flag = "false"


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
    amount: Count = 1


@dataclass(frozen=True, slots=True)
class KollapsFile:
    """The contents of a file. Events are in order of time; ``metric`` is what shortest paths minimize."""

    services: dict[str, Service]
    bridges: dict[str, Bridge]
    links: list[KollapsLink]
    events: list[NodeEvent | LinkEvent]
    metric: Literal["hop", "latency"]


A = TypeVar("A", bound=_Attributes)


def read_kollaps(path: Path, field: str) -> KollapsFile:
    """Read a topology file. A BadInput refuses anything that is not Kollaps, or is not supported, and names the experiment's
    field and the element."""
    file = f"{field}: {path}"
    parts = _read_parts(path, file)

    def parsed(model: type[A], tag: str, number: int, attributes: dict[str, str]) -> A:
        given = {name: text for name, text in attributes.items() if name not in _EMULATION}
        try:
            return model.model_validate(given)
        except ValidationError as error:
            raise bad_input(error, model, f"{file}: <{tag}> {number}") from None

    def parse(model: type[A], tag: str) -> list[A]:
        return [parsed(model, tag, *each) for each in enumerate(parts.get(f"{tag}s", ()), 1)]

    services, bridges = parse(Service, "service"), parse(Bridge, "bridge")
    owners = {owner.name: owner for owner in (*services, *bridges)}
    if len(owners) < len(services) + len(bridges):
        raise BadInput(f"{file}: a name twice; accepted: a name for each service and bridge")
    links = parse(KollapsLink, "link")
    events: list[NodeEvent | LinkEvent] = []
    for number, each in enumerate(parts.get("dynamic", ()), 1):
        kind: type[NodeEvent | LinkEvent] = NodeEvent if "name" in each else LinkEvent
        events.append(parsed(kind, "schedule", number, each))
    for element in (*links, *events):
        if problem := _problem(element, owners):
            raise BadInput(f"{file}: {problem}")
    networks = {each.network for each in (*links, *events) if isinstance(each, _Ends) and each.network}
    if len(networks) > 1:
        raise BadInput(f"{file}: the networks {listed(networks)}; accepted: one network for all links")
    [config] = [parsed(_Config, "config", 1, each) for each in parts.get("config", [{}])]
    return KollapsFile(
        {service.name: service for service in services},
        {bridge.name: bridge for bridge in bridges},
        links,
        sorted(events, key=lambda event: event.time),
        config.shortest_path,
    )


def _read_parts(path: Path, file: str) -> dict[str, list[dict[str, str]]]:
    """The attributes of the elements in each part of a file. Kollaps uses attributes only, and no text."""
    try:
        # A document type is refused, because its entities could stand for anything.
        root = fromstring(path.read_bytes(), forbid_dtd=True)
    except DefusedXmlException:
        raise BadInput(f"{file}: a document type; accepted: XML without one") from None
    except (OSError, ParseError, LookupError, ValueError) as error:  # the last two: an unknown encoding
        raise BadInput(f"{file}: {error}; accepted: well-formed XML") from None
    if root.tag != "experiment" or root.attrib.keys() - _EMULATION:
        raise BadInput(f"{file}: <{root.tag}> with {listed(root.attrib)}; accepted: <experiment> with boot")
    if text := "".join(root.itertext()).strip():
        raise BadInput(f"{file}: {text!r}; accepted: elements and comments, without text")
    parts: dict[str, list[dict[str, str]]] = {}
    for part in root:
        if part.tag not in _PARTS or part.tag in parts:
            raise BadInput(f"{file}: <{part.tag}> in <experiment>; accepted: each of {listed(_PARTS)} once")
        for child in part:
            if child.tag != _PARTS[part.tag] or len(child):
                accepted = f"<{_PARTS[part.tag]}>, empty" if _PARTS[part.tag] else "nothing"
                raise BadInput(f"{file}: <{child.tag}> in <{part.tag}>; accepted: {accepted}")
        parts[part.tag] = [part.attrib] if part.tag == "config" else [child.attrib for child in part]
    if not {"services", "links"} <= parts.keys():
        raise BadInput(
            f"{file}: <experiment> has {listed(parts) or 'no parts'}; accepted: services and links"
        )
    return parts


def _problem(element: KollapsLink | LinkEvent | NodeEvent, owners: Mapping[str, Bridge]) -> str | None:
    """How a link or an event does not fit the services and bridges of the file."""
    named = [element.name] if isinstance(element, NodeEvent) else [element.origin, element.dest]
    for name in named:
        if name not in owners:
            return f"{name!r}{suggest(name, owners)}; accepted: a service or a bridge"
    if isinstance(element, NodeEvent):
        if element.action not in ("join", "leave") and not isinstance(owners[element.name], Service):
            return f"{element.action!r} of the bridge {element.name!r}; accepted: join, leave"
    elif element.origin == element.dest:
        return f"a link from {element.origin!r} to itself; accepted: two ends"
    elif isinstance(element, LinkEvent) and element.model_fields_set <= _UNCHANGING:
        return f"an event at {element.time:g} s that changes nothing; accepted: upload, download, latency, jitter, drop"
    return None
