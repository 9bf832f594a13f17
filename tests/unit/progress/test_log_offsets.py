"""When the log end was where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.progress.log_offsets import MAX_SAMPLES, LogEndHistory


def history(*samples) -> LogEndHistory:
    ends = LogEndHistory()
    for now_ms, end in samples:
        ends.add(now_ms, end)
    return ends


@pytest.mark.parametrize(
    ("samples", "offset", "passed_ms"),
    [
        pytest.param([(0, 0), (1000, 100)], 50, 500.0, id="linear between samples"),
        pytest.param([(0, 0), (1000, 100)], 0, 0.0, id="at a sample"),
        pytest.param([(0, 0), (1000, 100)], 100, None, id="not passed"),
        pytest.param([(0, 0), (1000, 100)], 500, None, id="far ahead"),
        pytest.param([(700, 80), (1000, 100)], 10, 700.0, id="before the first sample"),
        pytest.param([(0, 10), (50_000, 10), (51_000, 20)], 10, 50_000.0, id="after a pause"),
        pytest.param([(0, 10), (50_000, 10), (51_000, 20)], 15, 50_500.0, id="not in a pause"),
        pytest.param([(0, 10), (1, 10), (2, 10), (9, 10), (10, 20)], 10, 9.0, id="long pause"),
        pytest.param([(0, 10), (5, 8), (10, 20)], 15, 5.0, id="a lower end is left out"),
        pytest.param([(10, 10), (5, 20), (20, 20)], 15, 15.0, id="an earlier time is left out"),
        pytest.param([(0, 10), (50_000, 10)], 5, 0.0, id="a pause from the beginning"),
        pytest.param([], 5, None, id="nothing known"),
    ],
)
def test_when_the_log_end_passed_an_offset(samples, offset, passed_ms):
    assert history(*samples).passed_ms(offset) == passed_ms


def test_when_it_is_full_it_is_thinned_and_not_cut_off():
    ends = history(*((float(ms), ms * 10) for ms in range(10_000)))
    assert len(ends) < MAX_SAMPLES
    for offset in (0, 1, 49_999, 77_777, 99_989):
        assert ends.passed_ms(offset) == pytest.approx(offset / 10, abs=0.01)
    assert ends.passed_ms(99_990) is None


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 20)), max_size=600),
    st.integers(0, 12_000),
    st.integers(0, 12_000),
)
def test_times_lie_between_what_was_seen(steps, offset, later):
    ends, now_ms, end, seen = LogEndHistory(), 0.0, 0, []
    for wait_ms, more in steps:
        now_ms, end = now_ms + wait_ms, end + more
        ends.add(now_ms, end)
        seen.append((now_ms, end))
    assert len(ends) < MAX_SAMPLES
    offset, later = sorted((offset, later))
    passed_ms = ends.passed_ms(offset)
    assert (passed_ms is None) == (not seen or seen[-1][1] <= offset)
    if passed_ms is not None:
        assert seen[0][0] <= passed_ms <= seen[-1][0]
        if (later_ms := ends.passed_ms(later)) is not None:
            assert passed_ms <= later_ms + 1e-6


def test_what_is_not_needed_any_more_goes_and_the_answers_stay():
    ends = history((0, 0), (10, 10), (20, 20), (30, 30))
    before = [ends.passed_ms(offset) for offset in range(15, 40)]
    ends.forget_below(15)
    assert [ends.passed_ms(offset) for offset in range(15, 40)] == before
    assert len(ends) == 3
