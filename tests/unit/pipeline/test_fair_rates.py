"""Who of those that feed a stage slows down, and to what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_parts import source

from proxy.pipeline.nodes import NodeController, NodeHold, Upstream, lowered_rates, raised_rates

INF = float("inf")

FAIR = {
    "one": ([(1_000, 1_000, 1)], 400, [400]),
    "one that writes two records for one": ([(1_000, 1_000, 2)], 400, [200]),
    "two alike": ([(100, 100, 1), (100, 100, 1)], 80, [40, 40]),
    "by their normal rates": ([(100, 100, 1), (300, 300, 1)], 80, [20, 60]),
    "one is below its share": ([(10, 100, 1), (100, 100, 1)], 80, [None, 70]),
    "one is held by others already": ([(40, 100, 1), (100, 100, 1)], 80, [40, 40]),
    "faster than normal": ([(150, 100, 1), (100, 100, 1)], 80, [40, 40]),
    "they send less: the highest is asked": ([(30, 100, 1), (40, 100, 1)], 80, [None, 40]),
    "they send less, all alike": ([(40, 100, 1), (40, 100, 1)], 90, [40, 40]),
    "one sends nothing on": ([(100, 100, 0), (100, 100, 1)], 80, [None, 80]),
    "none is known to send anything on": ([(100, 100, 0)], 80, [80]),
    "the stage stands still": ([(100, 100, 1)], 0, [0]),
    "nobody": ([], 80, []),
}


def rates_of(values) -> Upstream:
    """Make nodes of a rate, a normal rate and what the stage is sent of each record."""
    nodes = []
    for number, (rate, normal_rate, records) in enumerate(values):
        node = NodeController(source(str(number), "a", normal_rate=normal_rate))
        node.state = NodeHold(rate)
        nodes.append((node, records))
    return nodes


@pytest.mark.parametrize(("upstream", "capacity", "expected"), FAIR.values(), ids=FAIR.keys())
def test_fair_rates(upstream, capacity, expected):
    rates = lowered_rates(rates_of(upstream), capacity)
    wanted = {str(number): rate for number, rate in enumerate(expected) if rate is not None}
    assert rates == pytest.approx(wanted)


RATE = st.floats(1, 1e6)


@given(st.lists(st.tuples(RATE, RATE, st.floats(0.01, 100)), min_size=1, max_size=8), RATE)
def test_together_they_send_what_the_stage_processes_and_nobody_more_than_before(values, capacity):
    upstream = rates_of(values)
    rates = lowered_rates(upstream, capacity)
    assert rates
    after = {each.name: rates.get(each.name, each.rate) for each, _ in upstream}
    sent = sum(each.rate * records for each, records in upstream)
    left = sum(after[each.name] * records for each, records in upstream)
    assert left == pytest.approx(min(sent, capacity), rel=1e-5)
    highest = max(after[each.name] / each.normal_rate for each, _ in upstream)
    for each, _ in upstream:
        assert after[each.name] <= each.rate * (1 + 1e-5)
        if after[each.name] < each.rate * (1 - 1e-5):  # who slows down is at the level of all
            assert after[each.name] / each.normal_rate == pytest.approx(highest, rel=1e-5)


RAISED = {
    "the stage is not held": ([(40, 100, 1)], INF, "0", {"0": INF}),
    "up to what it may take": ([(40, 100, 1)], 60, "0", {"0": 60}),
    "none left": ([(40, 100, 1)], 40.3, "0", {}),
    "only who is held": ([(40, 100, 1), (20, 100, 1)], 90, "1", {"1": 30}),
    "nothing is sent": ([(40, 100, 0)], 90, "0", {"0": INF}),
}


@pytest.mark.parametrize(
    ("upstream", "capacity", "held", "expected"), RAISED.values(), ids=RAISED.keys()
)
def test_raised_rates(upstream, capacity, held, expected):
    assert raised_rates(rates_of(upstream), capacity, held) == pytest.approx(expected)
