"""How old what is known from reports is: as a figure, and as advice where it is too old."""

import pytest
from progress_world import Client, ProgressWorld
from prometheus_client import CollectorRegistry

from proxy.progress.progress_collector import ProgressMetricsCollector
from proxy.progress.query import LATE_REPORTS_MS

PREFIX = "kafka_quota_proxy_"


def age_s(world):
    """Return the age as the document has it, which is that of the metric."""
    registry = CollectorRegistry()
    registry.register(ProgressMetricsCollector(world.registry, lambda: world.now_ms, 10))
    name = PREFIX + "spark_report_age_seconds"
    shown = registry.get_sample_value(name, {"query": "orders"})
    assert shown == world.document()["report_age_s"]
    return shown


def advised(world):
    return [each["kind"] for each in world.document()["advice"]]


def beat(driver, known_age_ms=0.0, last_batch_id=0):
    driver.send("running", known_age_ms=known_age_ms, last_batch_id=last_batch_id)


def test_an_event_is_as_old_as_it_was_when_it_came(world, driver):
    assert age_s(world) == 0
    world.wait(10_000)
    driver.batch(10, 20, age_ms=4000)
    assert age_s(world) == 4
    driver.send("idle", age_ms=7000)  # which comes later, and is older
    assert age_s(world) == 4
    driver.send("terminated")
    assert age_s(world) is None


def test_nothing_is_known_without_a_report(world):
    assert age_s(world) is None
    beat(world.driver(), last_batch_id=7)  # a batch that was done before this proxy was there
    assert age_s(world) is None


def test_a_heartbeat_says_that_no_batch_is_missing(world, driver):
    world.wait(60_000)
    beat(driver, known_age_ms=500)
    assert age_s(world) == 0.5
    world.wait(1000)
    beat(driver, known_age_ms=None)  # Spark can't be asked
    assert age_s(world) == 1.5
    beat(driver, last_batch_id=1)  # the report on it was lost
    assert age_s(world) == 1.5


def test_a_new_run_begins_anew(world, driver):
    world.wait(60_000)
    driver.restart("run-2")
    assert age_s(world) == 0


@pytest.mark.parametrize("batch_id", [0, None], ids=["between triggers", "before the first batch"])
def test_a_query_that_waits_for_long_is_not_advised(world, driver, batch_id):
    client = Client(world)
    if batch_id is None:
        driver.restart("run-2")
    for _ in range(100):
        world.wait(2000)
        beat(driver, known_age_ms=300, last_batch_id=batch_id)
        client.read(10)
    assert (age_s(world), advised(world)) == (0.3, [])


def test_a_driver_that_spark_does_not_answer_is_advised(world, driver):
    beat(driver)
    for _ in range(int(LATE_REPORTS_MS / 1000) - 1):
        world.wait(1000)
        beat(driver, known_age_ms=world.now_ms)
    assert advised(world) == []
    world.wait(1000)
    (advice,) = world.document()["advice"]
    assert advice["kind"] == "reports"
    assert "slow" in advice["text"]
    assert world.kinds() == ["reports"]
    beat(driver)
    world.wait(0)
    assert advised(world) == []


def test_a_listener_that_can_t_ask_spark_is_not_advised(world, driver):
    for _ in range(100):
        world.wait(1000)
        beat(driver, known_age_ms=None)
    assert age_s(world) == 100
    assert advised(world) == []


def read_on(world: ProgressWorld, seconds: int) -> None:
    client = Client(world)
    for _ in range(seconds):
        world.wait(1000)
        client.read(10)


def test_a_query_that_reads_on_without_its_listener_is_advised(world, driver):
    read_on(world, int(LATE_REPORTS_MS / 1000) - 1)
    world.wait(500)
    assert advised(world) == []
    read_on(world, 2)
    world.wait(0)
    (advice,) = world.document()["advice"]
    assert "not heard" in advice["text"]
    assert age_s(world) == LATE_REPORTS_MS / 1000 + 1.5
    driver.send("running")
    world.wait(0)
    assert advised(world) == []
    assert world.kinds() == ["reports"]


def test_a_driver_that_is_gone_is_not_advised(world, driver):
    beat(driver)
    read_on(world, 3)
    for _ in range(100):
        world.wait(1000)
    assert advised(world) == []


def test_a_query_without_a_listener_is_not_advised(world):
    read_on(world, 100)
    assert advised(world) == []
