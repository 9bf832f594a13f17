"""Worked figures for the windowed stats: tables of (time, value, expected)."""

import math

import pytest

from metrics import MetricConfig, Rate, WindowedSum

MB = 1_000_000
TWO_WINDOWS = MetricConfig(samples=2, window_ms=1000)


def record_all(stat, events):
    for at_ms, value in events:
        stat.record(value, at_ms)
    return stat


def test_combining_values_of_several_samples():
    filled = record_all(WindowedSum(TWO_WINDOWS), [(0, 3), (500, 7), (1200, 2)])

    assert (filled.measure(1300), filled.events(1300)) == (12.0, 3)


@pytest.mark.parametrize("stat", [WindowedSum, Rate])
def test_nothing_recorded_measures_zero(stat):
    assert stat(TWO_WINDOWS).measure(5000) == 0.0


@pytest.mark.parametrize("stat", [WindowedSum, Rate])
def test_what_is_too_old_is_forgotten(stat):
    filled = record_all(stat(TWO_WINDOWS), [(0, 3), (900, 7)])

    assert filled.measure(2899) > 0
    assert filled.measure(2900) == 0.0
    filled.record(4, 2900)
    assert filled.measure(2900) > 0


@pytest.mark.parametrize(
    ("now_ms", "expected"),
    [
        pytest.param(1000, 111, id="all three samples"),
        pytest.param(2000, 111, id="first sample began two windows ago but its last event did not"),
        pytest.param(2899, 111, id="just before the last event of the first sample is obsolete"),
        pytest.param(2900, 1, id="the first sample goes with its last event"),
        pytest.param(3000, 0, id="the second one, too"),
    ],
)
def test_a_sample_lives_as_long_as_its_last_event(now_ms, expected):
    stat = record_all(WindowedSum(TWO_WINDOWS), [(0, 10), (900, 100), (1000, 1)])

    assert stat.measure(now_ms) == expected


def test_one_slot_more_than_samples_is_kept():
    stat = record_all(WindowedSum(TWO_WINDOWS), [(0, 1), (999, 1), (1000, 10), (2000, 100)])

    assert stat.measure(2000) == 112
    stat.record(1000, 3000)
    assert stat.measure(3000) == 1100


@pytest.mark.parametrize(
    ("event_window", "values", "expected"),
    [
        pytest.param(None, 7, 7, id="no limit: all in one sample"),
        pytest.param(2, 6, 6, id="three samples of two"),
        pytest.param(2, 7, 5, id="the seventh event recycles the first sample"),
        pytest.param(1, 7, 3, id="a sample per event"),
    ],
)
def test_event_window_ends_a_sample_early(event_window, values, expected):
    config = MetricConfig(samples=2, window_ms=1000, event_window=event_window)

    stat = record_all(WindowedSum(config), [(0, 1)] * values)

    assert stat.measure(0) == stat.events(0) == expected


def test_event_window_and_window_end_a_sample_whichever_is_first():
    config = MetricConfig(samples=1, window_ms=1000, event_window=2)
    stat = record_all(WindowedSum(config), [(0, 1), (0, 10), (400, 100), (1400, 1000)])

    # Samples began at 0, at 400 (third event) and at 1400 (a window later, in the first's slot).
    assert stat.measure(1399) == 1100


FIVE_OF_TWO_SECONDS = MetricConfig(samples=5, window_ms=2000)


@pytest.mark.parametrize(
    ("config", "first_ms", "now_ms", "expected_ms"),
    [
        pytest.param(FIVE_OF_TWO_SECONDS, 0, 0, 8000, id="fresh: four empty windows before it"),
        pytest.param(FIVE_OF_TWO_SECONDS, 0, 500, 8500, id="plus the part of the current one"),
        pytest.param(FIVE_OF_TWO_SECONDS, 0, 2000, 8000, id="a full one stands for an empty one"),
        pytest.param(FIVE_OF_TWO_SECONDS, 0, 7999, 9999, id="three full ones"),
        pytest.param(FIVE_OF_TWO_SECONDS, 0, 8000, 8000, id="four full ones: nothing to add"),
        pytest.param(FIVE_OF_TWO_SECONDS, 0, 9999, 9999, id="just before all is obsolete"),
        pytest.param(FIVE_OF_TWO_SECONDS, 0, 10000, 8000, id="all obsolete: as if fresh"),
        pytest.param(FIVE_OF_TWO_SECONDS, 123456.5, 123457.0, 8000.5, id="any start, fractions"),
        pytest.param(MetricConfig(), 0, 0, 10000, id="Kafka's defaults"),
        pytest.param(MetricConfig(samples=1), 0, 0, 1000, id="one sample, no time: one window"),
        pytest.param(MetricConfig(samples=1), 0, 0.5, 1000, id="one sample, less than a tick"),
        pytest.param(MetricConfig(samples=1), 0, 1, 1, id="one sample, one tick"),
        pytest.param(MetricConfig(samples=1), 0, 400, 400, id="one sample, part of a window"),
    ],
)
def test_window_size_after_one_value(config, first_ms, now_ms, expected_ms):
    rate = Rate(config)
    rate.record(1, first_ms)

    assert rate.window_size_ms(now_ms) == expected_ms


@pytest.mark.parametrize("samples", [1, 2, 11])
def test_window_size_of_a_stat_without_values_is_not_zero(samples):
    config = MetricConfig(samples=samples)

    assert Rate(config).window_size_ms(77) == max(1, samples - 1) * config.window_ms


def test_window_size_reaches_back_to_the_oldest_sample_that_is_kept():
    rate = record_all(Rate(TWO_WINDOWS), [(0, 1), (900, 1), (1000, 1), (2000, 1)])

    assert rate.window_size_ms(2500) == 2500
    assert rate.window_size_ms(2900) == 1900


def test_window_size_follows_samples_that_ended_by_their_events():
    config = MetricConfig(samples=2, window_ms=1000, event_window=1)
    rate = record_all(Rate(config), [(at_ms, 1) for at_ms in range(0, 600, 100)])

    # Three slots: the oldest sample kept began at 300.
    assert rate.window_size_ms(500) == 200 + 1000


def test_eleven_megabytes_per_second_against_ten_gives_half_a_second():
    config = MetricConfig(samples=6, window_ms=1000)
    bound = 10 * MB
    rate = Rate(config)
    rate.record(55 * MB, 0)

    measured = rate.measure(0)
    window_ms = rate.window_size_ms(0)

    assert (measured, window_ms) == (11 * MB, 5000)
    assert round((measured - bound) / bound * window_ms) == 500


def test_a_steady_stream_is_measured_at_its_rate():
    config = MetricConfig()
    rate = Rate(config)
    chunk, every_ms = 1 * MB, 100
    for at_ms in range(0, 60_000, every_ms):
        rate.record(chunk, at_ms)
        if at_ms >= config.samples * config.window_ms:
            # Both ends of the measured time may hold an event: one chunk too many.
            assert 10 * MB <= rate.measure(at_ms) <= 10 * MB * 1.01


def test_huge_and_tiny_times_stay_finite():
    config = MetricConfig(samples=1, window_ms=1)
    rate = Rate(config)
    for at_ms in (0.0, 1e-9, 0.001, 1.0, 1e15):
        rate.record(1e12, at_ms)
        assert math.isfinite(rate.measure(at_ms))
