"""The windowed stats against a brute-force sliding window, for any stream of events."""

import math
from itertools import accumulate

from hypothesis import example, given, settings
from hypothesis import strategies as st

from metrics import MetricConfig, Rate, WindowedSum

configs = st.builds(
    MetricConfig, samples=st.integers(1, 6), window_ms=st.sampled_from([1.0, 10.0, 1000.0])
)
# Gaps as multiples of the window, often at its edges; values are whole bytes, so sums are exact.
gaps = st.one_of(
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 5.0]), st.floats(0, 12, allow_subnormal=False)
)
streams = st.lists(st.tuples(gaps, st.integers(0, 2**30)), max_size=60)


def events_of(config, stream, start_ms=12_345.0):
    """Return the stream as (monotonic time, value) pairs."""
    times_ms = accumulate((gap * config.window_ms for gap, _ in stream), initial=start_ms)
    return [(at_ms, value) for at_ms, (_, value) in zip(list(times_ms)[1:], stream, strict=True)]


def kept_values(config, events, now_ms):
    """Return the values that count, from all events so far: no ring, no running state."""
    groups = []
    for at_ms, value in events:
        ended = not groups or (
            at_ms - groups[-1][0][0] >= config.window_ms
            or (config.event_window is not None and len(groups[-1]) >= config.event_window)
        )
        if ended:
            groups.append([])
        groups[-1].append((at_ms, value))
    age_ms = config.samples * config.window_ms
    return [
        value
        for group in groups[-(config.samples + 1) :]
        if now_ms - group[-1][0] < age_ms
        for _, value in group
    ]


@settings(deadline=None)
@given(configs, st.none() | st.integers(1, 4), streams, gaps)
def test_every_stat_equals_the_brute_force_one(config, event_window, stream, silence):
    config = MetricConfig(config.samples, config.window_ms, event_window)
    events = events_of(config, stream)
    for kind, combine in ((WindowedSum.measure, sum), (WindowedSum.events, len)):
        stat = WindowedSum(config)
        for count, (at_ms, value) in enumerate(events, start=1):
            stat.record(value, at_ms)
            kept = kept_values(config, events[:count], at_ms)
            assert kind(stat, at_ms) == combine(kept)
        if events:
            now_ms = events[-1][0] + silence * config.window_ms
            kept = kept_values(config, events, now_ms)
            assert kind(stat, now_ms) == combine(kept)


@settings(deadline=None)
@given(configs, streams, st.data())
@example(MetricConfig(samples=1, window_ms=1000.0), [(0.0, 1), (0.5, 1), (1.0, 1), (0.5, 1)], None)
def test_sum_lies_between_the_exact_window_and_one_window_more(config, stream, data):
    """Whenever it is measured: nothing young enough is lost, nothing much older is kept."""
    events = events_of(config, stream)
    age_ms = config.samples * config.window_ms
    stat = WindowedSum(config)
    for count, (at_ms, value) in enumerate(events, start=1):
        stat.record(value, at_ms)
        until_ms = events[count][0] if count < len(events) else at_ms + 2 * age_ms
        share = data.draw(st.floats(0, 1)) if data else 1.0
        now_ms = at_ms + (until_ms - at_ms) * share
        past = events[:count]
        measured = stat.measure(now_ms)
        assert measured >= sum(v for t, v in past if now_ms - t < age_ms)
        assert measured <= sum(v for t, v in past if now_ms - t < age_ms + config.window_ms)


@settings(deadline=None)
@given(configs, streams, gaps)
def test_a_rate_is_finite_not_negative_and_over_a_sane_window(config, stream, silence):
    rate, total = Rate(config), WindowedSum(config)
    now_ms = 0.0
    for at_ms, value in [*events_of(config, stream), (None, 0)]:
        if at_ms is None:
            now_ms += silence * config.window_ms
        else:
            now_ms = at_ms
            rate.record(value, now_ms)
            total.record(value, now_ms)
        window_ms = rate.window_size_ms(now_ms)
        measured = rate.measure(now_ms)
        assert math.isfinite(measured)
        assert measured >= 0
        assert measured == total.measure(now_ms) * 1000 / window_ms
        assert window_ms >= max(1, (config.samples - 1) * config.window_ms * (1 - 1e-9))
        assert window_ms <= (config.samples + 1) * config.window_ms * (1 + 1e-9)


