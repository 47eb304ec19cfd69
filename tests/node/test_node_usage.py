"""Staleness, idle time and link usage, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from gossamer import Node, Run
from gossamer.errors import BadInput
from scenario import MBPS, experiment, play

BYTE_S = 1e-6
"""Seconds per byte at :data:`MBPS`."""
UPLINKS = {"name": "uniform", "uplink_mbps": MBPS}


def row(run: Run, node: int, round: int) -> dict[str, Any]:
    return run.metrics.row(by_predicate=(pl.col("node") == node) & (pl.col("round") == round), named=True)


def recorded(out: Path, script: Any, rounds: int = 2, **fields: Any) -> Run:
    return play(out, script, evaluation={"every_rounds": 1}, stop={"rounds": rounds}, **fields).run


def test_shares_cover_the_time_since_the_previous_row(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            await node.train()  # from 0 to 1 s, then nothing until 4
            node.send(1, torch.zeros(250_000), "a")  # a second and a little on the uplink
            await node.sleep(3.0)
            await node.end_round(0)
            computing = node.spawn(node.train(2))  # from 4 to 6, across a row at 5
            await node.sleep(1.0)
            await node.end_round(1)
            await computing
            await node.sleep(2.0)
            await node.end_round(2)

    run = recorded(tmp_path, script, rounds=3, network=UPLINKS)
    rows = [row(run, 0, r) for r in range(4)]
    assert [entry["time_s"] for entry in rows] == [0.0, 4.0, 5.0, 8.0]
    assert [entry["idle_share"] for entry in rows] == [None, 3 / 4, 0.0, 2 / 3]
    sent = rows[1]["bytes_sent"] * BYTE_S
    assert 1.0 < sent < 1.001
    assert [entry["uplink_share"] for entry in rows] == [None, pytest.approx(sent / 4, abs=1e-9), 0.0, 0.0]


def test_cancelled_message_uses_the_uplink_until_cancelled(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            first, queued = (node.send(1, torch.zeros(10**6), tag) for tag in ("a", "b"))
            await node.sleep(1.0)
            await node.end_round(0)  # a quarter of the first message is sent
            await node.sleep(1.0)
            assert queued.cancel()  # it never used the uplink
            assert first.cancel()
            await node.sleep(3.0)
            await node.end_round(1)

    run = recorded(tmp_path, script, network=UPLINKS)
    assert [row(run, 0, r)["uplink_share"] for r in (1, 2)] == [1.0, pytest.approx(1 / 4)]
    assert row(run, 0, 2)["bytes_sent"] == 2_000_000


@pytest.mark.parametrize("sharing", ["fifo", "fair", "rtt-fair"])
def test_downlink_share_counts_bytes_received_before_a_cancel(tmp_path: Path, sharing: str) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            node.send(1, torch.zeros(125_000), "a")  # half a second and a little on either link
            await node.sleep(1.0)
            last = node.send(1, torch.zeros(10**6), "b")  # four seconds; cancelled after two
            await node.sleep(2.0)
            assert last.cancel()
        if node.rank == 1:
            for number, seconds in enumerate((1.0, 1.0, 2.0)):
                await node.sleep(seconds)
                await node.end_round(number)

    links = {"name": "uniform", "bandwidth_mbps": MBPS, "latency_s": 0.25, "sharing": sharing}
    run = recorded(tmp_path, script, rounds=3, network=links)
    rows = [row(run, 1, r) for r in range(4)]
    first = rows[1]["bytes_received"] * BYTE_S
    assert 0.5 < first < 0.501
    shares = [entry["downlink_share"] for entry in rows]
    assert shares == [None, pytest.approx(first, abs=1e-6), 0.0, pytest.approx(2.0 / 2, abs=1e-6)]
    assert [row(run, 1, r)["uplink_share"] for r in (1, 2, 3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("sharing", ["fifo", "fair", "rtt-fair"])
def test_traffic_counts_the_bytes_sent_so_far(tmp_path: Path, sharing: str) -> None:
    """The count grows long before anything arrives; a snapshot of it doesn't change afterwards."""

    async def script(node: Node) -> list[tuple[int, int]]:
        if node.rank == 1:
            return []
        node.send(1, torch.zeros(2_500), "a")  # ten milliseconds and a little
        node.send(1, torch.zeros(250_000), "b")
        seen = [node.traffic]
        await node.sleep(0.1)
        seen.append(node.traffic)
        await node.sleep(2.0)
        seen.append(node.traffic)
        await node.end_round(0)
        return [(traffic.messages_sent, traffic.bytes_sent) for traffic in seen]

    network = {**UPLINKS, "latency_s": 5.0, "sharing": sharing}
    played = play(tmp_path, script, network=network, evaluation={"every_rounds": 1})
    last = row(played.run, 0, 1)["bytes_sent"]
    assert 1_010_000 < last < 1_011_000
    assert played.values[0] == [(0, 0), (1, 100_000), (2, last)]


