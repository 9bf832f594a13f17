"""One value in, every stat updated, every quota checked."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import (
    MetricConfig,
    Quota,
    QuotaViolation,
    Rate,
    Sensor,
    WindowedSum,
)


def throttled_sensor(bound=10.0, *others):
    rate = Rate(MetricConfig(samples=6, quota=Quota(bound)))
    return Sensor("etl", rate, *others), rate


def test_all_stats_get_the_value():
    sensor = Sensor("etl", Rate(MetricConfig(samples=6)), WindowedSum(MetricConfig()))

    sensor.record(50, 0)
    sensor.record(25, 500)

    assert [stat.measure(1000) for stat in sensor.stats] == [75 / 5, 75]


def test_a_sensor_without_stats_only_notes_the_time():
    sensor = Sensor("etl")
    sensor.record(1, 42)

    assert sensor.last_record_ms == 42
    assert sensor.stats == ()


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
    sensor = Sensor("etl", Rate(MetricConfig(samples=6, quota=quota)))
    if not violated:
        sensor.record(value, 0)
        return
    with pytest.raises(QuotaViolation) as caught:
        sensor.record(value, 0)
    assert caught.value.stat is sensor.stats[0]
    assert caught.value.value == value / 5
    assert caught.value.bound == 10


def test_a_violation_says_what_it_is():
    sensor, _ = throttled_sensor(bound=10_000_000)

    with pytest.raises(QuotaViolation, match=r"^Rate is 1.1e\+07, its bound 1e\+07$"):
        sensor.record(55_000_000, 0)


def test_the_value_is_recorded_even_when_it_violates():
    total = WindowedSum(MetricConfig())
    sensor, rate = throttled_sensor(10.0, total)

    with pytest.raises(QuotaViolation):
        sensor.record(100, 7)

    assert rate.measure(7) == 20
    assert total.measure(7) == 100
    assert sensor.last_record_ms == 7


def test_every_quota_is_checked_and_the_first_violated_one_is_told():
    total = WindowedSum(MetricConfig(quota=Quota(60)))
    lower = WindowedSum(MetricConfig(quota=Quota(62, is_upper=False)))
    sensor, _ = throttled_sensor(1000, total, lower)

    with pytest.raises(QuotaViolation) as caught:
        sensor.record(61, 0)

    assert caught.value.stat is total


def test_a_violation_ends_when_the_window_has_moved_on():
    sensor, _ = throttled_sensor()
    with pytest.raises(QuotaViolation):
        sensor.record(100, 0)
    with pytest.raises(QuotaViolation):
        sensor.record(0, 4999)

    sensor.record(0, 11_000)


def test_a_changed_quota_keeps_the_history():
    sensor, rate = throttled_sensor(bound=100)
    sensor.record(100, 0)

    rate.config = dataclasses.replace(rate.config, quota=Quota(15))
    assert rate.measure(0) == 20
    with pytest.raises(QuotaViolation) as caught:
        sensor.record(0, 1)
    assert caught.value.bound == 15

    rate.config = dataclasses.replace(rate.config, quota=None)
    sensor.record(1000, 2)
    assert rate.measure(2) == pytest.approx(1100 / 5.002)


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
    rates = Rate(config), MeasuredRate(config)
    sensors = [Sensor("etl", rate) for rate in rates]
    now_ms = 0.0
    for pause_ms, value, kind in steps:
        now_ms += pause_ms
        quick, measured = (outcome(sensor, value, now_ms) for sensor in sensors)
        assert quick == measured
        assert sensors[0].last_record_ms == sensors[1].last_record_ms
        if kind == "measure":
            quick, measured = (rate.measure(now_ms) for rate in rates)
            assert quick == pytest.approx(measured, rel=1e-12)
        elif kind != "record":
            factor = {"lower": 0.5, "higher": 2.0}.get(kind, 1.0)
            window_ms *= 2 if kind == "windows" else 1
            config = dataclasses.replace(
                config, quota=Quota(config.quota.bound * factor), window_ms=window_ms
            )
            for rate in rates:
                rate.config = config


def test_a_record_in_the_room_of_a_sample_measures_nothing():
    class CountedRate(Rate):
        __slots__ = ("measured",)

        def measure(self, now_ms):
            self.measured += 1
            return super().measure(now_ms)

    rate = CountedRate(MetricConfig(quota=Quota(1000.0)))
    rate.measured = 0
    sensor = Sensor("etl", rate)
    for now_ms in range(0, 900, 10):
        sensor.record(50, now_ms)
    assert rate.measured == 1
    assert sensor.room.free == pytest.approx(0.999 * (10_000 - 50) - 89 * 50)
    sensor.record(50, 1000)
    assert rate.measured == 2
