"""What is kept of how fast clients read and write, for how long, and of how many."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.rates.observed_rates import (
    BUCKETS_PER_DOUBLING,
    KEPT_HOURS,
    RATES_FORMAT,
    SECONDS_PER_HOUR,
    Observed,
    ObservedClient,
    ObservedRates,
    RateSeries,
    SeenSeries,
    observed_client,
)
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.state import MemoryStore, Record

CONSUMER, PRODUCER, *_ = QuotaKind
ERROR = 2 ** (1 / BUCKETS_PER_DOUBLING)
NOON_S = 1_790_000_000.0 // SECONDS_PER_HOUR * SECONDS_PER_HOUR
MIB = 2**20
SPARK = "consumer-spark-kafka-source-{}-1234567-executor-{}"
RUNS = ("92017897-daab-4d28-a2d5-5cc4133bee8f", "C11A5E77-01D1-4431-A753-36BFC3FA3355")

rates_seen = st.lists(st.floats(0.01, 1e13), min_size=1, max_size=50)


def sketch_of(values: Iterable[float]) -> SeenSeries:
    series = RateSeries(ObservedClient(None, "etl", False), CONSUMER)
    sketch = SeenSeries(series, ClientIdentity("default", None, "etl"))
    for value in values:
        sketch.add(value, 10)
    return sketch


@given(rates_seen, st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_at_most_nine_percent_high(values, share):
    exact = sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]
    assert exact * (1 - 1e-9) <= sketch_of(values).quantile(share) <= exact * ERROR * (1 + 1e-9)


@given(rates_seen, rates_seen)
def test_merged_sketches_are_that_of_all(some, others):
    merged = sketch_of(some)
    merged.include(sketch_of(others))
    assert merged == sketch_of(some + others)
    assert merged.peak == max(some + others)
    assert merged.total_bytes == 10 * merged.counts.total()


def test_nothing_was_seen():
    assert sketch_of([]).quantile(0.99) == 0.0


@pytest.mark.parametrize(
    ("user", "client_id", "client"),
    [
        ("", "etl", ObservedClient(None, "etl", False)),
        ("anna", "reports-7", ObservedClient("anna", "reports-7", False)),
        *(
            ("", SPARK.format(run, n), ObservedClient(None, "consumer-spark-kafka-source-", True))
            for run in RUNS
            for n in (1, 2)
        ),
        ("", RUNS[0], ObservedClient(None, "", True)),
        ("", "", ObservedClient(None, "", False)),
        ("", RUNS[0][:-1], ObservedClient(None, RUNS[0][:-1], False)),
    ],
)
def test_whom_a_client_counts_as(user, client_id, client):
    assert observed_client(user, client_id) == client


@dataclass
class Counted:
    value: float = 0.0


class RatesWorld:
    """Clients that read and write; each step is a sample's ten seconds."""

    def __init__(self, **limits):
        self.counters: dict[tuple[str, ...], Counted] = {}
        self.limits = {"max_clients": 100, **limits}
        self.now_ms, self.now_s = 0.0, NOON_S
        self.store = MemoryStore()
        self.reopen()

    def reopen(self):
        self.rates = ObservedRates(self.counters, **self.limits)
        refused = self.rates.load(self.store.items(RATES_FORMAT.prefix), self.now_s)
        self.sample()
        return refused

    def sample(self):
        for _ in self.rates.sample(self.now_ms, self.now_s):
            pass

    def write(self):
        while self.rates.journal:
            records, deleted = self.rates.journal.take(3)
            self.store.put_many(records, delete=deleted)

    def step(self, seconds=10.0, /, user="", api="Fetch", listener="default", **sizes):
        """Let clients move so many bytes, and take a sample."""
        for client_id, size in sizes.items():
            self.counters.setdefault((listener, user, client_id, api), Counted()).value += size
        self.now_ms += seconds * 1000
        self.now_s += seconds
        self.sample()

    def seen(self, name="etl", kind=CONSUMER, user=None, hours=24.0):
        first = int((self.now_s - hours * SECONDS_PER_HOUR) // SECONDS_PER_HOUR)
        observed = Observed()
        for _ in observed.adding(self.rates, first):
            pass
        return observed.by_series.get(RateSeries(ObservedClient(user, name, False), kind))


def test_both_directions_are_seen_and_times_without_traffic_are_not():
    world = RatesWorld()
    world.step(etl=10 * MIB)
    world.step()
    world.step(api="Produce", etl=20 * MIB)
    world.step(etl=30 * MIB)
    world.step(api="Metadata", etl=MIB)
    read, written = world.seen(), world.seen(kind=PRODUCER)
    assert (read.counts.total(), read.peak, read.total_bytes) == (2, 3 * MIB, 40 * MIB)
    assert (written.counts.total(), written.peak, written.total_bytes) == (1, 2 * MIB, 20 * MIB)


def test_a_late_sample_is_of_a_longer_time():
    world = RatesWorld()
    world.step(20.0, etl=20 * MIB)
    assert world.seen().peak == MIB


def test_a_client_is_the_same_on_all_listeners_and_for_all_of_its_executors():
    world = RatesWorld()
    world.counters["other", "", "etl", "Fetch"] = Counted(10 * MIB)
    for number, run in enumerate(RUNS):
        key = "default", "", SPARK.format(run, number), "Fetch"
        world.counters[key] = Counted(10 * MIB)
    world.step(etl=10 * MIB)
    assert world.seen().peak == 2 * MIB
    (spark,) = [found for found in world.rates.since(0) if found.series.client.is_prefix]
    assert spark.peak == 2 * MIB


def test_users_are_told_apart():
    world = RatesWorld()
    world.step(etl=MIB)
    world.step(user="anna", etl=2 * MIB)
    assert world.seen().total_bytes == MIB
    assert world.seen(user="anna").total_bytes == 2 * MIB


def test_a_counter_that_was_dropped_begins_anew():
    world = RatesWorld()
    world.step(etl=30 * MIB)
    world.counters.clear()
    world.step()
    world.step(etl=10 * MIB)
    assert world.seen().total_bytes == 40 * MIB
    world.counters["default", "", "etl", "Fetch"] = Counted(5 * MIB)
    world.step()
    assert world.seen().total_bytes == 45 * MIB


def test_what_was_counted_before_the_first_sample_is_not_a_rate():
    world = RatesWorld()
    world.counters["default", "", "etl", "Fetch"] = Counted(100 * MIB)
    world.reopen()
    world.step(etl=10 * MIB)
    assert world.seen().total_bytes == 10 * MIB


def test_only_the_time_that_was_asked_for_counts():
    world = RatesWorld()
    world.step(etl=10 * MIB)
    world.step(2 * SECONDS_PER_HOUR)
    world.step(etl=MIB)
    assert world.seen(hours=1).total_bytes == MIB
    assert world.seen(hours=3).total_bytes == 11 * MIB


def test_it_is_kept_for_a_week_and_outlives_a_restart():
    world = RatesWorld()
    world.step(etl=10 * MIB, other=MIB)
    world.write()
    before = world.seen()
    assert world.reopen() == []
    assert world.seen() == before
    assert [each.example.client_id for each in world.rates.since(0)] == ["etl", "other"]
    world.step(SECONDS_PER_HOUR, etl=MIB)
    world.write()
    assert len(world.store.items(RATES_FORMAT.prefix)) == 3
    world.step((KEPT_HOURS - 1) * SECONDS_PER_HOUR)
    world.step()
    assert world.seen(hours=999).total_bytes == MIB
    assert world.seen("other", hours=999) is None
    world.write()
    assert len(world.store.items(RATES_FORMAT.prefix)) == 1
    world.now_s += 2 * SECONDS_PER_HOUR
    world.reopen()
    world.write()
    assert world.seen(hours=999) is None
    assert world.store.items(RATES_FORMAT.prefix) == []
    assert world.rates.hours == {}


def test_what_several_processes_of_an_earlier_version_kept_is_added():
    world = RatesWorld()
    world.step(etl=MIB)
    world.write()
    (own,) = world.store.items(RATES_FORMAT.prefix)
    for number in (1, 2):
        document = json.loads(own.text) | {"process": number, "total_bytes": number * MIB}
        world.store.put_many([Record(f"{own.key}/{number}", json.dumps(document), own.version)])
    for _ in range(2):
        assert world.reopen() == []
        assert world.seen().total_bytes == 4 * MIB
        world.write()
        assert [each.key for each in world.store.items(RATES_FORMAT.prefix)] == [own.key]


def test_what_one_hour_has_is_written_anew_as_it_grows():
    world = RatesWorld()
    for size in (MIB, 2 * MIB, 3 * MIB):
        world.step(etl=size)
        world.write()
    (record,) = world.store.items(RATES_FORMAT.prefix)
    assert json.loads(record.text)["total_bytes"] == 6 * MIB


def test_what_could_not_be_written_is_written_later():
    world = RatesWorld()
    world.step(etl=MIB)
    world.rates.journal.take()
    world.rates.journal.give_back()
    world.write()
    assert len(world.store.items(RATES_FORMAT.prefix)) == 1


def test_a_damaged_record_is_left_out():
    world = RatesWorld()
    world.step(etl=MIB, other=MIB)
    world.write()
    first, _ = world.store.items(RATES_FORMAT.prefix)
    world.store.put_many([Record(first.key, '{"user": 7}', 1)])
    (refused,) = world.reopen()
    assert first.key in refused
    assert len(list(world.rates.since(0))) == 1


def test_there_are_no_more_clients_than_fit():
    world = RatesWorld(max_clients=2)
    world.step(**{f"c{number}": MIB for number in range(10)})
    assert len(list(world.rates.since(0))) == 4
    assert len(world.rates.left_out) == 2
    world.step((KEPT_HOURS + 1) * SECONDS_PER_HOUR)
    assert (list(world.rates.since(0)), world.rates.left_out) == ([], set())
    world.step(new=MIB)
    assert world.seen("new") is not None


def test_where_there_is_too_much_the_oldest_hours_go():
    world = RatesWorld(max_sketches=6)
    for _ in range(5):
        world.step(SECONDS_PER_HOUR, a=MIB, b=MIB)
    hours = sorted(world.rates.hours)
    assert len(hours) == 3
    assert hours[-1] == world.now_s // SECONDS_PER_HOUR
