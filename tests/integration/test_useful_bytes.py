"""What a client is charged for is what it can use: limits of its Fetches cut few batches off."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from random import Random

import pytest
from confluent_kafka import Producer
from support.clients import Access, Librdkafka
from support.kafka_tools import run_tool, tool_jars
from support.proxy_process import ProxyProcess

from examples.devkit.broker import EmbeddedBroker

CONSUMER_TOOL = "org.apache.kafka.tools.ConsumerPerformance"
MODES = ("delay", "mute")
BOUND_BYTES = 250_000
PARTITIONS = 6
BATCH_BYTES = 16 << 10
RECORD_BYTES = 1000
STORED_BYTES = RECORD_BYTES + 13
"""With what a record, and its part of a batch's header, takes beside its value."""
COUNT = 3600
"""Some 14 s at the bound, of which one passes before a client is found above it."""
USEFUL = 0.95


def write_batches(bootstrap: str, topic: str) -> None:
    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 200, "batch.size": BATCH_BYTES}
    )
    random = Random(1)
    for number in range(COUNT):
        producer.produce(topic, random.randbytes(RECORD_BYTES), partition=number % PARTITIONS)
        producer.poll(0)
    assert producer.flush(60) == 0


@pytest.mark.slow
def test_few_bytes_are_read_and_charged_twice(
    kafka: EmbeddedBroker, proxy: Callable[..., ProxyProcess], topic: Callable[..., str]
) -> None:
    """All read side by side, each through a quota of its own."""
    name = topic(PARTITIONS)
    write_batches(kafka.bootstrap, name)
    jars = tool_jars()
    rules = [{"client-id": "<default>", "consumer_byte_rate": BOUND_BYTES}]
    by_mode = {mode: proxy(rules=rules, throttle={"mode": mode}) for mode in MODES}

    def read_python(bootstrap: str) -> None:
        assert Librdkafka().consume(Access(bootstrap), name, COUNT).count == COUNT

    def read_java(bootstrap: str) -> None:
        arguments = (f"--topic={name}", f"--messages={COUNT}", "--timeout=30000")
        run_tool(CONSUMER_TOOL, bootstrap, *arguments, jars=jars)

    readers = list(product(by_mode.values(), (read_python, read_java)))
    with ThreadPoolExecutor(len(readers)) as pool:
        list(pool.map(lambda running, read: read(running.bootstrap), *zip(*readers, strict=True)))
    useful = {}
    for mode, running in by_mode.items():
        metrics = running.metrics()
        for client_id in metrics.labels("bytes_total", "client_id"):
            charged = metrics.value("bytes_total", client_id=client_id, api="Fetch")
            if charged:  # its requests are in it, too
                useful[mode, client_id] = COUNT * STORED_BYTES / charged
    assert len(useful) == len(readers)
    assert {who: share for who, share in useful.items() if share < USEFUL} == {}, useful
