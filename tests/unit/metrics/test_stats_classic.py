"""kafka-python's metrics, which have the classic purge rule, as a second implementation."""

import sys
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.metrics import MetricConfig as ClassicConfig
from kafka.metrics.stats import Count as ClassicCount
from kafka.metrics.stats import Rate as ClassicRate
from kafka.metrics.stats.rate import SampledTotal as ClassicSum

from metrics import MetricConfig, Rate, WindowedSum


class EventCount(WindowedSum):
    """How many values were recorded of late."""

    def measure(self, now_ms):
        return self.events(now_ms)


PAIRS = [
    pytest.param(WindowedSum, ClassicSum, id="sum"),
    pytest.param(EventCount, ClassicCount, id="count"),
    pytest.param(Rate, ClassicRate, id="rate"),
]
WINDOW_MS = 1000


def configs(samples, event_window=None):
    """Return the same configuration for both implementations."""
    return (
        MetricConfig(samples, WINDOW_MS, event_window),
        ClassicConfig(
            samples=samples,
            time_window_ms=WINDOW_MS,
            event_window=sys.maxsize if event_window is None else event_window,
        ),
    )


events_in_one_window = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 2**30)), min_size=1)


@pytest.mark.parametrize(("ours", "classic"), PAIRS)
@settings(deadline=None)
@given(samples=st.integers(2, 12), stream=events_in_one_window)
def test_both_agree_until_the_first_sample_is_as_old_as_the_whole_window(
    ours, classic, samples, stream
):
    config, classic_config = configs(samples)
    stat, classic_stat = ours(config), classic()
    for at_ms, (_, value) in zip(accumulate(gap for gap, _ in stream), stream, strict=True):
        if at_ms - stream[0][0] >= samples * WINDOW_MS:
            break
        stat.record(value, at_ms)
        classic_stat.record(classic_config, value, at_ms)
        assert stat.measure(at_ms) == pytest.approx(
            classic_stat.measure(classic_config, at_ms), rel=1e-12
        )


@pytest.mark.parametrize(("ours", "classic"), PAIRS)
@settings(deadline=None)
@given(samples=st.integers(2, 12), values=st.lists(st.integers(0, 2**30), min_size=1, max_size=5))
def test_both_agree_after_a_long_silence(ours, classic, samples, values):
    config, classic_config = configs(samples)
    stat, classic_stat = ours(config), classic()
    for burst_ms in (0, 50_000, 100_000):
        stat.measure(burst_ms)
        classic_stat.measure(classic_config, burst_ms)
        for value in values:
            stat.record(value, burst_ms)
            classic_stat.record(classic_config, value, burst_ms)
        assert stat.measure(burst_ms) == classic_stat.measure(classic_config, burst_ms)


@settings(deadline=None)
@given(samples=st.integers(2, 12), silence_ms=st.integers(0, 30_000))
def test_both_agree_on_the_window_size_after_one_value(samples, silence_ms):
    config, classic_config = configs(samples)
    rate, classic_rate = Rate(config), ClassicRate()
    rate.record(1, 0)
    classic_rate.record(classic_config, 1, 0)

    assert rate.window_size_ms(silence_ms) == classic_rate.window_size(classic_config, silence_ms)


@settings(deadline=None)
@given(event_window=st.integers(1, 5), values=st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_both_agree_on_event_windows_while_the_ring_fills(event_window, values):
    config, classic_config = configs(9, event_window)
    stat, classic_stat = WindowedSum(config), ClassicSum()
    for value in values:
        stat.record(value, 0)
        classic_stat.record(classic_config, value, 0)
        assert stat.measure(0) == classic_stat.measure(classic_config, 0)


@pytest.mark.parametrize(
    ("now_ms", "refined", "classic"),
    [
        pytest.param(1999, 1000, 1000, id="before the first sample's start is two windows old"),
        pytest.param(2000, 1000, 0, id="the classic rule forgets a burst of 1.1 windows ago"),
        pytest.param(2899, 1000, 0, id="the refined one keeps it for two windows"),
        pytest.param(2900, 0, 0, id="and not longer"),
    ],
)
def test_a_late_burst_shows_where_the_rules_differ(now_ms, refined, classic):
    config, classic_config = configs(2)
    stat, classic_stat = WindowedSum(config), ClassicSum()
    for at_ms, value in [(0, 0), (900, 1000), (1000, 0)]:
        stat.record(value, at_ms)
        classic_stat.record(classic_config, value, at_ms)

    assert stat.measure(now_ms) == refined
    assert classic_stat.measure(classic_config, now_ms) == classic


@pytest.mark.parametrize("samples", [2, 5, 11])
def test_the_classic_rate_is_a_saw_tooth(samples):
    """Bytes that flow at the end of each window: the classic sum drops a burst at each rollover."""
    config, classic_config = configs(samples)
    stat, classic_stat = WindowedSum(config), ClassicSum()
    burst = 1000
    sums, classic_sums = set(), set()
    for at_ms in range(0, 30 * WINDOW_MS, 100):
        value = burst if at_ms % WINDOW_MS == 900 else 0
        stat.record(value, at_ms)
        classic_stat.record(classic_config, value, at_ms)
        if at_ms > (samples + 1) * WINDOW_MS:
            sums.add(stat.measure(at_ms))
            classic_sums.add(classic_stat.measure(classic_config, at_ms))

    # In any `samples` windows there are `samples` bursts.
    assert sums == {samples * burst}
    assert classic_sums == {(samples - 1) * burst, samples * burst}