@pytest.mark.parametrize("sharing", ["fifo", "fair", "rtt-fair"])
def test_unfinished_sending_is_in_the_timeline_up_to_the_end(tmp_path: Path, sharing: str) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            await node.sleep(1.0)
            node.send(1, torch.zeros(10**6), "a")
            node.send(1, torch.zeros(10**6), "b")  # never starts
            await node.sleep(2.0)
        await node.sleep(9.0)

    stop, asked = {"time_s": 4.0}, {"every_s": 2.0, "timeline": {"to_s": 20.0}}
    run = play(tmp_path, script, network={**UPLINKS, "sharing": sharing}, evaluation=asked, stop=stop).run
    seen = run.timeline.select("node", "kind", "start_s", "end_s", "to", "bytes").rows()
    assert seen == [(0, "send", 1.0, 4.0, 1, 3_000_000)]


def test_cancelled_computation_counts_as_busy_until_cancelled(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        running, queued = node.spawn(node.train(4)), node.spawn(node.train(4))
        await node.sleep(1.0)
        running.cancel()
        await node.sleep(1.0)
        queued.cancel()
        await node.sleep(2.0)
        await node.end_round(0)

    run = recorded(tmp_path, script, rounds=1)
    assert row(run, 0, 1)["idle_share"] == 1 / 2


def test_staleness_is_the_age_of_messages_taken_since_the_last_row(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        if node.rank > 0:
            await node.sleep(node.rank)  # sent at 1, 2, 3 s
            node.send(0, node.rank, ("round", 0))
            node.send(0, node.rank, "more")
            node.send(0, node.rank, "more")
            return
        await node.end_round(0)
        await node.sleep(5.0)
        assert list(await node.gather([1, 2, 3], ("round", 0))) == [1, 2, 3]  # 4, 3 and 2 s old
        await node.end_round(1)
        await node.receive("more", source=3)  # 2 s
        await node.sleep(1.0)
        node.drain("more", newest=True)  # of 1 (5 s), 2 (4 s) and 3 (3 s); superseded messages were not taken
        await node.end_round(2)
        await node.end_round(3)

    run = recorded(tmp_path, script, nodes=4, rounds=4)
    rows = [row(run, 0, r) for r in range(5)]
    assert [entry["staleness_s"] for entry in rows] == [None, None, 3.0, 3.5, None]
    assert [entry["staleness_max_s"] for entry in rows] == [None, None, 4.0, 5.0, None]
    assert [entry["messages_received"] for entry in rows] == [0, 0, 9, 9, 9]
    assert [entry["messages_superseded"] for entry in rows] == [0, 0, 0, 2, 2]
    assert [entry["messages_taken"] for entry in rows] == [0, 0, 3, 7, 7]


def test_message_taken_on_arrival_is_as_old_as_its_transfer(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            node.send(1, torch.zeros(250_000), "a")
        else:
            await node.receive("a")
        await node.end_round(0)

    network = {"name": "uniform", "bandwidth_mbps": MBPS, "latency_s": 0.5}
    run = recorded(tmp_path, script, rounds=1, network=network)
    received = row(run, 1, 1)
    assert received["staleness_s"] == pytest.approx(0.5 + received["bytes_received"] * BYTE_S, abs=1e-8)
    assert received["idle_share"] == 1.0


def test_timeline_holds_computations_and_sendings(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        peer = 1 - node.rank
        if node.rank == 0:
            await node.train()  # 0 to 1
            node.send(peer, torch.zeros(125_000), "a")  # from 1 s, one after the other
            node.send(peer, torch.zeros(250_000), "b")
            await node.sleep(2.0)
            await node.train(2)  # 3 to 5
        else:
            await node.receive("a")
            await node.evaluate(on="train")  # a forward pass over one full batch: a third of a step
            await node.receive("b")
            cancelled = node.send(peer, torch.zeros(10**6), "c")
            await node.sleep(0.5)
            assert cancelled.cancel()
        await node.end_round(0)

    window = {"from_s": 0.0, "to_s": 10.0, "nodes": 2}
    played = play(tmp_path, script, network=UPLINKS, evaluation={"every_rounds": 1, "timeline": window})
    a, b = (row(played.run, 0, 1)["bytes_sent"] * share * BYTE_S for share in (1 / 3, 2 / 3))
    rows = played.run.timeline.to_dicts()
    seen = [
        (entry["node"], entry["kind"], entry["start_s"], entry["end_s"], entry["to"], entry["bytes"])
        for entry in rows
    ]
    assert [(node, kind, to) for node, kind, _, _, to, _ in seen] == [
        *((0, "train", None), (0, "send", 1), (0, "send", 1), (0, "train", None)),
        *((1, "evaluate", None), (1, "send", 0)),
    ]
    # Headers take about a hundred bytes, which is a tenth of a millisecond.
    times = [seconds for _, _, start_s, end_s, _, _ in seen for seconds in (start_s, end_s)]
    first = [0.0, 1.0, 1.0, 1 + a, 1 + a, 1 + a + b, 3.0, 5.0]
    second = [1 + a, 1 + a + 1 / 3, 1 + a + b, 1.5 + a + b]
    assert times == pytest.approx([*first, *second], abs=2e-4)
    assert [nbytes for *_, nbytes in seen if nbytes] == pytest.approx([a * 1e6, b * 1e6, 500_000], abs=200)


def test_timeline_is_limited_to_its_window_and_nodes(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        for _ in range(6):
            await node.train()
        await node.end_round(0)

    window = {"from_s": 2.0, "to_s": 3.5, "nodes": [2, 0]}
    run = play(tmp_path, script, nodes=3, evaluation={"every_rounds": 1, "timeline": window}).run
    assert run.timeline.select("node", "start_s", "end_s").rows() == [
        *((0, 2.0, 3.0), (0, 3.0, 4.0), (2, 2.0, 3.0), (2, 3.0, 4.0)),
    ]


def test_unfinished_computation_is_in_the_timeline_up_to_the_end(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        await node.train(10)

    window = {"to_s": 20.0}
    stop = {"time_s": 4.0}
    run = play(tmp_path, script, evaluation={"every_s": 2.0, "timeline": window}, stop=stop).run
    assert run.timeline.select("node", "kind", "start_s", "end_s").rows() == [
        (node, "train", 0.0, 4.0) for node in (0, 1)
    ]


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ({"from_s": 2.0, "to_s": 2.0}, "accepted: more than from_s, 2.0"),
        ({"from_s": -1.0, "to_s": 2.0}, "evaluation.timeline.from_s: got -1.0"),
        ({"to_s": 2.0, "nodes": [0, 2]}, "evaluation.timeline.nodes: got [0, 2]; accepted: ranks 0 to 1"),
        ({"to_s": 2.0, "nodes": 0}, "evaluation.timeline.nodes"),
        ({"from_s": 2.0}, "evaluation.timeline.to_s"),
    ],
)
def test_invalid_timeline_window_is_refused(window: dict[str, Any], said: str) -> None:
    async def script(node: Node) -> None: ...

    with pytest.raises(BadInput) as caught:
        experiment(script, evaluation={"timeline": window})
    assert said in str(caught.value)


def test_tick_and_round_rows_of_one_instant_agree(tmp_path: Path) -> None:
    """Rows include all that happens at their instant, also at the end of the run."""

    async def script(node: Node) -> None:
        async for r in node.rounds():
            await node.train()  # a second
            node.broadcast(await node.neighbors(), node.parameters, tag=r)
            await node.mix(await node.gather(await node.neighbors(), tag=r), node.mixing_weights())

    run = play(
        tmp_path, script, evaluation={"every_rounds": 1, "every_s": 1.0}, stop={"rounds": 9, "time_s": 3.0}
    ).run
    columns = ["time_s", "round", "test_loss", "messages_received", "bytes_sent"]
    rows = run.metrics.filter(pl.col("node") == 0).sort("time_s")
    grid, rounds = (
        rows.filter((pl.col("time_s") > 0) & pl.col("moment").str.contains(kind)).select(columns)
        for kind in ("tick", "round")
    )
    assert grid["round"].to_list() == [1, 2, 3]
    assert grid.equals(rounds)
