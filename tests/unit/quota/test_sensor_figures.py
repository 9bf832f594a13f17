"""What Prometheus reads of the sensors."""

import pytest
from parts.quota_world import QuotaWorld, sensor_collector
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from proxy.quota.entities import CONSUMER_BYTE_RATE, DEFAULT, ClientIdentity
from proxy.quota.rules import QuotaManagerSettings, Rule

BOUND = 10_000_000.0
HOUR_MS = 3_600_000.0
RATES, BOUNDS = "kafka_quota_proxy_rate_bytes", "kafka_quota_proxy_bound_bytes"


def settings(bound=BOUND):
    rule = Rule(client_id=DEFAULT, bounds={CONSUMER_BYTE_RATE: bound})
    return QuotaManagerSettings(rules=(rule,), samples=6)


class Scraped(QuotaWorld):
    """Sensors of clients, over six samples of a second each."""

    def __init__(self, bound=BOUND):
        self.now_ms = 0.0
        self.open_quotas(settings(bound))
        self.collector = sensor_collector(self.quotas, lambda: self.now_ms)

    def read(self, client_id, size):
        self.client_quotas(client_id).charge(CONSUMER_BYTE_RATE, size, self.now_ms)

    def scrape(self):
        """Return by the names of families their type, their help and {entity: value}."""
        exposed = CollectorRegistry()
        exposed.register(self.collector)
        return {
            family.name: (
                family.type,
                family.documentation,
                {each.labels["quota_entity"]: each.value for each in family.samples},
            )
            for family in text_string_to_metric_families(generate_latest(exposed).decode())
        }

    def values(self, name):
        return self.scrape()[name][2]

    def samples(self):
        """Return the samples of the rates, each of which is made when it is read."""
        return iter(next(iter(self.collector.collect())).samples)


def test_without_sensors_there_are_no_series():
    assert not any(series for _, _, series in Scraped().scrape().values())


def test_rates_and_bounds():
    world = Scraped()
    world.read("a", 50)
    world.read("b", 500)
    world.now_ms = 5000

    families = world.scrape()
    assert families[RATES] == (
        "gauge",
        "Measured rate of a quota's entity: bytes per second, or percent.",
        {"client-id=a": 10, "client-id=b": 100},
    )
    assert families[BOUNDS] == (
        "gauge",
        "Bound that the quota sets for the measured value, in the same unit.",
        {"client-id=a": BOUND, "client-id=b": BOUND},
    )
    labels = {"quota_entity": "client-id=a", "quota": "consumer_byte_rate"}
    assert next(world.samples()).labels == labels


def test_values_are_those_of_the_scrape_not_of_the_last_record():
    world = Scraped()
    world.read("a", 50)
    measured = []
    for world.now_ms in (0, 2500, 6000):
        measured.append(world.values(RATES)["client-id=a"])

    assert measured == [10, pytest.approx(50 / 5.5), 0]


def test_a_violation_shows_as_a_rate_above_the_bound():
    world = Scraped(bound=10.0)
    world.read("a", 100)

    assert world.values(RATES) == {"client-id=a": 20}
    assert world.values(BOUNDS) == {"client-id=a": 10}


@pytest.mark.parametrize("client_id", ['quo"te', "back\\slash", "new\nline", "", "käse", "a,b={}"])
def test_any_label_value_comes_back_as_it_was(client_id):
    world = Scraped()
    world.read(client_id, 50)
    identity = ClientIdentity("default", None, client_id)
    match = world.quotas.table.match(CONSUMER_BYTE_RATE, identity)
    assert match is not None

    assert world.values(RATES) == {match.entity: 10}


def test_changes_of_quotas_and_sensors_show_at_the_next_scrape():
    world = Scraped()
    world.read("a", 50)
    world.quotas.update(settings(bound=7.0))
    world.read("a", 0)
    assert world.values(BOUNDS) == {"client-id=a": 7}

    assert sum(world.quotas.expiring(HOUR_MS)) == 1
    assert world.values(RATES) == world.values(BOUNDS) == {}


def test_a_sensor_that_goes_while_samples_are_read_is_left_out():
    world = Scraped()
    for client_id in ("a", "b", "c"):
        world.read(client_id, 50)
    world.now_ms = HOUR_MS / 2
    for client_id in ("a", "c"):
        world.read(client_id, 50)
    world.now_ms = HOUR_MS
    samples = world.samples()
    first = next(samples)
    assert sum(world.quotas.expiring(HOUR_MS)) == 1
    world.read("d", 50)

    found = [sample.labels["quota_entity"] for sample in (first, *samples)]
    assert found == ["client-id=a", "client-id=c"]


def test_each_sensor_is_measured_when_its_sample_is_read():
    world = Scraped()
    for client_id in ("a", "b"):
        world.read(client_id, 50)
    samples = world.samples()
    first = next(samples)
    world.now_ms = 6000

    assert (first.value, next(samples).value) == (10, 0)