@settings(deadline=None)
@given(configs, streams)
def test_a_record_adds_its_value_and_loses_none(config, stream):
    """Rollover takes nothing out that was still measured: there is no saw-tooth in the sum."""
    stat = WindowedSum(config)
    for at_ms, value in events_of(config, stream):
        before = stat.measure(at_ms)
        stat.record(value, at_ms)
        assert stat.measure(at_ms) == before + value


@settings(deadline=None)
@given(configs, streams, st.lists(gaps, min_size=1, max_size=10))
def test_without_records_the_sum_only_falls_and_ends_at_zero(config, stream, silences):
    stat = WindowedSum(config)
    now_ms = 0.0
    for now_ms, value in events_of(config, stream):
        stat.record(value, now_ms)
    last = stat.measure(now_ms)
    for silence in silences:
        now_ms += silence * config.window_ms
        measured = stat.measure(now_ms)
        assert 0 <= measured <= last
        last = measured
    assert stat.measure(now_ms + (config.samples + 1) * config.window_ms) == 0


class PlainRing:
    """The ring of samples with nothing remembered between calls but the samples themselves."""

    def __init__(self, config):
        self.config = config
        self.slots = []  # of [start_ms, last_event_ms, values]
        self.current = 0

    def record(self, value, now_ms):
        if not self.slots:
            self.slots.append([now_ms, now_ms, []])
        start_ms, _, values = self.slots[self.current]
        limit = self.config.event_window
        is_over = now_ms - start_ms >= self.config.window_ms
        if is_over or (limit is not None and len(values) >= limit):
            self.current = (self.current + 1) % (self.config.samples + 1)
            self.slots[self.current : self.current + 1] = [[now_ms, now_ms, []]]
        self.slots[self.current][1] = now_ms
        self.slots[self.current][2].append(value)

    def measure(self, now_ms):
        """Return sum and window size."""
        age_ms = self.config.samples * self.config.window_ms
        self.slots = [
            slot if now_ms - slot[1] < age_ms else [now_ms, now_ms, []] for slot in self.slots
        ] or [[now_ms, now_ms, []]]
        elapsed_ms = now_ms - min(start_ms for start_ms, _, _ in self.slots)
        full = elapsed_ms // self.config.window_ms
        lacking = max(0, self.config.samples - 1 - full)
        size_ms = elapsed_ms + lacking * self.config.window_ms
        return sum(sum(values) for _, _, values in self.slots), size_ms


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.none() | st.integers(1, 3),
    st.lists(st.tuples(gaps, st.none() | st.integers(0, 2**30)), max_size=60),
)
def test_what_is_remembered_between_calls_changes_nothing(samples, event_window, steps):
    """Any mix of records and measurements (None) gives what a plain ring gives."""
    config = MetricConfig(samples, 1000.0, event_window)
    rate, total, ring = Rate(config), WindowedSum(config), PlainRing(config)
    now_ms = 0.0
    for gap, value in steps:
        now_ms += gap * config.window_ms
        if value is None:
            expected, size_ms = ring.measure(now_ms)
            # Less than a tick can only be left with one sample; then it is one window.
            size_ms = size_ms if size_ms >= 1 else config.window_ms
            assert rate.window_size_ms(now_ms) == size_ms
            assert rate.measure(now_ms) == expected * 1000 / size_ms
            assert total.measure(now_ms) == expected
        else:
            rate.record(value, now_ms)
            total.record(value, now_ms)
            ring.record(value, now_ms)


@settings(deadline=None)
@given(st.lists(st.tuples(configs, streams), min_size=2, max_size=4))
def test_other_sampling_at_run_time_leaves_a_sane_rate(phases):
    rate, total = Rate(MetricConfig()), WindowedSum(MetricConfig())
    now_ms, recorded = 0.0, 0
    for config, stream in phases:
        rate.config = total.config = config
        events = events_of(config, stream, start_ms=now_ms)
        for now_ms, value in events:
            rate.record(value, now_ms)
            total.record(value, now_ms)
            recorded += value
            assert value <= total.measure(now_ms) <= recorded
            assert rate.window_size_ms(now_ms) >= 1
            assert 0 <= rate.measure(now_ms) < math.inf
    assert total.measure(now_ms + (config.samples + 1) * config.window_ms) == 0
