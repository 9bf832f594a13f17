"""Fixtures that many tests share: a real broker, topics on it, records in them."""

import itertools
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from proxy.devkit.broker import EmbeddedBroker

ANSWER_TIMEOUT_S = 30
SASL_USERS = {"alice": "alice-secret", "bob": "bob.secret"}


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker for all tests of the session, with a SASL listener that knows `SASL_USERS` beside
    the plain one. A test that needs to harm a broker starts its own.
    """
    with EmbeddedBroker(tmp_path_factory.mktemp("kafka"), sasl_users=SASL_USERS) as broker:
        yield broker


@pytest.fixture(scope="session")
def topic_names() -> Iterator[str]:
    return (f"topic-{number}" for number in itertools.count())


@pytest.fixture
def topic(kafka: EmbeddedBroker, topic_names: Iterator[str]) -> Callable[..., str]:
    """`topic(partitions=1, config=None)` creates a topic with a new name, waits until each of its
    partitions has a leader, and gives the name.
    """

    def create(partitions: int = 1, config: dict[str, str] | None = None) -> str:
        name = next(topic_names)
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        new = NewTopic(name, partitions, replication_factor=1, config=config or {})
        admin.create_topics([new])[name].result(ANSWER_TIMEOUT_S)
        while True:
            seen = admin.list_topics(name, timeout=ANSWER_TIMEOUT_S).topics[name].partitions
            if len(seen) == partitions and all(part.leader >= 0 for part in seen.values()):
                return name

    return create


@pytest.fixture
def fill(kafka: EmbeddedBroker) -> Callable[..., None]:
    """`fill(topic, count, size, partitions=1, bootstrap=None)` writes values of `size` bytes to the
    partitions in turn; number N starts with N in 8 digits, so that a test can tell them apart.
    """

    def produce(
        topic: str, count: int, size: int, partitions: int = 1, bootstrap: str | None = None
    ) -> None:
        config = {"linger.ms": 5, "message.max.bytes": max(size * 2, 10**6)}
        producer = Producer({"bootstrap.servers": bootstrap or kafka.bootstrap, **config})
        failed: list[str] = []

        def delivered(error: object, _message: object) -> None:
            if error is not None:
                failed.append(str(error))

        padding = b"." * (size - 8)
        for number in range(count):
            while True:
                try:
                    producer.produce(
                        topic,
                        b"%08d" % number + padding,
                        partition=number % partitions,
                        on_delivery=delivered,
                    )
                    break
                except BufferError:  # the queue is full: let some go out
                    producer.poll(1)
            producer.poll(0)
        unsent = producer.flush(ANSWER_TIMEOUT_S)
        assert (unsent, failed) == (0, [])

    return produce
