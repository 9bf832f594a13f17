"""Figure: throughput of real clients, writing and reading: direct, by the proxy, by HAProxy.

Kafka's own performance tools (its Java client) and librdkafka's Python client, all with their
defaults, a real broker, quota sensors on and not violated. The ways take turns within each round.
No process is tied to a core: client, broker and what is between share the machine as they would.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from bench import kafka_tools, topics
from bench.behind_haproxy import DIRECT, start_broker, ways_to
from bench.lab import open_lab, unviolated_rules
from bench.processes import BenchError
from bench.report import Row, Verdict

FIGURE = "clients"
PARTITIONS = 3
MEGABYTE = 1e6
FULL_ROUNDS, QUICK_ROUNDS = 3, 1
# By the length of a record: how many are written and read each time.
FULL_RECORDS = {1000: 300_000, 100: 1_000_000}
QUICK_RECORDS = {1000: 20_000}
READ_TOPIC = "bench-read-{}"
FILL_SETTINGS = {"linger.ms": 50, "batch.size": 500_000, "queue.buffering.max.messages": 1_000_000}
# librdkafka's queue holds all that is written, so that its Python side never waits.
QUEUE_SETTINGS = {
    "queue.buffering.max.messages": 2_000_000,
    "queue.buffering.max.kbytes": 1_000_000,
}
TIMEOUT_S = 120.0
CONSUME_AT_ONCE = 10_000
POLL_S = 0.1
# Kafka keeps the files of a deleted topic for a minute, and many are made here.
BROKER_PROPERTIES = {"log.segment.delete.delay.ms": "1000"}

Run = Callable[[str, str, int, int], float]
"""Given bootstrap address, topic, records and their length, returns bytes per second."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client program: what it is called in the table, and how it is run."""

    title: str
    writes: bool
    run: Run


def measure(quick: bool) -> list[Row]:
    """Let each client write and read by each way in turn, and give the rows."""
    rounds, records = (QUICK_ROUNDS, QUICK_RECORDS) if quick else (FULL_ROUNDS, FULL_RECORDS)
    with open_lab() as lab:
        broker = start_broker(lab, BROKER_PROPERTIES)
        proxy = lab.start_proxy(broker.address, unviolated_rules(), pinned=False)
        ways = ways_to(lab, broker, proxy)
        rows = []
        for record_bytes, count in records.items():
            full = READ_TOPIC.format(record_bytes)
            topics.create(broker.bootstrap, full, PARTITIONS)
            topics.fill(
                broker.bootstrap, full, PARTITIONS, bytes(record_bytes), count, FILL_SETTINGS
            )
            for client in CLIENTS:
                rates: dict[str, list[float]] = {way: [] for way in ways}
                before = proxy.metric("bytes_total")
                for _ in range(rounds):
                    for way, bootstrap in ways.items():
                        topic = _new_topic(broker.bootstrap) if client.writes else full
                        rates[way].append(client.run(bootstrap, topic, count, record_bytes))
                        if client.writes:
                            _delete(broker.bootstrap, topic)
                went_through = proxy.metric("bytes_total") - before >= rounds * count * record_bytes
                rows.append(_row(f"{client.title}, {record_bytes} bytes", rates, went_through))
    return rows


def _new_topic(bootstrap: str) -> str:
    topic = f"bench-written-{time.monotonic_ns()}"
    topics.create(bootstrap, topic, PARTITIONS)
    return topic


def _delete(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(TIMEOUT_S)


def _write(bootstrap: str, topic: str, records: int, record_bytes: int) -> float:
    producer = Producer({"bootstrap.servers": bootstrap, **QUEUE_SETTINGS})
    value = os.urandom(record_bytes)
    started_s = time.perf_counter()
    for _ in range(records):
        producer.produce(topic, value)
    if producer.flush(TIMEOUT_S):
        raise BenchError(f"librdkafka did not write all in {TIMEOUT_S:.0f} s")
    return records * record_bytes / (time.perf_counter() - started_s)


def _read(bootstrap: str, topic: str, records: int, record_bytes: int) -> float:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False}
    )
    try:
        started_s = time.perf_counter()
        consumer.assign(
            [TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)]
        )
        read = 0
        while read < records:
            read += sum(
                not message.error() for message in consumer.consume(CONSUME_AT_ONCE, POLL_S)
            )
            if time.perf_counter() - started_s > TIMEOUT_S:
                raise BenchError(f"librdkafka read {read} of {records} records")
        return records * record_bytes / (time.perf_counter() - started_s)
    finally:
        consumer.close()


CLIENTS = (
    Client("kafka-producer-perf-test", True, kafka_tools.write_rate),
    Client("kafka-consumer-perf-test", False, kafka_tools.read_rate),
    Client("librdkafka (Python) writes", True, _write),
    Client("librdkafka (Python) reads", False, _read),
)


def _row(what: str, rates: dict[str, list[float]], went_through: bool) -> Row:
    direct = rates[DIRECT]
    parts = [f"{DIRECT} {statistics.median(direct) / MEGABYTE:.0f} MB/s"]
    for way, found in rates.items():
        if way != DIRECT:
            ratio = statistics.median(
                each / of_direct for each, of_direct in zip(found, direct, strict=True)
            )
            parts.append(f"{way} {statistics.median(found) / MEGABYTE:.0f} ({ratio:.2f}x)")
    if not went_through:
        parts.append("not all of it went through the proxy")
    return Row(
        FIGURE,
        what,
        "",
        ", ".join(parts),
        Verdict.INFO if went_through else Verdict.FAILED,
        {"bytes_per_s": rates},
    )
