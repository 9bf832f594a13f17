"""The schedule that keeps a client at its bound once the formula has found it above."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics import MetricConfig, Rate
from proxy.quota.pacer import LARGE_DEBT_MS, MAX_CARRY_MS, REPAYING_SHARE, Pacer, throttle_time_ms

MB = 1_000_000.0
BURST_MS = 500.0


def fresh(bound: float = 1 * MB) -> Pacer:
    return Pacer(bound, BURST_MS)


def pacing(owed_ms: float) -> Pacer:
    """At time 0 the formula finds it above its bound of 1 MB/s."""
    pacer = fresh()
    assert pacer.charge(0, owed_ms, 0.0) == owed_ms
    return pacer


def test_nothing_is_held_before_the_formula_says_so():
    pacer = fresh()
    assert pacer.charge(9 * MB, 0, 0.0) == 0
    assert not pacer.is_pacing
    assert pacer.owed_ms(0.0) == 0
    assert pacer.charge(1, 700, 5.0) == 700
    assert pacer.is_pacing


def test_what_passed_before_is_owed_and_worked_off():
    pacer = fresh()
    assert pacer.charge(9 * MB, 0, 0.0) == 0
    assert pacer.charge(1 * MB, 100, 0.0) == 100
    assert pacer.due_ms == 10_000 - BURST_MS


def test_then_each_response_takes_its_time_at_the_bound():
    pacer = pacing(500.0)
    assert pacer.charge(250_000, 9999, 500.0) == 250
    assert pacer.charge(250_000, 9999, 500.0) == 500
    assert pacer.charge(250_000, 0, 1000.0) == 250


def test_who_owes_much_goes_on_slowly():
    pacer = pacing(100.0)
    pacer.due_ms = 8000.0
    slowly_ms = 10 / REPAYING_SHARE
    assert pacer.charge(10_000, 0, 100.0) == slowly_ms
    assert pacer.charge(10_000, 0, 100.0 + slowly_ms) == slowly_ms
    assert pacer.due_ms == 8020.0
    now_ms = 8020.0 - LARGE_DEBT_MS
    assert pacer.charge(10_000, 0, now_ms + 10) == LARGE_DEBT_MS


def test_no_more_than_the_burst_is_saved_up():
    pacer = pacing(1000.0)
    assert pacer.charge(0.5 * MB, 9999, 6000.0) == 0
    assert pacer.charge(1 * MB, 9999, 6000.0) == 1000


@pytest.mark.parametrize(
    ("at_ms", "throttle_ms", "is_pacing"),
    [
        pytest.param(1000 + BURST_MS, 0, True, id="its burst is not quite saved up"),
        pytest.param(1001 + BURST_MS, 1, True, id="the formula finds it above the bound"),
        pytest.param(1001 + BURST_MS, 0, False, id="neither"),
    ],
)
def test_when_the_formula_judges_again(at_ms, throttle_ms, is_pacing):
    pacer = pacing(1000.0)
    hold_ms = pacer.charge(2 * MB, throttle_ms, at_ms)
    assert pacer.is_pacing is is_pacing
    assert hold_ms == (2000 - BURST_MS if is_pacing else 0)


def test_parts_of_a_millisecond_are_carried():
    pacer = pacing(10.0)
    now_ms = 10.0
    for _ in range(3000):
        now_ms += round(pacer.charge(300, 0, now_ms))
    assert now_ms == pytest.approx(10 + 900, abs=1)


def test_no_client_is_locked_out_for_ever():
    pacer = pacing(500.0)
    pacer.charge(1e12, 0, 0.0)
    assert pacer.due_ms == MAX_CARRY_MS
    assert fresh().charge(1e12, 1e12, 0.0) == MAX_CARRY_MS


SPAN_MS = 11_000.0


def test_a_raised_bound_while_pacing():
    """The same bytes take a shorter time, and the schedule goes on deciding for a while."""
    pacer = pacing(4000.0)
    pacer.raise_bound(4 * MB, 9000.0, SPAN_MS, 0.0)
    assert pacer.owed_ms(0.0) == 1000
    assert pacer.charge(0.4 * MB, 0, 0.0) == 1100
    assert pacer.charge(4 * MB, 0, 5000.0) == 1000 - BURST_MS
    assert pacer.charge(4 * MB, 0, 2 * SPAN_MS) == 0


def test_a_raised_bound_while_the_formula_decides():
    """It lets pass as much as under the old one, at once and no more, until it sees only this."""
    pacer = fresh()
    assert pacer.charge(4.5 * MB, 0, 0.0) == 0
    pacer.raise_bound(2 * MB, 5000.0, SPAN_MS, 0.0)
    assert pacer.allowance_ms(0.0) == 2500
    assert pacer.charge(5 * MB, 0, 0.0) == 0
    assert not pacer.is_pacing
    assert pacer.charge(0.001 * MB, 0, 0.0) == 0
    assert pacer.is_pacing
    assert pacer.debt_ms(0.0) == 4500.5
    assert pacer.charge(2 * MB, 0, 4500.5) == 1000


def test_a_bound_raised_again_lends_no_more():
    pacer = fresh()
    pacer.charge(4.5 * MB, 0, 0.0)
    pacer.raise_bound(2 * MB, 5000.0, SPAN_MS, 0.0)
    pacer.raise_bound(4 * MB, 9000.0, SPAN_MS + 1, 1.0)
    assert pacer.allowance_ms(1.0) == pytest.approx(1250, abs=1)


def test_a_lowered_bound_while_pacing():
    """What is owed is bytes; of what takes long by that, little is left when it is out of sight."""
    pacer = pacing(500.0)
    pacer.lower_bound(0.5 * MB, MB, SPAN_MS, 0.0)
    assert pacer.owed_ms(0.0) == 1000
    pacer.lower_bound(0.01 * MB, MB, SPAN_MS, 0.0)
    assert pacer.debt_ms(0.0) == 50_000
    assert pacer.owed_ms(0.0) == 1000
    pacer.charge(0, 0, SPAN_MS)
    assert pacer.debt_ms(SPAN_MS) == LARGE_DEBT_MS


def test_bounds_up_and_down_change_nothing_of_what_is_owed():
    pacer = pacing(1500.0)
    for number in range(10):
        pacer.lower_bound(0.01 * MB, MB, SPAN_MS + number, number)
        pacer.raise_bound(1 * MB, 0.0, SPAN_MS + number, number)
    assert pacer.debt_ms(9.0) == pytest.approx(1491, abs=1)


def test_a_client_that_a_lower_bound_finds_above_it_is_paced_and_not_punished():
    pacer = fresh(100 * MB)
    pacer.charge(500 * MB, 0, 0.0)
    pacer.lower_bound(1 * MB, 50 * MB, SPAN_MS, 70.0)
    assert pacer.charge(1 * MB, 489_000, 70.0) == 1000


def test_a_client_below_a_lower_bound_notices_nothing():
    pacer = fresh(100 * MB)
    pacer.lower_bound(10 * MB, 1 * MB, SPAN_MS, 70.0)
    assert not pacer.is_pacing


@given(
    st.lists(st.tuples(st.floats(0, 30_000), st.floats(0.00001, 0.5)), min_size=1, max_size=150),
    st.sampled_from([0.1 * MB, 1 * MB, 10 * MB]),
)
def test_no_pattern_of_pauses_and_sizes_gets_more_than_the_bound(requests, bound):
    """One connection that asks, is held, pauses, asks again: from the start, and in any window.

    It asks for up to half a second's worth of its bound at a time.
    """
    rate = Rate(MetricConfig())
    pacer = fresh(bound)
    now_ms = total = 0.0
    released: list[tuple[float, float]] = []
    for pause_ms, seconds in requests:
        size = seconds * bound
        now_ms += pause_ms
        rate.record(size, now_ms)
        window_ms = rate.window_size_ms(now_ms)
        throttle_ms = throttle_time_ms(rate.measure(now_ms), bound, window_ms)
        now_ms += pacer.charge(size, throttle_ms, now_ms)
        total += size
        released.append((now_ms, size))
        looks_back_s = rate.config.samples * rate.config.window_ms / 1000
        assert total <= bound * (now_ms / 1000 + looks_back_s) + size
        begin_ms = now_ms - looks_back_s * 1000
        inside = math.fsum(each for at_ms, each in released if at_ms > begin_ms)
        assert inside <= 1.1 * bound * looks_back_s + size
