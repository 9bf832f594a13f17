"""Topics of a benchmark: made, and filled as fast as the broker takes it."""

from collections.abc import Mapping

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.processes import BenchError

SettingsBase = Mapping[str, str | int]
"""Of a producer."""

ADMIN_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 120.0
QUEUE_POLL_S = 0.05


def create(bootstrap: str, topic: str, partitions: int) -> None:
    """Create a topic; return when it is there."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(ADMIN_TIMEOUT_S)


def fill(
    bootstrap: str, topic: str, partitions: int, value: bytes, count: int, settings: SettingsBase
) -> None:
    """Write `count` records to the partitions in turn; raise BenchError when it takes too long."""
    producer = Producer({"bootstrap.servers": bootstrap, **settings})
    for number in range(count):
        while True:
            try:
                producer.produce(topic, value, partition=number % partitions)
                break
            except BufferError:
                producer.poll(QUEUE_POLL_S)
    if producer.flush(FLUSH_TIMEOUT_S):
        raise BenchError(f"{topic} was not filled in {FLUSH_TIMEOUT_S:.0f} s")
