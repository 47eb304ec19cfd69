"""Node: questions and answers, finished sendings, wrappers before a round and in a broadcast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import BadInput, Experiment, Model, Node, NodeWrapper, RunFailed
from gossamer.config.registry import FilePath
from gossamer.messages.tags import Payload, PrivateTag
from scenario import MBPS, play

FAR = {"name": "uniform", "latency_s": 0.25}


def test_answers_are_matched_to_their_questions(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            node.answer("double", lambda question: 2 * question.payload)
            return await node.sleep(3)
        asked = [node.spawn(node.ask(peer, peer + n, ("double", n))) for n in (0, 10) for peer in (1, 2)]
        return [await task for task in asked], node.now(), await node.next_answer(), node.drain_answers()

    answers, now, late, more = play(tmp_path, script, 3, network=FAR).values[0]
    assert answers == [2, 4, 22, 24]
    assert (now, late, more) == (0.5, None, [])


@pytest.mark.parametrize(("keep_s", "late"), [(None, 1), (1.0, 0), (0.45, 1)])
def test_late_answer_is_kept_for_keep_s_only(tmp_path: Path, keep_s: float | None, late: int) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            node.answer("name", lambda question: f"node {node.rank}")
            return await node.sleep(3)
        with pytest.raises(TimeoutError):
            await node.ask(1, None, ("name", 7), 0.4, keep_s=keep_s)
        before = node.drain_answers()
        answer = await node.next_answer()
        waited = node.now()
        await node.sleep(1)
        return before, answer, round(waited, 9), node.drain_answers(), node.traffic.messages_late

    before, answer, waited, after, dropped = play(tmp_path, script, 2, network=FAR).values[0]
    assert (before, dropped) == ([], late)
    if keep_s is None:
        assert (answer, waited, after) == (None, 0.4, [])
    elif keep_s == 1.0:
        assert (answer, waited, after) == ("node 1", 0.5, [])
    else:  # too late to be kept
        assert (answer, waited, after) == (None, 0.45, [])


def test_waiting_for_a_late_answer_can_be_cancelled_and_resumed(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            node.answer("name", lambda question: f"node {node.rank}")
            return await node.sleep(3)
        with pytest.raises(TimeoutError):
            await node.ask(1, None, "name", 0.1, keep_s=2.0)
        waiting = node.spawn(node.next_answer())
        await node.sleep(0.1)
        waiting.cancel()
        await node.sleep(0.01)
        return await node.next_answer()

    assert play(tmp_path, script, 2, network=FAR).values[0] == "node 1"


def test_lost_question_does_not_block_the_next_of_its_tag(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            await node.receive("q")  # the first question has no answer
            node.answer("q", lambda question: question.payload)
            return await node.sleep(3)
        with pytest.raises(TimeoutError):
            await node.ask(1, 1, "q", 0.75)
        return [await node.ask(1, number, "q", 0.75) for number in (2, 3)], node.traffic.messages_late

    assert play(tmp_path, script, 2, network=FAR).values[0] == ([2, 3], 0)


def test_draining_late_answers_leaves_awaited_ones(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            node.answer("q", lambda question: question.payload)
            return await node.sleep(3)
        with pytest.raises(TimeoutError):
            await node.ask(1, "late", ("q", 1), 0.1, keep_s=5.0)
        asked = node.spawn(node.ask(1, "awaited", ("q", 2)))
        await node.sleep(0.45)
        late = node.drain_answers()
        with pytest.raises(ValueError, match="a question to node 1 with the answer tag"):
            await node.ask(1, "again", ("other", 2))
        return late, await asked

    assert play(tmp_path, script, 2, network=FAR).values[0] == (["late"], "awaited")


def test_answers_with_a_common_tag_prefix_are_told_apart(tmp_path: Path) -> None:
    """Of the questions ("q",) and ("q", 7), the second is answered first."""

    async def script(node: Node) -> Any:
        if node.rank:
            first = await node.receive("q")
            node.answer(("q", 7), lambda question: question.payload)
            await node.sleep(1)
            return node.send(first.source, first.payload, tag="answer")
        short = node.spawn(node.ask(1, "short", "q", keep_s=9.0))
        await node.sleep(0.01)
        long = await node.ask(1, "long", ("q", 7))
        with pytest.raises(TimeoutError):
            await node.ask(1, "lost", ("q", 8, 9), 0.1)  # closes only its own answer
        return long, await short, await node.ask(1, "again", ("q", 7)), node.traffic.messages_late

    assert play(tmp_path, script, 2, network=FAR).values[0] == ("long", "short", "again", 0)


def test_unasked_answers_are_dropped(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            node.answer("q", lambda question: question.payload)
            node.send(0, "never asked", ("answer", 3))
            return await node.sleep(3)
        with pytest.raises(TimeoutError):
            await node.ask(1, "asked", ("q", 1), 0.1, keep_s=5.0)
        await node.sleep(1)
        return node.drain_answers(), node.drain_answers(), node.traffic.messages_late

    assert play(tmp_path, script, 2, network=FAR).values[0] == (["asked"], [], 1)


def test_sending_is_done_when_awaiting_it_would_return_at_once(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            return None
        slow, cancelled = node.send(1, bytes(500_000), "m"), node.send(1, bytes(500_000), "m")
        seen = [slow.done(), cancelled.done()]
        assert cancelled.cancel()
        seen.append(cancelled.done())
        await node.sleep(0.1)
        seen.append(slow.done())
        await slow
        return [*seen, slow.done(), node.now() > 0.4]

    network = {"name": "uniform", "bandwidth_mbps": MBPS}
    assert play(tmp_path, script, 2, network=network).values[0] == [False, False, True, False, True, True]


def test_integers_are_summed_modulo_their_width(tmp_path: Path) -> None:
    """Masks that wrap around cancel, whatever the order."""

    async def script(node: Node) -> Any:
        for dtype in (torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64):
            info = torch.iinfo(dtype)
            mask = torch.tensor([info.max, info.min, 7], dtype=dtype)
            minus = torch.tensor(
                [
                    (-int(m)) % 2**info.bits
                    - (2**info.bits if info.min < 0 and (-int(m)) % 2**info.bits > info.max else 0)
                    for m in mask.tolist()
                ],
                dtype=dtype,
            )
            own = torch.tensor([1, 2, 3], dtype=dtype)
            for inbox in ({1: mask, 2: minus}, {2: mask, 1: minus}):
                got = await node.combine(own, inbox, dict.fromkeys(inbox, 1.0), self_weight=1.0)
                assert got.dtype is dtype
                assert got.tolist() == [1, 2, 3]
        with pytest.raises(ValueError, match=r"a weight of 0\.5 for integers; accepted: whole numbers"):
            await node.combine(own, {1: own}, {1: 0.5})

    play(tmp_path, script, 1)


# --- wrappers


class Exchange(NodeWrapper):
    """Before each round, nodes tell all others a number."""

    async def before_round(self, node: Node, r: int) -> None:
        node.broadcast(node.peers(), 100 * r + node.rank, PrivateTag(("~key", r)))
        keys = await node.gather(node.peers(), PrivateTag(("~key", r)))
        node.state["keys"] = sorted(keys.values())


def test_wrappers_may_exchange_messages_before_a_round(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        return [(r, node.state["keys"], node.now()) async for r in node.rounds()]

    values = play(tmp_path, script, 3, network=FAR, wrappers=[Exchange()], stop={"rounds": 2}).values
    assert values[0] == [(0, [1, 2], 0.25), (1, [101, 102], 0.5)]


class Selective(NodeWrapper):
    """Negates the payload for one receiver."""

    target: int

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        return -payload if to == self.target else payload


def test_receivers_share_a_payload_that_no_wrapper_changed(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 0:
            node.broadcast(node.peers(), node.model, "m")
            return node.parameters
        return (await node.receive("m")).payload.parameters

    values = play(tmp_path, script, 5, wrappers=[Selective(target=3)], initial="independent").values
    assert values[1] is values[2] is values[4] is values[0]
    assert torch.equal(values[3], -values[0])


class Filed(NodeWrapper):
    """Has a file."""

    path: FilePath
    at: int = 1


def test_wrapper_paths_are_relative_to_the_experiment_file(tmp_path: Path) -> None:
    text = f"""
