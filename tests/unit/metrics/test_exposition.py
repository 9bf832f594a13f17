"""What Prometheus reads of the sensors."""

import dataclasses

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from metrics import (
    Count,
    MetricConfig,
    MetricName,
    Quota,
    QuotaViolation,
    Rate,
    Registry,
    Sensor,
    SensorCollector,
)

SIX_SAMPLES = MetricConfig(samples=6)


class Clock:
    """Virtual time."""

    now_ms = 0.0

    def __call__(self):
        return self.now_ms


def rate_name(entity, quota="consumer_byte_rate"):
    labels = (("quota_entity", entity), ("quota", quota))
    return MetricName("rate_bytes", "Measured rate in bytes per second.", labels)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry():
    return Registry(100)


@pytest.fixture
def scrape(registry, clock):
    """Return a function that scrapes: family name to (type, help, {sorted labels: value})."""
    exposed = CollectorRegistry()
    exposed.register(SensorCollector(registry, clock))

    def families():
        text = generate_latest(exposed).decode()
        return {
            family.name: (
                family.type,
                family.documentation,
                {tuple(sorted(s.labels.items())): s.value for s in family.samples},
            )
            for family in text_string_to_metric_families(text)
        }

    return families


def add(registry, name, *metrics):
    sensor = registry.get_or_create(name, lambda: Sensor(name), 0)
    for metric_name, stat, config in metrics:
        sensor.add(metric_name, stat, config)
    return sensor


def key(entity, quota="consumer_byte_rate"):
    return (("quota", quota), ("quota_entity", entity))


def test_no_sensors_no_families(scrape):
    assert scrape() == {}


def test_rates_and_bounds(registry, scrape, clock):
    bounded = dataclasses.replace(SIX_SAMPLES, quota=Quota(10_000_000))
    a = add(registry, "a", (rate_name("client-id=a"), Rate(), bounded))
    b = add(registry, "b", (rate_name("client-id=b"), Rate(), SIX_SAMPLES))
    a.record(50, 0)
    b.record(500, 0)
    clock.now_ms = 5000

    assert scrape() == {
        "kafka_quota_proxy_rate_bytes": (
            "gauge",
            "Measured rate in bytes per second.",
            {key("client-id=a"): 10, key("client-id=b"): 100},
        ),
        "kafka_quota_proxy_bound_bytes": (
            "gauge",
            "Bound that the quota sets for the measured value, in the same unit.",
            {key("client-id=a"): 10_000_000},
        ),
    }


def test_values_are_those_of_the_scrape_not_of_the_last_record(registry, scrape, clock):
    add(registry, "a", (rate_name("a"), Rate(), SIX_SAMPLES)).record(50, 0)
    measured = []
    for clock.now_ms in (0, 2500, 6000):
        _, _, series = scrape()["kafka_quota_proxy_rate_bytes"]
        measured.append(series[key("a")])

    assert measured == [10, pytest.approx(50 / 5.5), 0]


def test_a_violation_shows_as_a_rate_above_the_bound(registry, scrape):
    config = dataclasses.replace(SIX_SAMPLES, quota=Quota(10))
    sensor = add(registry, "a", (rate_name("a"), Rate(), config))
    with pytest.raises(QuotaViolation):
        sensor.record(100, 0)

    families = scrape()
    assert families["kafka_quota_proxy_rate_bytes"][2] == {key("a"): 20}
    assert families["kafka_quota_proxy_bound_bytes"][2] == {key("a"): 10}


def test_a_family_per_metric_name(registry, scrape):
    sensor = add(
        registry,
        "a",
        (rate_name("a"), Rate(), SIX_SAMPLES),
        (MetricName("responses", "How many."), Count(), SIX_SAMPLES),
    )
    sensor.record(50, 0)

    families = scrape()
    assert families["kafka_quota_proxy_rate_bytes"][2] == {key("a"): 10}
    assert families["kafka_quota_proxy_responses"] == ("gauge", "How many.", {(): 1})


@pytest.mark.parametrize("entity", ['quo"te', "back\\slash", "new\nline", "", "käse", "a,b={}"])
def test_any_label_value_comes_back_as_it_was(registry, scrape, entity):
    add(registry, "a", (rate_name(entity), Rate(), SIX_SAMPLES)).record(50, 0)

    assert scrape()["kafka_quota_proxy_rate_bytes"][2] == {key(entity): 10}


def test_a_doubled_series_is_shown_once(registry, scrape):
    config = dataclasses.replace(SIX_SAMPLES, quota=Quota(1e9))
    add(registry, "a", (rate_name("x"), Rate(), config)).record(50, 0)
    add(registry, "b", (rate_name("x"), Rate(), config)).record(500, 0)

    exposed = CollectorRegistry()
    exposed.register(SensorCollector(registry, lambda: 0.0))
    lines = generate_latest(exposed).decode().splitlines()
    series = [line for line in lines if not line.startswith("#")]
    assert len(series) == 2
    assert scrape()["kafka_quota_proxy_rate_bytes"][2] == {key("x"): 10}


def test_changes_of_quotas_and_sensors_show_at_the_next_scrape(registry, scrape):
    sensor = add(registry, "a", (rate_name("a"), Rate(), SIX_SAMPLES))
    assert "kafka_quota_proxy_bound_bytes" not in scrape()

    (metric,) = sensor.metrics
    metric.config = dataclasses.replace(metric.config, quota=Quota(7))
    assert scrape()["kafka_quota_proxy_bound_bytes"][2] == {key("a"): 7}

    registry.remove("a")
    assert scrape() == {}


def test_a_sensor_that_goes_while_samples_are_read_is_left_out(registry):
    for name in ("a", "b", "c"):
        add(registry, name, (rate_name(name), Rate(), SIX_SAMPLES)).record(50, 0)
    (family,) = SensorCollector(registry, lambda: 0.0).collect()
    samples = iter(family.samples)
    first = next(samples)
    registry.remove("b")
    add(registry, "d", (rate_name("d"), Rate(), SIX_SAMPLES))

    assert [sample.labels["quota_entity"] for sample in (first, *samples)] == ["a", "c"]


def test_each_sensor_is_measured_when_its_sample_is_read(registry, clock):
    for name in ("a", "b"):
        add(registry, name, (rate_name(name), Rate(), SIX_SAMPLES)).record(50, 0)
    (family,) = SensorCollector(registry, clock).collect()
    samples = iter(family.samples)
    first = next(samples)
    clock.now_ms = 6000

    assert (first.value, next(samples).value) == (10, 0)
