"""A rule for a topic bounds what its clients read and write of it, and nothing else of them."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from support.clients import CLIENTS, Access, Client
from support.proxy_process import ProxyProcess
from support.raw import RawClient, fetch

from examples.devkit.broker import EmbeddedBroker

BOUND_BYTES = 300_000
RECORD_BYTES = 1000
COUNT = 6000
READ_S, LIMIT_S = 8.0, 60.0
BURST_S = 0.5
FETCH_VERSION = 12
BEHIND_S = 1.0
"""Of the bound: what may be under way before it is counted."""
BATCH_BYTES = 16 << 10
PART_BYTES = 64 << 10
"""Of a partition in one response: what may have passed before it is counted."""


def quotas(*rules: dict[str, object]) -> dict[str, object]:
    return {"burst": f"{BURST_S}s", "rules": list(rules)}


def write(bootstrap: str, topic: str, count: int) -> float:
    """Write records in small batches; return how long that took."""
    settings = {
        "bootstrap.servers": bootstrap,
        "client.id": "app",
        "linger.ms": 50,
        "batch.size": BATCH_BYTES,
    }
    producer, begin_s = Producer(settings), time.monotonic()
    for _ in range(count):
        producer.produce(topic, bytes(RECORD_BYTES), partition=0)
        producer.poll(0)
    assert producer.flush(60) == 0
    return time.monotonic() - begin_s


def read(bootstrap: str, client_id: str, topics: list[str], whole: int = 0) -> Counter[str]:
    """Read topics for some seconds, or until all that they have came; return how many bytes of
    each did.
    """
    settings = {
        "bootstrap.servers": bootstrap,
        "client.id": client_id,
        "group.id": client_id,
        "auto.offset.reset": "earliest",
        "fetch.message.max.bytes": PART_BYTES,
    }
    sizes: Counter[str] = Counter()
    consumer = Consumer(settings)
    try:
        consumer.assign([TopicPartition(name, 0, 0) for name in topics])
        until_s = time.monotonic() + (LIMIT_S if whole else READ_S)
        while time.monotonic() < until_s and not 0 < whole <= sizes.total():
            for each in consumer.consume(1000, 0.1):
                assert each.error() is None
                sizes[each.topic() or ""] += len(each.value() or b"")
    finally:
        consumer.close()
    return sizes


def test_one_of_two_topics_is_bounded(
    kafka: EmbeddedBroker, proxy: Callable[..., ProxyProcess], topic: Callable[..., str]
) -> None:
    bounded, free = topic(), topic()
    for name in (bounded, free):
        write(kafka.bootstrap, name, COUNT)
    rule = {"client-id": "etl", "topic": bounded, "consumer_byte_rate": BOUND_BYTES}
    running = proxy(quotas=quotas(rule))
    whole = COUNT * RECORD_BYTES
    other = read(running.bootstrap, "other", [bounded, free], 2 * whole)
    assert other == {bounded: whole, free: whole}
    assert running.metrics().value("topic_walks_total") == 0, "no rule is for it"
    got = read(running.bootstrap, "etl", [bounded, free])
    most_bytes = (READ_S + BURST_S) * BOUND_BYTES + 2 * PART_BYTES
    assert 0.6 * READ_S * BOUND_BYTES < got[bounded] < most_bytes
    assert got[free] > 0
    metrics = running.metrics()
    assert metrics.value("topic_walks_total") > 0
    entity = f"client-id=etl,topic={bounded}"
    held = metrics.value("throttled_responses_total", quota_entity=entity)
    assert held > 0
    assert read(running.bootstrap, "etl", [free], whole)[free] == whole


@pytest.mark.parametrize("mode", ["delay", "mute"])
@pytest.mark.parametrize(("connections", "stays"), [(10, True), (10, False)])
def test_many_connections_and_new_ones_get_no_more(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    mode: str,
    connections: int,
    stays: bool,
) -> None:
    name = topic()
    write(kafka.bootstrap, name, COUNT)
    rule = {"topic": name, "consumer_byte_rate": BOUND_BYTES}
    running = proxy(quotas=quotas(rule), throttle={"mode": mode})
    begin_s = time.monotonic()
    until_s = begin_s + READ_S

    def read_on(number: int) -> int:
        got = 0
        while time.monotonic() < until_s:
            with RawClient(running.bootstrap, f"reader-{number}") as client:
                while time.monotonic() < until_s:
                    answer = client.ask(fetch(FETCH_VERSION, name))
                    got += len(answer.responses[0].partitions[0].records)
                    if not stays:
                        break
        return got

    with ThreadPoolExecutor(connections) as pool:
        got = sum(pool.map(read_on, range(connections)))
    took_s = time.monotonic() - begin_s  # what is held at the end of READ_S comes after it
    most_s = took_s + BURST_S + BEHIND_S
    assert 0.5 * READ_S * BOUND_BYTES < got < most_s * BOUND_BYTES + connections * BATCH_BYTES


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_all_clients_of_a_topic_share_its_bound(
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
    client: Client,
) -> None:
    name = topic()
    fill(name, 1000, RECORD_BYTES)
    running = proxy(quotas=quotas({"topic": name, "consumer_byte_rate": BOUND_BYTES}))
    begin_s = time.monotonic()
    for client_id in ("a", "b"):
        assert client.consume(Access(running.bootstrap, client_id), name, 1000).count == 1000
    least_s = 2000 * RECORD_BYTES / BOUND_BYTES - BURST_S - 1.2 * 1000 * RECORD_BYTES / BOUND_BYTES
    assert time.monotonic() - begin_s > least_s
    assert running.metrics().labels("rate_bytes", "quota_entity") == {f"topic={name}"}


def test_what_is_written_to_topics_that_begin_alike(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str]
) -> None:
    bounded, free = topic(), topic()
    rule = {"topic-prefix": bounded, "producer_byte_rate": BOUND_BYTES}
    running = proxy(quotas=quotas(rule))
    write(running.bootstrap, free, 2000)
    assert not running.metrics().value("throttled_responses_total")
    took_s = write(running.bootstrap, bounded, 2000)
    assert took_s > 2000 * RECORD_BYTES / BOUND_BYTES - BURST_S - 1
    entity = f"topic={bounded}"
    assert running.metrics().value("throttled_responses_total", quota_entity=entity) > 0