nodes: 2
task: least-squares
algorithm: d-psgd
stop: {{rounds: 1}}
wrappers:
  - name: {__name__}:Exchange
  - {{name: "{__name__}:Filed", path: here.txt}}
"""
    file = tmp_path / "experiment.yaml"
    file.write_text(text)
    assert Experiment.load(file).wrappers[1].path == tmp_path / "here.txt"
    file.write_text(text.replace("path:", "at: high, path:"))
    with pytest.raises(BadInput, match=r"wrappers\.1\.at"):
        Experiment.load(file)


def test_node_has_only_the_documented_members() -> None:
    """Engines use an object of their own: Node has no member that only they call."""
    documented = {
        *("parameters", "buffers", "model", "train", "gradient", "apply", "combine", "mix", "evaluate"),
        *("reset_optimizer", "peers", "send", "broadcast", "receive", "drain", "gather", "expect", "ask"),
        *(
            "answer",
            "drain_answers",
            "next_answer",
            "neighbors",
            "mixing_weights",
            "topology",
            "view",
            "now",
            "sleep",
        ),
        *(
            "rng",
            "secret",
            "store",
            "record",
            "rounds",
            "end_round",
            "traffic",
            "finished",
            "spawn",
            "compress",
            "mixed",
        ),
    }
    assert {name for name in dir(Node) if not name.startswith("_")} == documented


def test_model_arithmetic_covers_parameters_and_buffers() -> None:
    first, second = (
        Model(torch.tensor([1.0, 2.0]), torch.tensor([3.0])),
        Model(torch.tensor([4.0, 8.0]), torch.tensor([6.0])),
    )
    got = 2 * (second - first) / 3 + -first * 1
    assert [half.tolist() for half in got] == [[1.0, 2.0], [-1.0]]
    assert [half.tolist() for half in first.unflatten(first.flatten())] == [[1.0, 2.0], [3.0]]


def test_exception_in_a_wrapper_fails_its_node(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        async for _ in node.rounds():
            pass

    with pytest.raises(RunFailed, match="node 0 failed in round 0: ArithmeticError: nothing adds up"):
        play(tmp_path, script, 1, wrappers=[Broken()])


class Broken(NodeWrapper):
    """Fails before the first round."""

    async def before_round(self, node: Node, r: int) -> None:
        raise ArithmeticError("nothing adds up")
