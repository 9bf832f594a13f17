"""What Prometheus reads of progress."""

import pytest
from parts.query_world import learn_end
from parts.reports import batch_document
from progress_world import Client, uuid
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from proxy.progress.events import ProgressEventKind
from proxy.progress.progress_collector import ProgressMetricsCollector

PREFIX = "kafka_quota_proxy_"


def scrape(world, max_label_sets=100):
    """Return name to {label values: value}."""
    registry = CollectorRegistry()
    registry.register(
        ProgressMetricsCollector(world.registry, lambda: world.now_ms, max_label_sets)
    )
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            series = found.setdefault(sample.name.removeprefix(PREFIX), {})
            labels = tuple(sample.labels.values())
            assert labels not in series, "a doubled series fails the whole scrape"
            series[labels] = sample.value
    return found


def test_the_figures_of_a_partition(world):
    driver = world.driver()
    Client(world).read(0, end=40, hw=100)
    driver.batch(None, 30)
    Client(world).read(35, end=37, hw=100)
    world.wait(2000)
    driver.batch(50, 50)
    labels = ("0", "orders", "t")
    found = scrape(world)
    assert {name: series[labels] for name, series in found.items() if labels in series} == {
        "partition_position": 50,
        "partition_high_watermark": 100,
        "partition_committed": 50,
        "partition_lag": 50,
        "partition_lag_seconds": 2,
        "partition_stuck": 0,
        "partition_skipped_records_total": 20,
        "partition_refetched_records_total": 2,
    }
    assert found["spark_reports_total"] == {("accepted",): 2, ("lost",): 0}


def test_the_labels(world):
    Client(world).read(0)
    registry = CollectorRegistry()
    registry.register(ProgressMetricsCollector(world.registry, lambda: world.now_ms, 10))
    text = generate_latest(registry).decode()
    assert 'partition_lag{partition="0",query="orders",topic="t"} 1000.0' in text


def test_what_is_not_known_is_left_out(world):
    Client(world).ask(0)
    found = scrape(world)
    assert "partition_committed" not in found
    assert "partition_lag" not in found
    assert found["partition_stuck"] == {("0", "orders", "t"): 0}


def test_a_stuck_partition(world):
    Client(world).read(0)
    world.wait(0)
    world.wait(300_000)
    assert scrape(world)["partition_stuck"] == {("0", "orders", "t"): 1}


def test_reports_by_what_became_of_them(world):
    driver = world.driver()
    driver.batch(None, 10)
    driver.refused(5, 4)
    driver.lose(2)
    driver.batch(10, 20)
    assert scrape(world)["spark_reports_total"] == {
        ("accepted",): 2,
        ("lost",): 2,
        ("impossible",): 1,
    }


def test_how_long_batches_take_against_their_trigger(world):
    driver = world.driver()
    trigger = {"kind": "processing_time", "interval_ms": 2000}
    driver.send("started", trigger=trigger)
    assert "query_batch_seconds_count" not in scrape(world)
    for number, took_ms in enumerate((1_000, 5_500)):
        batch = batch_document(number, 10 * number, 10 * number + 10, rows=7, took_ms=took_ms)
        driver.send("progress", batch=batch)
    found = scrape(world)
    orders = ("orders",)
    assert found["query_trigger_seconds"] == {orders: 2}
    assert found["query_rows_total"] == {orders: 14}
    assert (found["query_batch_seconds_count"], found["query_batch_seconds_sum"]) == (
        {orders: 2},
        {orders: 6.5},
    )
    buckets = found["query_batch_seconds_bucket"]
    assert [buckets["1.0", "orders"], buckets["5.0", "orders"], buckets["10.0", "orders"]] == [
        *(1, 1, 2)
    ]


@pytest.mark.parametrize("kind", ["available_now", "once", "continuous"])
def test_other_triggers_have_no_interval_to_keep_to(world, kind):
    world.driver().send("started", trigger={"kind": kind, "interval_ms": 1000})
    assert "query_trigger_seconds" not in scrape(world)


