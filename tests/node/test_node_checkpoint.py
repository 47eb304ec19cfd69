"""Checkpoints of single nodes: round trips through files, restored nodes, and files that are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from gossamer import Node
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Model
from gossamer.node.checkpoint import Checkpoint, read, write
from payload_samples import payloads, same
from scenario import play

numbers = st.integers(0, 2**40)
seconds = st.floats(0, 1e6)
states = st.dictionaries(st.text(max_size=4), payloads, max_size=3)
tags = st.lists(st.one_of(st.integers(-5, 5), st.text(max_size=3)), max_size=3)
messages = st.tuples(st.integers(0, 9), tags, payloads, seconds, st.integers(-1, 50))
# Fields rather than objects: constructors that check types draw random numbers, which strategies must not.
fields = st.fixed_dictionaries(
    {
        "rank": numbers,
        "round": numbers,
        "time_s": seconds,
        "optimizer": st.sampled_from([None, {}, {"velocity": torch.ones(3), "steps": torch.ones(1)}]),
        "state": states,
        "node": states,
        "engine": states,
        "unread": st.lists(messages, max_size=3),
        "arriving": st.lists(messages, max_size=3),
    }
)


def message(source: int, tag: list[str | int], payload: Any, sent_at: float, number: int) -> Message:
    return Message(source, tuple(tag), payload, sent_at, number=number)


def equal(one: Checkpoint, other: Checkpoint) -> bool:
    return same(one.sections(), other.sections())


def small(**changes: Any) -> Checkpoint:
    fields: dict[str, Any] = {
        "rank": 3,
        "round": 7,
        "time_s": 1.5,
        "model": Model(torch.arange(4.0), torch.zeros(1)),
        "optimizer": {"velocity": torch.ones(4)},
        "state": {"age": 2, "kept": torch.tensor([1, 2])},
        "node": {},
        "unread": [Message(1, ("model", 7), torch.ones(4), 0.5, number=4)],
    }
    return Checkpoint(**{**fields, **changes})


# --- files ---


@settings(max_examples=40)
@given(fields)
def test_checkpoint_survives_a_write_and_a_read(
    tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "whole.safetensors"
    unread = [message(*entry) for entry in drawn["unread"]]
    arriving = [message(*entry) for entry in drawn["arriving"]]
    model = Model(torch.arange(3.0), torch.ones(2))
    saved = Checkpoint(**{**drawn, "unread": unread, "arriving": arriving}, model=model)
    write(saved, path, {"experiment": "this"})
    assert equal(saved, read(path, {"experiment": "this"}))


def test_read_tensors_are_aligned_and_hold_no_file_open(tmp_path: Path) -> None:
    """The bits of a matrix product depend on the alignment of its operands."""
    path = tmp_path / "node.safetensors"
    write(
        small(state={"a": torch.ones(3), "b": torch.ones(1001)}, optimizer={"m": torch.ones(7)}),
        path,
        {"experiment": "this"},
    )
    restored = read(path)
    assert restored.optimizer is not None
    tensors = [*restored.model, restored.state["a"], restored.state["b"], restored.optimizer["m"]]
    assert [tensor.data_ptr() % 64 for tensor in tensors if tensor.numel()] == [0] * sum(
        tensor.numel() > 0 for tensor in tensors
    )
    if (maps := Path("/proc/self/maps")).exists():
        assert str(path) not in maps.read_text()


def test_safetensors_library_reads_the_vectors(tmp_path: Path) -> None:
    path = tmp_path / "node.safetensors"
    write(small(), path, {"experiment": "this"})
    tensors = load_file(path)
    assert torch.equal(tensors["model.0"], torch.arange(4.0))
    assert torch.equal(tensors["optimizer.0"], torch.ones(4))
    assert torch.equal(tensors["state.0"], torch.tensor([1, 2]))
    assert torch.equal(tensors["unread-0.0"], torch.ones(4))


def test_read_passes_tensors_through_the_given_function(tmp_path: Path) -> None:
    path = tmp_path / "node.safetensors"
    write(small(), path, {"experiment": "this"})
    restored = read(path, {"experiment": "this"}, torch.neg)
    assert torch.equal(restored.model.parameters, -small().model.parameters)
    assert torch.equal(restored.unread[0].payload, -torch.ones(4))


@settings(max_examples=50)
@given(st.data())
def test_damaged_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write(small(), path, {"experiment": "this"})
    whole = path.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "longer", "flipped"]))
    position = data.draw(st.integers(0, len(whole) - 1))
    if kind == "cut":
        damaged = whole[:position]
    elif kind == "longer":
        damaged = whole + whole[: position + 1]
    else:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    try:
        restored = read(path, {"experiment": "this"})
    except BadInput as error:
        problems = error.problems
    else:  # a space of the padding, or the case of a letter in an escape, carries no information
        assert kind == "flipped"
        assert equal(restored, small())
        return
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}: ")
    assert "accepted: a checkpoint written by gossamer" in problems[0]


def test_checkpoint_of_another_experiment_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.safetensors"
    write(small(), path, {"experiment": "this"})
    with pytest.raises(BadInput, match="its experiment is this, not that; accepted: a checkpoint written"):
        read(path, {"experiment": "that"})
    assert equal(read(path), small())


def test_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file or directory; accepted: a checkpoint"):
        read(tmp_path / "none.safetensors")
    path = tmp_path / "other.safetensors"
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    write(small(), path, {"experiment": "this"})
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    listed = json.dumps({"__metadata__": {**metadata, "structures": "[]"}}).encode()
    for content in (
        struct.pack("<Q", len(listed)) + listed,
        b"",
        b"abc",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", len(header)) + header,
        b"\0" * 64,
    ):
        path.write_bytes(content)
        with pytest.raises(BadInput, match="accepted: a checkpoint written by gossamer"):
            read(path)


# --- nodes ---


def test_restored_node_continues_with_the_same_steps(tmp_path: Path) -> None:
    """A node of another run, restored from the checkpoint of its rank, takes the same steps from there."""

    async def train(node: Node, steps: int) -> None:
        for _ in range(steps):
            await node.train()

    saved: dict[int, Checkpoint] = {}

    async def first(node: Node) -> Any:
        node.state["kept"] = [torch.ones(2), {"age": 3}]
        await train(node, 3)
        if node.rank == 0:
            node.send(1, node.parameters, tag=("model", 1))
            node.send(1, "later", tag="gone")
        await node.sleep(1.0)
        with pytest.raises(TimeoutError):
            await node.receive("never", timeout=0.5)
        inbox = await node.gather(node.peers(), tag="gone", timeout=0.0)
        assert len(inbox.missing) == 1 - node.rank
        node.record(half=0.5)
        node.reset_optimizer()
        saved[node.rank] = node._runtime.checkpoint(secrets=2)
        node.state["kept"][0].zero_()  # the algorithm may write its state in place
        await train(node, 3)
        return node.parameters, node.step

    async def second(node: Node) -> Any:
        write(saved[node.rank], tmp_path / "node.safetensors", {})
        restored = read(tmp_path / "node.safetensors")
        assert restored.engine == {"secrets": 2}
        node._runtime.restore(restored)
        assert same(node.state, {"kept": [torch.ones(2), {"age": 3}]})
        assert node._runtime.columns == {"half": 0.5}
        assert equal(node._runtime.checkpoint(secrets=2), replaced_time(restored, node.now()))
        if node.rank == 0:
            node.send(1, "again", tag=("gone", 2))
            node.send(1, "once more", tag=("gone", 3))
        else:
            node.send(0, "too late", tag="gone")
            node.send(0, "in time", tag="gone")
        await node.sleep(0.5)
        heard = [(message.tag, message.payload) for message in node.drain()]
        await train(node, 3)
        return node.parameters, node.step, heard

    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    before = play(tmp_path, first, 2, optimizer=optimizer).values
    after = play(tmp_path, second, 2, optimizer=optimizer).values
    for rank in range(2):
        assert torch.equal(before[rank][0], after[rank][0])
        assert before[rank][1] == after[rank][1] == 6
    assert after[0][2] == [(("gone",), "in time")]
    assert [tag for tag, _ in after[1][2]] == [("model", 1), ("gone", 2), ("gone", 3)]
    assert torch.equal(after[1][2][0][1], saved[1].unread[0].payload)


def replaced_time(saved: Checkpoint, now: float) -> Checkpoint:
    return Checkpoint(**{**vars(saved), "time_s": now})


def test_checkpoint_of_another_node_is_refused(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        saved = node._runtime.checkpoint()
        with pytest.raises(BadInput, match=rf"of node {node.rank + 1}, .*accepted: of node {node.rank}"):
            node._runtime.restore(Checkpoint(**{**vars(saved), "rank": node.rank + 1}))
        with pytest.raises(BadInput, match="with \\(7,\\) parameters"):
            node._runtime.restore(
                Checkpoint(**{**vars(saved), "model": Model(torch.zeros(7), torch.zeros(0))})
            )

    play(tmp_path, script, 2)


def test_unsupported_state_entry_is_named(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        node.state["odd"] = {1, 2}
        with pytest.raises(TypeError, match=r"node.state\['odd'\]: payload: set can't be sent"):
            node._runtime.checkpoint()

    play(tmp_path, script, 1)
