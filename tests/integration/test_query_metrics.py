"""What Prometheus reads of queries: from the reports that a driver posts, to /metrics."""

from collections.abc import Callable
from typing import Any

import pytest
from support.proxy_process import ProxyProcess, until
from support.raw import RawClient, fetch
from support.report_poster import ReportPoster
from support.streams import feed, known

from examples.devkit.broker import EmbeddedBroker

Run = Callable[..., ProxyProcess]
MakeTopic = Callable[..., str]

NAME = "orders"
RECORDS = 40
RECORD_BYTES = 1000
FETCH_VERSION = 12
INTERVAL_S = 2.0
EVERY_TWO_SECONDS = {"kind": "processing_time", "interval_ms": 1000 * INTERVAL_S}
RULE = {
    "client-id": NAME,
    "consumer_byte_rate": "50MB",
    "adaptive": {"batch_interval": "1s", "min_rate": 100, "max_rate": 100},
}


class Scene:
    """A query under an adaptive rule, whose driver the test is."""

    def __init__(self, kafka: EmbeddedBroker, proxy: Run, topic: str) -> None:
        self.running = proxy(rules=[RULE])
        self.topic = topic
        feed(kafka.bootstrap, topic, RECORDS, RECORD_BYTES, [0])
        self.poster = ReportPoster(self.running, topic, NAME)

    def post(self, event: str, **fields: Any) -> None:
        status, answer = self.poster.post(self.poster.event(event, **fields))
        assert status == 200, answer

    def batch(self, number: int, took_ms: int) -> None:
        """Read 10 records and report them."""
        with RawClient(self.running.bootstrap, NAME) as client:
            client.ask(fetch(FETCH_VERSION, self.topic, offset=10 * number))
        batch = self.poster.batch(number, 10 * number, 10 * number + 10, rows=10)
        second = int(number * INTERVAL_S)
        batch["timestamp"] = f"2026-01-02T03:04:{second:02}.000Z"
        batch["durations_ms"] = {"triggerExecution": took_ms}
        self.post("progress", batch=batch)

    def value(self, name: str, **labels: str) -> float:
        return self.running.metrics().value(name, query=NAME, **labels)

    def shows(self, name: str) -> bool:
        return NAME in self.running.metrics().labels(name, "query")


@pytest.fixture
def scene(kafka: EmbeddedBroker, proxy: Run, topic: MakeTopic) -> Scene:
    return Scene(kafka, proxy, topic(1))


def test_batches_against_their_trigger_rows_bound_advice_and_failure(scene: Scene) -> None:
    scene.post("started", trigger=EVERY_TWO_SECONDS)
    scene.batch(0, 1500)
    scene.batch(1, 5500)
    assert scene.value("query_trigger_seconds") == INTERVAL_S
    assert scene.value("query_batch_seconds_count") == 2
    assert scene.value("query_batch_seconds_sum") == 7
    assert scene.value("query_batch_seconds_bucket", le="2.0") == 1
    assert scene.value("query_rows_total") == 20
    bound = scene.value("adaptive_bound_bytes")
    assert 0 < bound < 50_000_000
    assert (
        scene.value("pid_bound_bytes") == bound == known(scene.running, NAME)["adaptive"]["bound"]
    )
    assert scene.running.metrics().labels("query_advice", "kind") == {"interval"}
    assert scene.value("query_failed") == 0
    scene.post("terminated", error="no such order")
    assert scene.value("query_failed") == 1
    scene.poster.driver.run_id = scene.poster.driver.sender  # some other id
    scene.post("started", trigger={**EVERY_TWO_SECONDS, "interval_ms": 1000})
    assert scene.value("query_failed") == 0
    assert scene.value("query_rows_total") == 20
    assert not scene.shows("query_advice")


def test_a_trigger_that_nobody_knows_does_no_harm(scene: Scene) -> None:
    scene.post("started", trigger={"kind": "whenever", "interval_ms": 20})
    for number in range(3):
        scene.batch(number, 1000)
    document = known(scene.running, NAME)
    assert document["trigger"] == {"kind": "other", "interval_s": 0.02}
    assert (document["run_batches"], document["adaptive"]["clamp"]["on"]) == (3, False)
    assert document["adaptive"]["bound"] == document["adaptive"]["static_bound"]
    assert not scene.shows("query_trigger_seconds")
    assert scene.value("query_rows_total") == 30
    until(lambda: scene.value("query_advice", kind="trigger") == 1, "it is said")