def test_a_query_has_failed_until_it_begins_again(world):
    driver = world.driver()
    driver.batch(None, 10)
    assert scrape(world)["query_failed"] == {("orders",): 0}
    driver.send("terminated", error="no such order")
    assert scrape(world)["query_failed"] == {("orders",): 1}
    driver.restart("run-2")
    assert scrape(world)["query_failed"] == {("orders",): 0}
    driver.send("terminated")
    assert scrape(world)["query_failed"] == {("orders",): 0}


def test_advice_is_shown_until_it_is_followed(world):
    world.driver().batch(None, 10)
    world.query().advise(ProgressEventKind.INTERVAL, "write batch_interval: 2s", world.now_ms)
    assert scrape(world)["query_advice"] == {("interval", "orders"): 1}
    world.query().advise(ProgressEventKind.INTERVAL, None, world.now_ms)
    assert "query_advice" not in scrape(world)


def test_queries_beyond_the_bound_are_other(world):
    world.known |= {"a", "b", "c"}
    for client_id in ("a", "b", "c"):
        ids = {"query_id": uuid(client_id), "sender": uuid(client_id)}
        driver = world.driver(name=client_id, client_id=client_id, **ids)
        driver.send("started", trigger={"kind": "processing_time", "interval_ms": 2000})
        driver.send("progress", batch=batch_document(0, None, 5, rows=5, took_ms=1000))
    found = scrape(world, max_label_sets=2)  # `orders` has come first, and has done nothing
    assert found["query_rows_total"] == {("orders",): 0, ("a",): 5, ("other",): 10}
    assert found["query_trigger_seconds"] == {("a",): 2, ("other",): 2}
    assert found["query_batch_seconds_count"] == {("a",): 1, ("other",): 2}


def test_what_exceeds_the_bound_is_added_up_under_other(world):
    driver = world.driver()
    driver.batch(None, {n: 10 * n for n in range(5)})
    for partition, end in enumerate((100, 100, 100, 200, 0)):
        world.wait(1000)
        learn_end(world.registry, "t", partition, end, world.now_ms)
    found = scrape(world, max_label_sets=2)
    other = ("other", "other", "other")
    assert set(found["partition_lag"]) == {("0", "orders", "t"), ("1", "orders", "t"), other}
    assert found["partition_lag"][other] == 80 + 170
    assert found["partition_lag_seconds"][other] == 2
    assert found["partition_skipped_records_total"][other] == 0


def test_nothing_is_under_other_while_there_is_room(world):
    world.driver().batch(None, {0: 1, 1: 1})
    assert ("other",) * 3 not in scrape(world, max_label_sets=2)["partition_committed"]


def test_queries_of_one_name_make_no_doubled_series(world):
    world.known |= {"a", "b"}
    for client_id in ("a", "b"):
        world.driver(
            name="same", client_id=client_id, query_id=uuid(client_id), sender=uuid(client_id)
        ).batch(None, 5)
    assert len(scrape(world)["partition_committed"]) == 2


def test_a_partition_that_goes_while_the_scrape_is_under_way_disturbs_no_other(world):
    world.driver().batch(None, dict.fromkeys(range(3), 10))
    collector = ProgressMetricsCollector(world.registry, lambda: world.now_ms, 100)
    (query,) = world.registry.queries
    for family in collector.collect():
        for number, _ in enumerate(family.samples):
            if number == 0 and ("t", 1) in query.partitions:
                query.revoke(query.partitions["t", 1], "gone", world.now_ms)
                query.open("t", 7, world.now_ms)
    assert set(scrape(world)["partition_stuck"]) == {
        (str(partition), "orders", "t") for partition in (0, 2, 7)
    }


def test_there_must_be_room_for_a_label_set(world):
    with pytest.raises(ValueError, match="max_label_sets"):
        ProgressMetricsCollector(world.registry, lambda: 0.0, 0)
