"""Gossip learning against an event model with hand-made times."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timing
from timing import Data, Table, Window, least_squares, play, wide

import gossamer
from gossamer import NodeWrapper, RunFailed

NODES, ROUNDS, LATENCY, LR = 4, 9, 0.3533, 0.1
TIMES = [
    [0.3137, 0.1721, 0.7753],
    [0.2311, 0.5743],
    [1.1329, 0.4157, 0.0719],
    [0.2963, 0.8381, 0.1993, 0.6121],
]


def model(
    data: Data, peers: list[list[int]], merge: str, period: float | None, steps: int
) -> tuple[Any, list[int]]:
    """All models and ages at the end, given the recipients of each node's messages. A node trains (and queues incoming
    messages) or idles until its period is over; events are the end of training, a message, and the end of the period."""
    x, age = list(data.initial), [0] * NODES
    round_of, start, idle = [0] * NODES, [0.0] * NODES, [False] * NODES
    queue: list[list[tuple[int, Any, int]]] = [[] for _ in range(NODES)]
    agenda: list[tuple[float, int, int, Any]] = []
    number = iter(range(10**6))

    def due(time: float, i: int, event: Any) -> None:
        heapq.heappush(agenda, (time, next(number), i, event))

    def begin(time: float, i: int) -> None:
        start[i] = time
        first = round_of[i] * steps
        due(time + sum(TIMES[i][(first + k) % len(TIMES[i])] for k in range(steps)), i, "trained")

    def take(i: int, messages: list[tuple[int, Any, int]]) -> None:
        total = age[i] + sum(a for _, _, a in messages)
        x[i] = (age[i] * x[i] + sum(a * v for _, v, a in messages)) / total
        age[i] = max([age[i], *[a for _, _, a in messages]])

    for i in range(NODES):
        begin(0.0, i)
    while agenda:
        now, _, i, event = heapq.heappop(agenda)
        if event == "trained":
            for _ in range(steps):
                x[i] = x[i] - LR * data.gradient(i, x[i])
            age[i] += steps
            for messages in [queue[i]] if merge == "all" else [[message] for message in queue[i]]:
                take(i, messages)
            queue[i] = []
            due(now + LATENCY, peers[i][round_of[i]], (i, x[i], age[i]))
            over = start[i] + (period or 0.0)
            if period is not None and over > now:
                idle[i] = True
                due(over, i, "over")
                continue
        elif event != "over":
            if idle[i] and merge == "each":
                take(i, [event])
            else:
                queue[i].append(event)
            continue
        idle[i] = False
        round_of[i] += 1
        if round_of[i] < ROUNDS:
            begin(now, i)
    return np.stack(x), age


@pytest.mark.parametrize("merge", ["each", "all"])
@pytest.mark.parametrize(("period", "steps"), [(None, 1), (0.7, 1), (None, 2)])
def test_models_match_an_event_model(tmp_path: Path, merge: str, period: float | None, steps: int) -> None:
    timing.clear()
    experiment = least_squares(
        NODES,
        ROUNDS,
        algorithm={"name": "gossip-learning", "merge": merge, "period_s": period, "local_steps": steps},
        topology="complete",
        compute=Table(seconds_of=TIMES),
        network={"name": "uniform", "latency_s": LATENCY},
        wrappers=[Window()],
    )
    run = play(experiment, tmp_path)
    peers = [[to for _, source, to, _ in timing.sent if source == rank] for rank in range(NODES)]
    assert [len(row) for row in peers] == [ROUNDS] * NODES
    expected, ages = model(Data(experiment), peers, merge, period, steps)
    assert run.parameters is not None
    np.testing.assert_allclose(wide(run.parameters), expected, rtol=1e-5, atol=1e-5)
    for rank in range(NODES):
        last = [payload["age"] for _, source, _, payload in timing.sent if source == rank][-1]
        assert steps * ROUNDS <= last <= max(ages)


def on_receipt_model(data: Data, peers: list[list[int]], create: str, period: float, steps: int) -> Any:
    """The freshest models at the end of Algorithm 1 of Ormandi et al., given the recipients of each node's models. Events
    are the end of an update, a message, and the end of a period; the last two wait while a node trains."""
    fresh, last = list(data.initial), list(data.initial)
    step, sent, over, busy = [0] * NODES, [0] * NODES, [0.0] * NODES, [False] * NODES
    queue: list[list[Any]] = [[] for _ in range(NODES)]
    agenda: list[tuple[float, int, int, Any]] = []
    number = iter(range(10**6))

    def due(time: float, i: int, event: Any) -> None:
        heapq.heappush(agenda, (time, next(number), i, event))

    def update(i: int, m: Any) -> Any:
        for _ in range(steps):
            m = m - LR * data.gradient(i, m)
        return m

    def listen(time: float, i: int) -> None:
        """Take the next message, or send, or wait."""
        while not busy[i] and sent[i] < ROUNDS:
            if time >= over[i]:
                due(time + LATENCY, peers[i][sent[i]], fresh[i])
                sent[i] += 1
                over[i] = time + period
                due(over[i], i, "over")
            elif queue[i]:
                m, before = queue[i].pop(0), last[i]
                last[i] = m
                if create == "rw":
                    fresh[i] = update(i, m)
                elif create == "mu":
                    fresh[i] = update(i, (m + before) / 2)
                else:
                    fresh[i] = (update(i, m) + update(i, before)) / 2
                taken = steps * (2 if create == "um" else 1)
                busy[i] = True
                due(time + sum(TIMES[i][(step[i] + k) % len(TIMES[i])] for k in range(taken)), i, "trained")
                step[i] += taken
            else:
                return

    for i in range(NODES):
        over[i] = period
        due(period, i, "over")
    while agenda:
        now, _, i, event = heapq.heappop(agenda)
        if isinstance(event, str):
            busy[i] = busy[i] and event != "trained"
        else:
            queue[i].append(event)
        listen(now, i)
    return np.stack(fresh)


@pytest.mark.parametrize("create", ["rw", "mu", "um"])
@pytest.mark.parametrize(("period", "steps"), [(1.7, 1), (0.9, 2)])
def test_training_on_receipt_matches_an_event_model(
    tmp_path: Path, create: str, period: float, steps: int
) -> None:
    """Updates outlast the shorter period, so that models wait in the queue."""
    timing.clear()
    algorithm = {
        "name": "gossip-learning-on-receipt",
        "create": create,
        "period_s": period,
        "local_steps": steps,
    }
    experiment = least_squares(
        NODES,
        ROUNDS,
        algorithm=algorithm,
        topology="complete",
        compute=Table(seconds_of=TIMES),
        network={"name": "uniform", "latency_s": LATENCY},
        wrappers=[Window()],
    )
    run = play(experiment, tmp_path)
    peers = [[to for _, source, to, _ in timing.sent if source == rank] for rank in range(NODES)]
    assert [len(row) for row in peers] == [ROUNDS] * NODES
    expected = on_receipt_model(Data(experiment), peers, create, period, steps)
    assert run.parameters is not None
    np.testing.assert_allclose(wide(run.parameters), expected, rtol=1e-5, atol=1e-5)


def test_age_grows_by_one_step_with_each_receipt(tmp_path: Path) -> None:
    """Two nodes send to each other, so that a walking model ages by one step at each receipt."""
    timing.clear()
    algorithm = {"name": "gossip-learning-on-receipt", "create": "rw"}
    experiment = least_squares(2, 5, algorithm=algorithm, topology="complete", wrappers=[Window()])
    play(experiment, tmp_path)
    ages = [payload["age"] for _, source, _, payload in timing.sent if source == 0]
    assert ages == [0, 1, 2, 3, 4]


def test_merging_one_at_a_time_differs_from_merging_all(tmp_path: Path) -> None:
    """Slow nodes have several messages in their queue, so the tests above tell the two rules apart."""
    ends = []
    for merge in ("each", "all"):
        experiment = least_squares(
            NODES,
            ROUNDS,
            algorithm={"name": "gossip-learning", "merge": merge},
            topology="complete",
            compute=Table(seconds_of=TIMES),
        )
        run = play(experiment, tmp_path)
        assert run.parameters is not None
        ends.append(wide(run.parameters))
    assert np.abs(ends[0] - ends[1]).max() > 1e-3


def test_peers_are_drawn_evenly_from_the_neighbours(tmp_path: Path) -> None:
    timing.clear()
    experiment = least_squares(
        4, 60, algorithm="gossip-learning", topology="ring", wrappers=[Window()], initial="common"
    )
    play(experiment, tmp_path)
    for rank in range(4):
        right = sum(to == (rank + 1) % 4 for _, source, to, _ in timing.sent if source == rank)
        left = sum(to == (rank - 1) % 4 for _, source, to, _ in timing.sent if source == rank)
        assert right + left == 60
        assert abs(right - 30) < 5 * np.sqrt(60) / 2


def test_sending_waits_for_a_slow_uplink(tmp_path: Path) -> None:
    """A message takes a second to leave and a step a hundredth, so a node sends once per second."""
    timing.clear()
    experiment = least_squares(
        3,
        6,
        task={"name": "least-squares", "features": 25_000, "samples": 6, "test_samples": 1},
        partition="iid",
        algorithm="gossip-learning",
        topology="complete",
        optimizer={"name": "sgd", "lr": 1e-9},
        compute={"name": "constant", "seconds_per_step": 0.01},
        network={"name": "uniform", "uplink_mbps": 0.8},
        wrappers=[Window()],
        initial="common",
    )
    play(experiment, tmp_path)
    times = [time for time, source, _, _ in timing.sent if source == 0]
    # The next message is queued when a window of 64 KiB is left to send: of 100 kB, after a third of a second.
    np.testing.assert_allclose(np.diff(times), [1 - 0.65536, 1, 1, 1, 1], atol=0.01)


class Ages(NodeWrapper):
    """Makes node 0 send a false age of its models."""

    age: Any = 1

    def outgoing(self, node: Any, to: int, payload: Any, tag: Any) -> Any:
        return {**payload, "age": self.age} if node.rank == 0 else payload


@pytest.mark.parametrize("age", [-1, 0, True, 2.5, float("inf"), None])
def test_invalid_age_ends_the_run(tmp_path: Path, age: Any) -> None:
    experiment = least_squares(
        2, 3, algorithm="gossip-learning", topology="complete", wrappers=[Ages(age=age)]
    )
    problem = r"age of a peer: got .*; accepted: a whole number from 1 to |the value inf|'age', \('nothing'"
    with pytest.raises(RunFailed, match=problem):
        gossamer.run(experiment, tmp_path)
