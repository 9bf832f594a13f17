"""The throttle formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.quota.pacer import throttle_time_ms

MB = 1_000_000.0


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
