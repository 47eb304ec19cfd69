"""Max-min fair shares against naive progressive filling, and against cases worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.runtime.simulate.fair import Flow, MaxMin


def maxmin(rates: list[float], flows: list[Flow]) -> None:
    """Set the rates of flows that start together."""
    links = MaxMin[Flow](rates)
    for flow in flows:
        links.add(flow)
    for flow, rate in links.settle():
        flow.rate = rate


def filled(rates: list[float], flows: list[Flow]) -> list[float]:
    """Raise all shares together, each by its weight; a flow that meets a full link or its limit stops there."""
    shares, growing, left = [0.0] * len(flows), set(range(len(flows))), list(rates)
    while growing:
        steps = [(flows[f].limit - shares[f]) / flows[f].weight for f in growing]
        for link, room in enumerate(left):
            weight = sum(flows[f].weight for f in growing if link in flows[f].links)
            if weight:
                steps.append(room / weight)
        step = min(steps)
        if math.isinf(step):
            return [math.inf if f in growing else share for f, share in enumerate(shares)]
        for f in growing:
            shares[f] += step * flows[f].weight
            for link in flows[f].links:
                left[link] -= step * flows[f].weight
        full = {link for link, room in enumerate(left) if room <= 1e-9 * rates[link] < math.inf}
        growing = {
            f for f in growing if not full & set(flows[f].links) and shares[f] < flows[f].limit * (1 - 1e-9)
        }
    return shares


weights = st.sampled_from([1.0, 1.0, 0.1, 3.0, 250.0])
limits = st.sampled_from([math.inf, math.inf, 2.5, 40.0])


Spec = tuple[tuple[int, ...], float, float]


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[float], list[Spec]]:
    """Rates of links, and the arguments of flows."""
    links = draw(st.integers(1, 8))
    rate = st.sampled_from([1.0, 3.0, 10.0, 10.0, 64.0, math.inf])
    rates = draw(st.lists(rate, min_size=links, max_size=links))
    paths = st.lists(st.integers(0, links - 1), min_size=1, max_size=4, unique=True)
    return rates, draw(st.lists(st.tuples(paths.map(tuple), weights, limits), max_size=20))


@settings(max_examples=150)
@given(networks())
def test_shares_match_progressive_filling(network: tuple[list[float], list[Spec]]) -> None:
    rates, flows = network[0], [Flow(*spec) for spec in network[1]]
    maxmin(rates, flows)
    assert [flow.rate for flow in flows] == pytest.approx(filled(rates, flows), rel=1e-7)


@settings(max_examples=100)
@given(networks(), st.data())
def test_incremental_shares_match_progressive_filling(
    network: tuple[list[float], list[Flow]], data: st.DataObject
) -> None:
    rates, specs = network
    links, present = MaxMin[Flow](rates), list[Flow]()
    for spec in specs:
        flow = Flow(*spec)
        links.add(flow)
        present.append(flow)
        if data.draw(st.booleans()):
            links.remove(present.pop(data.draw(st.integers(0, len(present) - 1))))
        if data.draw(st.booleans()):
            rates = [data.draw(st.sampled_from([rate, 7.0])) for rate in rates]
            links.change(rates)
        if data.draw(st.booleans()):
            for changed, rate in links.settle():
                changed.rate = rate
    for changed, rate in links.settle():
        changed.rate = rate
    assert [flow.rate for flow in present] == pytest.approx(filled(rates, present), rel=1e-7)


def test_settle_reports_only_flows_with_changed_shares() -> None:
    links = MaxMin[Flow]([10.0, 10.0, 10.0, 10.0])
    first, apart, second = Flow((0, 1)), Flow((2, 3)), Flow((0, 3))
    links.add(first)
    links.add(apart)
    assert dict(links.settle()) == {first: 10.0, apart: 10.0}
    first.rate = apart.rate = 10.0
    assert links.settle() == []
    links.add(second)
    assert dict(links.settle()) == {first: 5.0, apart: 5.0, second: 5.0}
    first.rate = apart.rate = second.rate = 5.0
    links.remove(first)
    assert links.settle() == []  # the second still shares with the separate one


def test_flow_over_a_link_without_bandwidth_gets_nothing() -> None:
    flows = [Flow((0, 1)), Flow((1,))]
    maxmin([0.0, 10.0], flows)
    assert [flow.rate for flow in flows] == [0.0, 10.0]
