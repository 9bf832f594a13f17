"""One value in, every stat updated, every quota checked."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import (
    Count,
    MetricConfig,
    Quota,
    QuotaViolation,
    Rate,
    Sensor,
    WindowedSum,
)

RATE, TOTAL = "rate_bytes", "total_bytes"


def throttled_sensor(bound=10.0):
    sensor = Sensor("etl")
    metric = sensor.add(RATE, Rate(), MetricConfig(samples=6, quota=Quota(bound)))
    return sensor, metric


def test_all_stats_get_the_value():
    sensor = Sensor("etl")
    sensor.add(RATE, Rate(), MetricConfig(samples=6))
    sensor.add(TOTAL, WindowedSum(), MetricConfig())

    sensor.record(50, 0)
    sensor.record(25, 500)

    assert [metric.measure(1000) for metric in sensor.metrics] == [75 / 5, 75]
    assert [metric.name for metric in sensor.metrics] == [RATE, TOTAL]


def test_a_sensor_without_metrics_only_notes_the_time():
    sensor = Sensor("etl")
    sensor.record(1, 42)

    assert sensor.last_record_ms == 42
    assert sensor.metrics == ()


@pytest.mark.parametrize(
    ("quota", "value", "violated"),
    [
        pytest.param(Quota(10), 50, False, id="exactly at the bound"),
        pytest.param(Quota(10), 51, True, id="above an upper bound"),
        pytest.param(Quota(10, is_upper=False), 50, False, id="exactly at a lower bound"),
        pytest.param(Quota(10, is_upper=False), 49, True, id="below a lower bound"),
        pytest.param(None, 10**12, False, id="no bound"),
    ],
)
def test_a_quota_is_checked_after_each_value(quota, value, violated):
    sensor = Sensor("etl")
    sensor.add(RATE, Rate(), MetricConfig(samples=6, quota=quota))
    if not violated:
        sensor.record(value, 0)
        return
    with pytest.raises(QuotaViolation) as caught:
        sensor.record(value, 0)
    assert caught.value.metric_name == RATE
    assert caught.value.value == value / 5
    assert caught.value.bound == 10


def test_a_violation_says_what_it_is():
    sensor, _ = throttled_sensor(bound=10_000_000)

    with pytest.raises(QuotaViolation, match=r"^rate_bytes is 1.1e\+07, its bound 1e\+07$"):
        sensor.record(55_000_000, 0)


def test_the_value_is_recorded_even_when_it_violates():
    sensor, metric = throttled_sensor()
    total = sensor.add(TOTAL, WindowedSum(), MetricConfig())

    with pytest.raises(QuotaViolation):
        sensor.record(100, 7)

    assert metric.measure(7) == 20
    assert total.measure(7) == 100
    assert sensor.last_record_ms == 7


def test_every_quota_is_checked_and_the_first_violated_one_is_told():
    sensor = Sensor("etl")
    sensor.add(RATE, Rate(), MetricConfig(samples=6, quota=Quota(1000)))
    sensor.add(TOTAL, WindowedSum(), MetricConfig(quota=Quota(60)))
    sensor.add("count", Count(), MetricConfig(quota=Quota(2, is_upper=False)))

    with pytest.raises(QuotaViolation) as caught:
        sensor.record(61, 0)

    assert caught.value.metric_name == TOTAL


def test_a_violation_ends_when_the_window_has_moved_on():
    sensor, _ = throttled_sensor()
    with pytest.raises(QuotaViolation):
        sensor.record(100, 0)
    with pytest.raises(QuotaViolation):
        sensor.record(0, 4999)

    sensor.record(0, 11_000)


def test_a_changed_quota_keeps_the_history():
    sensor, metric = throttled_sensor(bound=100)
    sensor.record(100, 0)

    metric.config = dataclasses.replace(metric.config, quota=Quota(15))
    assert metric.measure(0) == 20
    with pytest.raises(QuotaViolation) as caught:
        sensor.record(0, 1)
    assert caught.value.bound == 15

    metric.config = dataclasses.replace(metric.config, quota=None)
    sensor.record(1000, 2)
    assert metric.measure(2) == pytest.approx(1100 / 5.002)


def test_a_metric_is_added_once():
    sensor, _ = throttled_sensor()
    with pytest.raises(ValueError, match="already has a metric"):
        sensor.add(RATE, WindowedSum(), MetricConfig())

    sensor.add(TOTAL, WindowedSum(), MetricConfig())
    assert len(sensor.metrics) == 2


def test_idle_sensors_expire_an_hour_after_the_last_value():
    sensor = Sensor("etl")
    hour_ms = 3_600_000

    assert (sensor.is_expired(hour_ms - 1), sensor.is_expired(hour_ms)) == (False, True)
    sensor.record(1, 5000)
    assert not sensor.is_expired(5000 + hour_ms - 1)
    assert sensor.is_expired(5000 + hour_ms)


# Records in the room of a sample


class MeasuredRate(Rate):
    """Never tells its room: each value is measured."""

    __slots__ = ()

    def room(self, *_):
        return None


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.3, 1.0, 17.0, 250.0, 999.5, 1000.0, 1500.0, 30_000.0]),
        st.sampled_from([0, 1, 100, 1000, 7777.5, 50_000]),
        st.sampled_from(["record"] * 8 + ["measure", "lower", "higher", "windows"]),
    ),
    min_size=20,
    max_size=120,
)


def outcome(sensor, value, now_ms):
    try:
        sensor.record(value, now_ms)
    except QuotaViolation as violation:
        return violation.value, violation.bound
    return None


@settings(max_examples=300)
@given(steps=STEPS, samples=st.sampled_from([1, 2, 11]), window_ms=st.sampled_from([1.0, 1000.0]))
def test_what_is_recorded_without_measuring_counts_the_same(steps, samples, window_ms):
    """Whatever is read or changed in between: the same violations, values, samples and times."""
    config = MetricConfig(samples=samples, window_ms=window_ms, quota=Quota(20_000.0))
    sensors = [Sensor("room"), Sensor("measured")]
    metrics = [
        sensor.add(RATE, rate, config)
        for sensor, rate in zip(sensors, (Rate(), MeasuredRate()), strict=True)
    ]
    now_ms = 0.0
    for pause_ms, value, kind in steps:
        now_ms += pause_ms
        quick, measured = (outcome(sensor, value, now_ms) for sensor in sensors)
        assert quick == measured
        assert sensors[0].last_record_ms == sensors[1].last_record_ms
        if kind == "measure":
            quick, measured = (metric.measure(now_ms) for metric in metrics)
            assert quick == pytest.approx(measured, rel=1e-12)
        elif kind != "record":
            factor = {"lower": 0.5, "higher": 2.0}.get(kind, 1.0)
            window_ms *= 2 if kind == "windows" else 1
            config = dataclasses.replace(
                config, quota=Quota(config.quota.bound * factor), window_ms=window_ms
            )
            for metric in metrics:
                metric.config = config


def test_a_record_in_the_room_of_a_sample_measures_nothing():
    class CountedRate(Rate):
        __slots__ = ("measured",)

        def measure(self, config, now_ms):
            self.measured += 1
            return super().measure(config, now_ms)

    sensor, rate = Sensor("etl"), CountedRate()
    rate.measured = 0
    sensor.add(RATE, rate, MetricConfig(quota=Quota(1000.0)))
    for now_ms in range(0, 900, 10):
        sensor.record(50, now_ms)
    assert rate.measured == 1
    assert sensor.room.free == pytest.approx(0.999 * (10_000 - 50) - 89 * 50)
    sensor.record(50, 1000)
    assert rate.measured == 2
