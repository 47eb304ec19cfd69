"""Node: send, broadcast, receive, drain and gather. Where a bandwidth is given, a byte takes a microsecond."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gossamer import Message, Model, Node, NodeWrapper, Part, RunFailed
from gossamer.messages import BEGIN_BYTES, wire_bytes
from gossamer.messages.tags import WINDOW
from scenario import FEATURES, MBPS, play

SLOW = {"name": "uniform", "bandwidth_mbps": MBPS}
FAR = {"name": "uniform", "latency_s": 0.25}
LARGE = bytes(500_000)


def seconds(tag: Any, payload: Any) -> float:
    return wire_bytes(tag, payload) / 1e6


# --- payloads ---


@pytest.mark.parametrize(
    "payload",
    [None, True, 7, 0.5, "text", b"bytes", [1, [2.0, None]], {"a": 1, 5: {"b": b""}}, {}, []],
)
def test_plain_payloads_arrive_unchanged(tmp_path: Path, payload: Any) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 0:
            node.send(1, payload, ("kind", 3))
            return None
        return await node.receive()

    message = play(tmp_path, script, network=FAR).values[1]
    assert (message.source, message.tag, message.payload, message.sent_at) == (0, ("kind", 3), payload, 0.0)


def test_payload_is_fixed_at_the_call(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            return (await node.receive()).payload
        vector, inner = torch.ones(4), [1]
        node.broadcast([2, 1], {"v": vector, "list": inner}, "m")
        vector.zero_()
        inner.append(2)
        await node.sleep(1)
        return None

    values = play(tmp_path, script, 3, network=FAR).values
    for got in (values[1], values[2]):
        assert (got["v"].tolist(), got["list"]) == ([1.0] * 4, [1])


def test_sent_parameters_are_the_snapshot_of_the_call(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            return (await node.receive()).payload
        node.parameters = torch.ones(FEATURES)
        node.send(1, node.parameters, "m")
        node.parameters = torch.zeros(FEATURES)
        await node.train()
        return None

    assert play(tmp_path, script, network=FAR).values[1].tolist() == [1.0] * FEATURES


def test_stored_vector_and_its_slices_are_sent_without_a_copy(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 0:
            v = torch.arange(float(FEATURES))
            stored = node.store(v)
            v.zero_()
            for to in (1, 2):
                node.send(to, stored[1:], "tail")
            with pytest.raises(ValueError, match="node.store"):
                node.store(stored[1:])
            return stored
        return (await node.receive("tail")).payload

    values = play(tmp_path, script, 3).values
    assert values[0].tolist() == [0.0, 1.0, 2.0]
    for rank in (1, 2):
        assert values[rank].data_ptr() == values[0][1:].data_ptr()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_writing_a_sent_vector_in_place_fails_its_owner(tmp_path: Path, who: str) -> None:
    """The sender writes while the message is in flight; the receiver writes the row of another node."""

    async def script(node: Node) -> None:
        if node.rank == 0:
            vector = node.parameters
            node.send(1, vector, "m")
            if who == "sender":
                vector.add_(1.0)
            await node.sleep(1)
            _ = node.parameters
        else:
            message = await node.receive()
            message.payload.add_(1.0)

    with pytest.raises(RunFailed, match="modified in place") as failure:
        play(tmp_path, script, network=FAR, initial="independent")
    assert failure.value.node == 0


HOLDERS: dict[str, tuple[Any, Any]] = {
    "vector": (lambda vector: vector, lambda payload: payload),
    "dict": (lambda vector: {"a": {"b": vector}}, lambda payload: payload["a"]["b"]),
    "list": (lambda vector: [1, vector], lambda payload: payload[1]),
    "part": (lambda vector: Part(vector, torch.arange(len(vector)), 5), lambda payload: payload.values),
    "model": (lambda vector: Model(vector, torch.ones(2)), lambda payload: payload.parameters),
}
"""How a payload holds a vector, and how to get it out again."""


@pytest.mark.parametrize("how", ["receive", "drain", "gather"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_in_place_write_by_one_receiver_is_detected_by_the_next(
    tmp_path: Path, holder: str, how: str
) -> None:
    wrap, unwrap = HOLDERS[holder]

    async def script(node: Node) -> None:
        if node.rank == 0:
            node.broadcast([1, 2], wrap(torch.ones(FEATURES)), "m")
            await node.sleep(5)
        elif node.rank == 1:
            unwrap((await node.receive("m")).payload).add_(1.0)
        else:
            await node.sleep(2)
            if how == "receive":
                await node.receive("m")
            elif how == "drain":
                node.drain()
            else:
                await node.gather([0], "m")

    with pytest.raises(
        RunFailed, match=r"node 2 failed in round 0: .*message \('m',\) from node 0 was modified in place"
    ):
        play(tmp_path, script, 3, network=FAR)


def test_receiver_may_change_containers_of_a_message(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        sent = {"list": [1], "inner": {"x": torch.ones(2)}}
        if node.rank == 0:
            node.broadcast([1, 2], sent, "m")
            await node.sleep(1)
            return sent["list"]
        got = (await node.receive()).payload
        seen = (list(got["list"]), set(got["inner"]))
        got["list"].append(node.rank)
        del got["inner"]["x"]
        return seen

    for network in (FAR, SLOW):
        values = play(tmp_path, script, 3, network=network).values
        assert values == {0: [1], 1: ([1], {"x"}), 2: ([1], {"x"})}


@pytest.mark.parametrize("to", [0, 2, -1])
def test_sending_to_oneself_or_an_unknown_rank_is_refused(tmp_path: Path, to: int) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            with pytest.raises(
                ValueError, match=rf"node 0: send to ranks \[{to}\]; accepted: 0 to 1, except its own rank"
            ):
                node.send(to, None, "m")
            with pytest.raises(ValueError, match=rf"send to ranks .*{to}"):
                node.broadcast([1, to], None, "m")

        await node.sleep(1)
        assert node.drain() == []

    play(tmp_path, script)


def test_unsupported_payload_or_tag_is_refused_at_the_call(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        with pytest.raises(TypeError, match="set can't be sent"):
            node.send(1 - node.rank, {1, 2}, "m")
        with pytest.raises(TypeError, match=r"tag \('m', True\): bool in a tag; accepted: str, int"):
            node.send(1 - node.rank, None, ("m", True))

    play(tmp_path, script)


def test_only_messages_above_the_size_limit_are_refused(tmp_path: Path) -> None:
    size = wire_bytes("m", bytes(100))

    async def script(node: Node) -> Any:
        if node.rank:
            return (await node.receive()).payload
        with pytest.raises(
            ValueError, match=rf"message of {size + 1} bytes on the wire; accepted: at most {size} "
        ):
            node.send(1, bytes(101), "m")
        node.send(1, bytes(100), "m")
        return None

    assert play(tmp_path, script, limit=size - BEGIN_BYTES).values[1] == bytes(100)


# --- timing and cancellation ---


def test_messages_leave_one_after_the_other_in_order(tmp_path: Path) -> None:
    sizes = [1000, 50, 3000]

    async def script(node: Node) -> Any:
        if node.rank:
            return [((await node.receive()).tag[0], node.now()) for _ in sizes]
        for number, size in enumerate(sizes):
            node.send(1, bytes(size), number)
        assert node.now() == 0.0
        return None

    arrivals = play(tmp_path, script, network=SLOW).values[1]
    assert [number for number, _ in arrivals] == [0, 1, 2]
    for number, at in arrivals:
        sent = sum(seconds(k, bytes(size)) for k, size in enumerate(sizes[: number + 1]))
        assert at == pytest.approx(sent, abs=1e-9)


def test_awaiting_a_small_message_returns_at_once(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            await node.send(1, bytes(1000), "m")
            assert node.now() == 0.0

    play(tmp_path, script, network={**SLOW, "latency_s": 0.25})


def test_awaiting_a_large_message_waits_for_all_but_one_window(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            await node.receive()
            return node.now()
        await node.send(1, LARGE, "m")
        return node.now()

    values = play(tmp_path, script, network={**SLOW, "latency_s": 0.25}).values
    size = wire_bytes("m", LARGE)
    assert values[1] == pytest.approx(0.25 + size / 1e6, abs=1e-9)
    # The byte after which one window remains takes one latency to arrive; its acknowledgement takes another.
    assert values[0] == pytest.approx((size - WINDOW) / 1e6 + 2 * 0.25, abs=1e-9)


def test_cancelled_queued_message_never_leaves(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            return [((await node.receive()).tag[0], node.now()) for _ in range(2)]
        _, second, _ = (node.send(1, LARGE, number) for number in range(3))
        await node.sleep(0.1)
        assert second.cancel() is True
        assert second.cancel() is True  # a second call gives the same answer
        await second  # nothing left to wait for
        assert node.now() == 0.1
        await node.sleep(2)
        return node.traffic

    values = play(tmp_path, script, network=SLOW).values
    size = wire_bytes(0, LARGE)
    assert values[1] == [(0, pytest.approx(size / 1e6)), (2, pytest.approx(2 * size / 1e6))]


def test_message_cancelled_in_flight_counts_the_bytes_sent(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 0:
            sending = node.send(1, LARGE, "m")
            await node.sleep(0.1)
            assert sending.cancel() is True
            assert sending.cancel() is True
            await node.sleep(0.1)
            assert sending.cancel() is True
        await node.sleep(1)
        return node.traffic

    played = play(tmp_path, script, network=SLOW)
    sender, receiver = played.values[0], played.values[1]
    assert sender.bytes_sent == 100_000
    assert sender.messages_sent == 0
    assert receiver.messages_received == 0


def test_cancelling_in_flight_starts_the_next_message_at_once(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            message = await node.receive()
            return message.tag, node.now()
        first = node.send(1, LARGE, "first")
        node.send(1, bytes(1000), "second")
        await node.sleep(0.1)
        first.cancel()
        await node.sleep(1)
        return None

    tag, at = play(tmp_path, script, network=SLOW).values[1]
    assert tag == ("second",)
    assert at == pytest.approx(0.1 + seconds("second", bytes(1000)), abs=1e-9)


def test_fully_sent_message_cannot_be_cancelled(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            return (await node.receive()).payload
        sending = node.send(1, b"x", "m")
        await node.sleep(0.1)
        assert sending.cancel() is False
        return None

    assert play(tmp_path, script, network={**SLOW, "latency_s": 0.5}).values[1] == b"x"


def test_cancelling_a_waiting_task_does_not_cancel_its_message(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            return len((await node.receive()).payload)
        sending = node.send(1, LARGE, "m")

        async def wait() -> None:
            await sending

        task = node.spawn(wait())
        await node.sleep(0.1)
        task.cancel()
        await node.sleep(1)
        return None

    assert play(tmp_path, script, network=SLOW).values[1] == len(LARGE)


def test_traffic_counts_whole_frames_on_both_sides(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 0:
            node.send(1, bytes(1000), "a")
            node.send(1, bytes(20_000), "b")
        await node.sleep(1)
        return node.traffic

    values = play(tmp_path, script, network=SLOW).values
    size = wire_bytes("a", bytes(1000)) + wire_bytes("b", bytes(20_000))
    assert (values[0].bytes_sent, values[0].messages_sent, values[0].bytes_received) == (size, 2, 0)
    assert (values[1].bytes_received, values[1].messages_received, values[1].bytes_sent) == (size, 2, 0)


# --- receive and drain ---


def test_drain_newest_keeps_one_message_per_sender_and_tag(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            for value in range(3):
                node.send(0, value, ("part", 1))
            node.send(0, "other", ("part", 2))
            return None
        await node.sleep(1)
        taken = node.drain("part", newest=True)
        return [(m.source, m.tag, m.payload) for m in taken], node.traffic.messages_superseded

    taken, superseded = play(tmp_path, script, 3, network=FAR).values[0]
    assert sorted(taken) == [(j, ("part", c), p) for j in (1, 2) for c, p in ((1, 2), (2, "other"))]
    assert superseded == 4


def test_message_kept_under_another_tag_is_taken_by_that_tag(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            for value in range(2):
                node.send(0, value, ("part", value))
            return None
        received = [(await node.receive("part", keep_as=("kept", 1))).payload for _ in range(2)]
        assert node._runtime.mailbox.take_ages() == (None, None)
        await node.sleep(3)
        [message] = node.drain("kept", newest=True)
        assert node._runtime.mailbox.take_ages() == (3.1, 3.1)
        with pytest.raises(ValueError, match=r"keep_as \('part', 2\) begins with tag 'part'; accepted: one"):
            await node.receive("part", keep_as=("part", 2))
        return received, message.tag, message.payload, message.sent_at, node.traffic.messages_superseded

    network = {"name": "uniform", "latency_s": 0.1}
    assert play(tmp_path, script, network=network).values[0] == ([0, 1], ("kept", 1), 1, 0.0, 1)


def test_tags_match_by_prefix_and_sources_by_rank(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            for tag in (("a", 1), ("a", 2), "b", 7):
                node.send(0, node.rank, tag)
            return None
        await node.sleep(1)
        got = [
            await node.receive(("a", 2)),
            await node.receive("a", source=2),
            await node.receive(source=2),
            await node.receive(7),
            await node.receive(),
        ]
        rest = node.drain()
        assert node.drain() == []
        return [(message.source, message.tag) for message in (*got, *rest)]

    got = play(tmp_path, script, 3).values[0]
    assert got[:5] == [(1, ("a", 2)), (2, ("a", 1)), (2, ("a", 2)), (1, (7,)), (1, ("a", 1))]
    assert sorted(got[5:], key=str) == sorted([(1, ("b",)), (2, ("b",)), (2, (7,))], key=str)


def test_int_tag_does_not_match_its_text(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            node.send(0, None, "1")
            return None
        await node.sleep(1)
        assert node.drain(1) == []
        return len(node.drain("1"))

    assert play(tmp_path, script).values[0] == 1


def test_drain_takes_matching_messages_oldest_first(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            await node.sleep(0.1 * node.rank)
            for number in range(2):
                node.send(0, number, ("x", number))
            node.send(0, None, "y")
            return None
        assert node.drain() == []
        await node.sleep(1)
        first = [(message.source, message.payload) for message in node.drain("x", source=2)]
        second = [(message.source, message.payload) for message in node.drain("x")]
        return first, second, len(node.drain())

    first, second, rest = play(tmp_path, script, 3).values[0]
    assert first == [(2, 0), (2, 1)]
    assert second == [(1, 0), (1, 1)]
    assert rest == 2


def test_timeout_names_the_missing_message(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            with pytest.raises(TimeoutError, match=r"node 0: tag \('m', 3\) from ranks \[1\] .* 0.5 s"):
                await node.receive(("m", 3), source=1, timeout=0.5)
            assert node.now() == 0.5
            with pytest.raises(TimeoutError):
                await node.receive(timeout=0)
            assert node.now() == 0.5

    play(tmp_path, script)


def test_message_delivered_at_the_timeout_is_received(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 0:
            node.send(1, "just", "m")
            return None
        return (await node.receive("m", timeout=0.25)).payload, node.now()

    assert play(tmp_path, script, network=FAR).values[1] == ("just", 0.25)


def test_gather_includes_a_message_delivered_at_its_timeout(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            node.send(0, node.rank, "m")
            return None
        inbox = await node.gather([1, 2], "m", timeout=0.25)
        return dict(inbox), inbox.missing

    assert play(tmp_path, script, 3, network=FAR).values[0] == ({1: 1, 2: 2}, ())


def test_cancelling_a_receiver_on_delivery_keeps_the_message(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 0:
            node.send(1, "kept", "m")
            return None
        receiving = node.spawn(node.receive("m"))
        await node.train()  # ends at the delivery: the receiver is woken but has not run yet
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        return node.now(), [message.payload for message in node.drain()]

    compute = {"name": "constant", "seconds_per_step": 0.25}
    assert play(tmp_path, script, network=FAR, compute=compute).values[1] == (0.25, ["kept"])


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sends=st.lists(st.integers(0, 4), max_size=6),
    cancels=st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_cancelled_receivers_lose_no_message(tmp_path: Path, sends: list[int], cancels: list[int]) -> None:
    """However the receivers end, each message is taken once or still in the mailbox."""

    async def script(node: Node) -> Any:
        if node.rank:
            last = 0
            for number, at in enumerate(sorted(sends)):
                await node.sleep(at - last)
                last = at
                node.send(0, number, "m")
            return None
        tasks = [node.spawn(node.receive("m")) for _ in cancels]
        for second in range(5):
            await node.sleep(1 if second else 0)
            for task, at in zip(tasks, cancels, strict=True):
                if at == second:
                    task.cancel()
        await node.sleep(2)
        taken = [task.result() for task in tasks if not task.cancelled()]
        return sorted(message.payload for message in [*taken, *node.drain()])

    assert play(tmp_path, script).values[0] == list(range(len(sends)))


# --- gather ---


def test_gather_gives_payloads_in_rank_order(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            await node.sleep(1.0 - 0.1 * node.rank)
            node.send(0, 10 * node.rank, ("m", 0))
            return None
        inbox = await node.gather({3, 1, 2}, "m")
        assert node.now() == pytest.approx(0.9)
        return list(inbox.items()), inbox.missing

    assert play(tmp_path, script, 4).values[0] == ([(1, 10), (2, 20), (3, 30)], ())


def test_gather_from_no_ranks_returns_at_once(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        inbox = await node.gather([], "m")
        return dict(inbox), inbox.missing, node.now()

    assert play(tmp_path, script, 1).values[0] == ({}, (), 0.0)


def test_gather_at_least_returns_all_messages_present(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            await node.sleep([0.0, 0.1, 0.2, 0.2, 0.3][node.rank])
            node.send(0, node.rank, "m")
            return None
        inbox = await node.gather([1, 2, 3, 4], "m", at_least=2)
        return dict(inbox), inbox.missing, node.now()

    inbox, missing, now = play(tmp_path, script, 5).values[0]
    assert now == pytest.approx(0.2)
    assert {1, 2} <= set(inbox) <= {1, 2, 3}
    assert sorted({*inbox, *missing}) == [1, 2, 3, 4]


def test_late_messages_for_a_gathered_tag_are_counted_and_dropped(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 1:
            node.send(0, "early", ("m", 0))
        elif node.rank == 2:
            await node.sleep(1)
            node.send(0, "late", ("m", 0))
            node.send(0, "next", ("m", 1))
        else:
            inbox = await node.gather([1, 2], ("m", 0), timeout=0.5)
            assert node.now() == 0.5
            await node.sleep(1)
            rest = [message.payload for message in node.drain()]
            return dict(inbox), inbox.missing, rest, node.traffic.messages_late
        return None

    assert play(tmp_path, script, 3).values[0] == ({1: "early"}, (2,), ["next"], 1)


def test_each_gather_with_a_missing_message_drops_one(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            await node.sleep(1)
            for number in range(3):
                node.send(0, number, "m")
            return None
        missing = [(await node.gather([1], "m", timeout=0.25)).missing for _ in range(2)]
        await node.sleep(1)
        return missing, [message.payload for message in node.drain()], node.traffic.messages_late

    assert play(tmp_path, script).values[0] == ([(1,), (1,)], [2], 2)


def test_experiment_sets_the_default_timeout(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 0:
            inbox = await node.gather([1], "m")
            inbox_sooner = await node.gather([1], "other", timeout=0.25)
            return inbox.missing, inbox_sooner.missing, node.now()
        return None

    played = play(tmp_path, script, gather={"timeout_s": 0.5})
    assert played.values[0] == ((1,), (1,), 0.75)


def test_second_message_of_a_sender_waits_for_the_next_gather(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            node.send(0, "first", "m")
            node.send(0, "second", "m")
            return None
        return [dict(await node.gather([1], "m")) for _ in range(2)]

    assert play(tmp_path, script).values[0] == [{1: "first"}, {1: "second"}]


def test_gather_waits_again_when_another_task_takes_a_message(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 1:
            node.send(0, "for the receiver", "m")
            await node.sleep(2)
            node.send(0, "for the gather", "m")
        elif node.rank == 2:
            await node.sleep(1)
            node.send(0, "two", "m")
        else:
            receiving = node.spawn(node.receive("m", source=1))
            inbox = await node.gather([1, 2], "m")
            return (await receiving).payload, dict(inbox), inbox.missing
        return None

    received, inbox, missing = play(tmp_path, script, 3).values[0]
    assert received == "for the receiver"
    assert missing == ()
    assert inbox == {1: "for the gather", 2: "two"}


def test_cancelled_gather_takes_nothing(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 1:
            node.send(0, "here", "m")
        if node.rank == 0:
            gathering = node.spawn(node.gather([1, 2], "m"))
            await node.sleep(1)
            gathering.cancel()
            await node.sleep(1)
            return [message.payload for message in node.drain()]
        return None

    assert play(tmp_path, script, 3).values[0] == ["here"]


# --- wrappers ---


class Note(NodeWrapper):
    """Appends its mark to each payload; drops messages tagged with the mark."""

    mark: str

    def outgoing(self, node: Node, to: int, payload: Any, tag: tuple[str | int, ...]) -> Any:
        return [*payload, f"{self.mark} out to {to}"]

    def incoming(self, node: Node, message: Message) -> Message | None:
        if message.tag == (self.mark,):
            return None
        return Message(message.source, message.tag, [*message.payload, f"{self.mark} in"], message.sent_at)


def test_wrappers_apply_in_order_outgoing_and_reversed_incoming(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 0:
            node.broadcast([1, 2], ["hello"], "m")
            node.send(1, [], "second")
        await node.sleep(1)
        return [message.payload for message in node.drain()]

    wrappers = [{"name": f"{__name__}:Note", "mark": mark} for mark in ("first", "second")]
    values = play(tmp_path, script, 3, wrappers=wrappers).values
    for rank in (1, 2):
        out = [f"first out to {rank}", f"second out to {rank}"]
        assert values[rank] == [["hello", *out, "second in", "first in"]]
