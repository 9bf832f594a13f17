"""The throttle formula, and the schedule that keeps a client at its bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics import MetricConfig, Rate
from proxy.quota.control import MAX_CARRY_MS, Pacer, throttle_time_ms

NEVER = 1e12
MB = 1_000_000.0
MEMORY_MS = 10_000.0


@pytest.mark.parametrize(
    ("rate", "bound", "window_ms", "expected_ms"),
    [
        pytest.param(11 * MB, 10 * MB, 5_000, 500, id="the worked example"),
        pytest.param(10 * MB, 10 * MB, 5_000, 0, id="at the bound"),
        pytest.param(9 * MB, 10 * MB, 5_000, 0, id="below the bound"),
        pytest.param(2 * MB, 1 * MB, 10_500, 10_500, id="twice the bound"),
        pytest.param(1.0001, 1.0, 10_000, 1, id="whole milliseconds"),
        pytest.param(1.00001, 1.0, 10_000, 0, id="less than half a millisecond"),
    ],
)
def test_throttle_time(rate, bound, window_ms, expected_ms):
    result = throttle_time_ms(rate, bound, window_ms)
    assert result == expected_ms
    assert isinstance(result, int)


@given(st.floats(1, 1e9), st.floats(1, 1e9), st.floats(1, 1e5))
def test_after_the_throttle_time_the_bytes_of_the_window_are_at_the_bound(rate, bound, window_ms):
    throttle_ms = throttle_time_ms(rate, bound, window_ms)
    if rate > bound:
        least_ms = rate * window_ms / bound - window_ms
        assert throttle_ms == pytest.approx(least_ms, abs=0.5 + least_ms * 1e-9)
    else:
        assert throttle_ms == 0


def pacing(due_ms: float, bound: float = 1 * MB) -> Pacer:
    pacer = Pacer(bound, MEMORY_MS)
    assert pacer.hold_ms(0, due_ms, 0.0, NEVER) == due_ms
    return pacer


def test_nothing_is_held_before_the_formula_says_so():
    pacer = Pacer(1 * MB, MEMORY_MS)
    assert pacer.hold_ms(100 * MB, 0, 0.0, NEVER) == 0
    assert not pacer.is_pacing(0.0)
    assert pacer.hold_ms(1, 700, 5.0, NEVER) == 700
    assert pacer.due_ms == 705.0


def test_from_then_on_each_response_takes_its_time_at_the_bound():
    pacer = pacing(500.0)
    assert pacer.hold_ms(250_000, 9999, 500.0, NEVER) == 250
    assert pacer.hold_ms(250_000, 9999, 500.0, NEVER) == 500
    assert pacer.hold_ms(250_000, 0, 1000.0, NEVER) == 250


def test_what_was_not_used_is_remembered_as_long_as_the_sensor_looks_back():
    pacer = pacing(1000.0)
    assert pacer.hold_ms(5 * MB, 9999, 1000.0 + MEMORY_MS, NEVER) == 0
    assert pacer.hold_ms(5 * MB, 9999, 1000.0 + MEMORY_MS, NEVER) == 0
    assert pacer.hold_ms(1 * MB, 9999, 1000.0 + MEMORY_MS, NEVER) == 1000
    again = pacing(1000.0)
    assert again.hold_ms(50 * MB, 0, 1000.5 + MEMORY_MS, NEVER) == 0
    assert again.hold_ms(1 * MB, 40, 1000.5 + MEMORY_MS, NEVER) == 40


def test_what_exceeds_the_longest_delay_is_held_later():
    pacer = pacing(100.0)
    holds = []
    now_ms = 100.0
    for size in (3 * MB, 3 * MB, 0, 0, 0):
        holds.append(pacer.hold_ms(size, 0, now_ms, 2000.0))
        now_ms += holds[-1]
    assert holds == [2000, 2000, 2000, 0, 0]
    assert now_ms == 100.0 + 6000.0


def test_parts_of_a_millisecond_are_carried():
    pacer = pacing(10.0)
    holds = []
    now_ms = 10.0
    for _ in range(3000):
        holds.append(pacer.hold_ms(300, 0, now_ms, NEVER))
        now_ms += holds[-1]
    assert set(holds) == {0, 1}
    assert sum(holds) == pytest.approx(900, abs=1)


def test_no_client_is_locked_out_for_ever():
    pacer = pacing(500.0)
    assert pacer.hold_ms(1e12, 0, 0.0, NEVER) == MAX_CARRY_MS
    assert Pacer(1 * MB, MEMORY_MS).hold_ms(1e12, 1e12, 0.0, NEVER) == MAX_CARRY_MS


@pytest.mark.parametrize(
    ("due_ms", "bound", "then_due_ms"),
    [
        pytest.param(4000, 4 * MB, 1000, id="raised: the same bytes are owed, for less time"),
        pytest.param(4000, 0.5 * MB, 4000, id="lowered: what was promised stays"),
        pytest.param(-4000, 4 * MB, -1000, id="raised: the same bytes are saved"),
        pytest.param(-4000, 0.5 * MB, -4000, id="lowered: the same time is saved"),
    ],
)
def test_a_changed_bound_is_followed_while_pacing(due_ms, bound, then_due_ms):
    pacer = Pacer(1 * MB, MEMORY_MS)
    pacer.due_ms = due_ms
    pacer.change_bound(bound, 1 * MB, 0.0)
    assert pacer.due_ms == then_due_ms
    expected_ms = max(0, then_due_ms + 4 * MB / bound * 1000)
    assert pacer.hold_ms(4 * MB, 0, 0.0, NEVER) == expected_ms


def test_a_client_that_a_lower_bound_finds_above_it_is_paced_and_not_punished():
    pacer = Pacer(100 * MB, MEMORY_MS)
    pacer.change_bound(1 * MB, 50 * MB, 70.0)
    assert pacer.hold_ms(1 * MB, 489_000, 70.0, NEVER) == 1000


def test_a_client_below_a_lower_bound_notices_nothing():
    pacer = Pacer(100 * MB, MEMORY_MS)
    pacer.change_bound(10 * MB, 1 * MB, 70.0)
    assert not pacer.is_pacing(70.0)


@given(
    st.lists(st.tuples(st.floats(0, 30_000), st.floats(1, 5 * MB)), min_size=1, max_size=120),
    st.sampled_from([0.1 * MB, 1 * MB, 10 * MB]),
)
def test_no_pattern_of_pauses_and_sizes_gets_more_than_the_bound(requests, bound):
    """One connection: it asks, is held, pauses, asks again.

    Over any time from the start it gets at most what the bound allows, plus the burst that a fresh
    sensor grants once, plus the response that is on its way.
    """
    config, rate = MetricConfig(), Rate()
    pacer = Pacer(bound, MEMORY_MS)
    now_ms = total = 0.0
    for pause_ms, size in requests:
        now_ms += pause_ms
        rate.record(config, size, now_ms)
        window_ms = rate.window_size_ms(config, now_ms)
        throttle_ms = throttle_time_ms(rate.measure(config, now_ms), bound, window_ms)
        now_ms += pacer.hold_ms(size, throttle_ms, now_ms, NEVER)
        total += size
        burst = bound * (config.samples + 1) * config.window_ms / 1000
        # The formula and each hold are rounded to whole milliseconds.
        assert total <= bound * (now_ms + len(requests)) / 1000 + burst + size
