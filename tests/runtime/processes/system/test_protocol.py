"""The schemas of the messages that members of a run send: what is outside of them is refused, text is cleaned and cut."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from gossamer.messages.tags import COUNTERS, Traffic
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Unpacker
from gossamer.runtime.processes.protocol import FromNode, FromWorker, JoinRequest, Row, Violation
from hostile_messages import (
    DEEP,
    HOSTILE,
    OF_NODES,
    OF_STRANGERS,
    OF_WORKERS,
    TRAFFIC,
    VALUES,
    places,
    plain,
    replaced,
)

ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\x9b1m \u202eback\rto\x00 zero"


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def taken(message: Any, kinds: Any = FromWorker) -> Any:
    """What the other end makes of plain values."""
    [decoded] = Unpacker(kinds).feed(framed(msgspec.msgpack.encode(message)))
    return decoded


def kind_of(message: Any) -> str:
    inner = message.message if isinstance(message, protocol.NodeReport) else message
    return type(inner).__name__


MESSAGES = [*((message, FromWorker) for message in OF_WORKERS), (OF_STRANGERS[0], JoinRequest)]


def test_every_kind_of_message_is_among_the_honest_ones() -> None:
    from_nodes, from_workers = (msgspec.inspect.type_info(kinds) for kinds in (FromNode, FromWorker))
    assert {kind.cls for kind in from_nodes.types} <= set(map(type, OF_NODES))  # type: ignore[attr-defined]
    assert {kind.cls for kind in from_workers.types} == set(map(type, OF_WORKERS))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("message", "kinds"), MESSAGES, ids=[kind_of(message) for message, _ in MESSAGES])
def test_no_field_takes_a_value_outside_its_range(message: Any, kinds: Any) -> None:
    """Each value of the message is replaced by each hostile one of its type. What is accepted is the same message with
    another text, or with what a field may also have."""
    honest = plain(message)
    assert taken(honest, kinds) == message
    accepted, errors = [], []
    for path, value in places(honest):
        for hostile in HOSTILE[type(value)]:
            try:
                taken(replaced(honest, path, hostile), kinds)
            except Violation as error:
                errors.append(str(error))
            else:
                accepted.append((path, hostile))
    assert all(text.isprintable() and len(text) < 3_000 for text in errors)
    inner = getattr(message, "message", None)
    for path, hostile in accepted:
        other = [hostile is None, hostile in ([], {}, b"")]
        if isinstance(inner, Row):
            other.append(path[:2] == (3, 4))  # any values
            other.append(path == (3, 2, 5))  # the loss of a diverging model
            other.append(path == (3, 1) and hostile == 1)  # a round
        traffic = {Row: (3, 3), protocol.Progress: (3, 3)}.get(type(inner))
        other.append(path == traffic and isinstance(hostile, dict))  # unknown counters are not read
        assert any(other), (path, str(hostile)[:100])


HOSTILE_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "not msgpack": b"\xc1",
    "a mapping": b"\x80",
    "an unknown kind": b"\x91\xa5Hello",
    "of the other direction": b"\x92\xa6Finish\xa1x",
    "too many values": b"\xdd\xff\xff\xff\xff",
    "half a text": b"\x92\xa5Event\xda\xff\xffx",
    "no UTF-8": b"\x93\xa5Event\xa4slow\xa2\xff\xfe",
    "a lone surrogate": b"\x93\xa5Event\xa4slow\xa3\xed\xa0\x80",
    "deep": b"\x97\xa3Row\x02"
    + msgspec.msgpack.encode([VALUES, TRAFFIC])[1:]
    + b"\x81\xa1x"
    + DEEP
    + b"\xc0\xc0",
    "a deep kind": DEEP,
    "an extension": b"\x92\xa4Done\xd4\x01\x00",
    "a timestamp": b"\x92\xa4Done\xd6\xff\x00\x00\x00\x00",
}


@pytest.mark.parametrize("name", HOSTILE_BODIES)
def test_hostile_bytes_are_refused(name: str) -> None:
    body = HOSTILE_BODIES[name]
    for kinds in (FromNode, FromWorker):
        with pytest.raises(Violation, match="can't be read"):
            list(Unpacker(kinds).feed(framed(body)))
    nested = b"\x95\xaaNodeReport\x00\x00" + body + b"\x80"
    with pytest.raises(Violation, match="can't be read"):
        list(Unpacker(FromWorker).feed(framed(nested)))


def test_text_is_cleaned_and_cut_at_both_ends() -> None:
    expected = "redbackto zero"
    event = protocol.Event("slow", f"{ESCAPES}\nand more")
    assert event.text.replace(" ", "") == (expected + "and more").replace(" ", "").replace("red", "red1m")
    assert taken(["Event", "slow", ESCAPES * 20], FromNode).text.isprintable()
    assert len(protocol.Event("slow", "x" * 10**6).text) == protocol.MAX_LINE
    assert taken(["Failed", ESCAPES, 2, f"a\n\tb{ESCAPES}"], FromNode).traceback.startswith("a\n\tbred")
    for message in (
        protocol.Progress(1, 0.0, TRAFFIC, ["x\x1b[1m" * 10**4] * 1_000),
        protocol.Failed("x" * 10**6, None, "y" * 10**6),
        protocol.Exited(ESCAPES),
        protocol.Saved(1, 1, 0.0, "x" * 10**6),
        protocol.Unreachable(1, ESCAPES),
    ):
        assert taken(plain(message), FromNode | protocol.Exited) == message
    for worker in (protocol.Refused([ESCAPES]), protocol.Differs(["x" * 10**6])):
        assert taken(plain(worker)) == worker


def row(**columns: Any) -> Row:
    return Row(2, VALUES, TRAFFIC, columns, None)


def test_row_has_the_values_of_its_node_and_no_others() -> None:
    fixed = {name: getattr(VALUES, name) for name in VALUES.__struct_fields__}
    given = {
        "node": 7,
        **fixed,
        "network_bytes": None,
        "moment": "round",
        **dict.fromkeys(COUNTERS, 3),
        "test_accuracy": math.nan,
        "note": "a\x1b[1mb",
    }
    sent = Row.of(2, given, None, None)
    assert sent.columns.keys() == {"test_accuracy", "note"}
    received = taken(plain(sent), FromNode).row(1, 99)
    assert received | {"test_accuracy": 0.0} == {
        **given,
        "node": 1,
        "network_bytes": 99,
        "test_accuracy": 0.0,
        "note": "ab",
    }


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({f"c{k}": 1 for k in range(10_001)}, "10,001 columns"),
        ({"a": "x" * 100_000}, "a text of 100,000 characters"),
        ({"a": [[0] * 50_000] * 25}, "more than 1,048,576 values"),
        ({"a": [{"x" * 1_000: 1}] * 10_000}, "more than 1,048,576 values"),
        ({"a": [b"bytes"]}, "a row with a bytes"),
        ({"a": {1.5: 1}}, "a key that is float"),
        ({"a": msgspec.msgpack.decode(b"\x91" * 100 + b"\xc0")}, "nested deeper"),
    ],
)
def test_row_that_no_segment_should_hold_is_refused_at_both_ends(columns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row(**columns)
    honest = plain(row())
    with pytest.raises(Violation, match=message):
        taken(replaced(honest, (4,), columns), FromNode)


def test_honest_extremes_are_accepted() -> None:
    """A hundred classes in each of a hundred evaluation sets, confusion matrices, and large counters."""
    per_class = {f"test{k}_accuracy_{c}": 0.5 for k in range(100) for c in range(100)}
    assert taken(plain(row(**per_class)), FromNode).columns == per_class
    matrices = {f"test{k}_confusion": [[c] * 100 for c in range(100)] for k in range(50)}
    assert taken(plain(row(**matrices)), FromNode).columns == matrices
    assert row(big=2**64 - 1, small=-(2**63)).columns == {"big": 2**64 - 1, "small": -(2**63)}
    traffic = Traffic(**dict.fromkeys(COUNTERS, 2**53))
    assert taken(plain(protocol.Progress(2**53, 1e10, traffic)), FromNode).traffic == traffic


@pytest.mark.parametrize(
    "host", ["10.0.0.1\0", "example.org", "", "127.0.0.1:80", "::1%eth0\x1b[1m", "999.1.1.1"]
)
def test_address_is_that_of_a_host(host: str) -> None:
    with pytest.raises(Violation, match="can't be read"):
        taken(["Ready", host, 80], FromNode)


@pytest.mark.parametrize("port", [0, -1, 65_536, 70_000, 2**63])
def test_port_is_one_that_exists(port: int) -> None:
    with pytest.raises(Violation, match="can't be read"):
        taken(["Ready", "::1", port], FromNode)
