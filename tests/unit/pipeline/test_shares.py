"""Who of those that feed a stage slows down, and to what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.pipeline.shares import Feed, fair_rates, room_for

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


def feeds_of(values) -> list[Feed]:
    return [Feed(str(number), *value) for number, value in enumerate(values)]


@pytest.mark.parametrize(("feeds", "capacity", "expected"), FAIR.values(), ids=FAIR.keys())
def test_fair_rates(feeds, capacity, expected):
    rates = fair_rates(feeds_of(feeds), capacity)
    wanted = {str(number): rate for number, rate in enumerate(expected) if rate is not None}
    assert rates == pytest.approx(wanted)


RATE = st.floats(1, 1e6)


@given(st.lists(st.tuples(RATE, RATE, st.floats(0.01, 100)), min_size=1, max_size=8), RATE)
def test_together_they_send_what_the_stage_processes_and_nobody_more_than_before(values, capacity):
    feeds = feeds_of(values)
    rates = fair_rates(feeds, capacity)
    assert rates
    after = {feed.node: rates.get(feed.node, feed.rate) for feed in feeds}
    sent = sum(feed.rate * feed.records for feed in feeds)
    left = sum(after[feed.node] * feed.records for feed in feeds)
    assert left == pytest.approx(min(sent, capacity), rel=1e-5)
    highest = max(after[feed.node] / feed.normal_rate for feed in feeds)
    for feed in feeds:
        assert after[feed.node] <= feed.rate * (1 + 1e-5)
        if after[feed.node] < feed.rate * (1 - 1e-5):  # who slows down is at the level of all
            assert after[feed.node] / feed.normal_rate == pytest.approx(highest, rel=1e-5)


ROOM = {
    "the stage is not held": ([(40, 100, 1)], INF, "0", {"0": INF}),
    "up to what it may take": ([(40, 100, 1)], 60, "0", {"0": 60}),
    "none left": ([(40, 100, 1)], 40.3, "0", {}),
    "only who is held": ([(40, 100, 1), (20, 100, 1)], 90, "1", {"1": 30}),
    "nothing is sent": ([(40, 100, 0)], 90, "0", {"0": INF}),
}


@pytest.mark.parametrize(("feeds", "capacity", "held", "expected"), ROOM.values(), ids=ROOM.keys())
def test_room(feeds, capacity, held, expected):
    assert room_for(feeds_of(feeds), capacity, held) == pytest.approx(expected)
