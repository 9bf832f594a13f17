"""Three Kafka clients for Python behind the same calls; each call blocks, run them in threads."""

import asyncio
import ssl
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import aiokafka
import confluent_kafka
import kafka
from aiokafka.abc import ConsumerRebalanceListener as AiokafkaListener

WAIT_S = 60
POLL_MS = 500
MAX_RECORD_BYTES = 4 << 20
BATCH_BYTES = 64 << 10

Record = tuple[int, bytes]
"""Partition and value."""

Halt = tuple[int, Callable[[], None]]
"""After how many records to call what, between two polls."""

_names = count()


@dataclass(frozen=True, slots=True)
class Access:
    """How to get to the cluster."""

    bootstrap: str
    client_id: str = "client"
    user: str | None = None
    password: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @property
    def protocol(self) -> str:
        """Kafka's name for it."""
        transport = "SSL" if self.ca_file else "PLAINTEXT"
        return f"SASL_{transport}" if self.user else transport

    @property
    def tls(self) -> ssl.SSLContext | None:
        """For the clients that take a context."""
        if self.ca_file is None:
            return None
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


@dataclass(slots=True)
class Read:
    """What a consumer got."""

    values: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    """By partition, in order."""
    count: int = 0
    value_bytes: int = 0
    assignments: int = 0
    """How often the group gave it partitions: once, or its connection was in trouble."""
    brokers: set[str] = field(default_factory=set)
    """Every `HOST:PORT` that it was told."""
    elapsed_s: float = 0.0
    halt: Halt | None = None
    is_disturbed: bool = False

    def check_halt(self) -> None:
        """Call what is to be called between two polls."""
        if self.halt is not None and self.count >= self.halt[0]:
            (_, function), self.halt = self.halt, None
            function()

    def assigned(self, partitions: Collection[object]) -> None:
        """Count an assignment; a client that joins before it knows the topic gets an empty one."""
        self.assignments += bool(partitions)

    def add(self, partition: int, value: bytes) -> None:
        """Take in a record."""
        self.values[partition].append(value)
        self.count += 1
        self.value_bytes += len(value)


@dataclass(frozen=True, slots=True)
class Order:
    """What a producer is to write."""

    access: Access
    topic: str
    records: Iterable[Record]
    acks: int
    compression: str | None
    is_disturbed: bool
    """Whether its connections will be in trouble, of which librdkafka tells. It and kafka-python
    then write idempotently: they hang up themselves on a broker whose address changes, and send
    again what it has got."""


class Reading(NamedTuple):
    """A consumer at work."""

    poll: Callable[[], Iterable[Record]]
    """Gives what has come, after half a second at most."""
    finish: Callable[[], Iterable[Any]]
    """Commits, and gives the brokers that it knows."""


class Client(ABC):
    """A client library."""

    name: str

    def produce(
        self,
        access: Access,
        topic: str,
        records: Iterable[Record],
        *,
        acks: int = 1,
        compression: str | None = None,
        is_disturbed: bool = False,
    ) -> None:
        """Write all records and wait until they are acknowledged."""
        self._write(Order(access, topic, records, acks, compression, is_disturbed))

    def consume(
        self,
        access: Access,
        topic: str,
        wanted: int,
        *,
        at: Halt | None = None,
        is_disturbed: bool = False,
    ) -> Read:
        """Read as a group of one, from the start, until there are so many records, or none comes
        for WAIT_S.

        With `at`, call its function once there are as many as its number. Where it `is_disturbed`,
        as with `at`, its connections may be in trouble, of which librdkafka tells.
        """
        read = Read(halt=at, is_disturbed=is_disturbed or at is not None)
        with self._reading(access, topic, read) as reading:
            started = last = time.monotonic()
            while read.count < wanted and time.monotonic() < last + WAIT_S:
                before = read.count
                for partition, value in reading.poll():
                    read.add(partition, value)
                read.check_halt()
                if read.count > before:
                    last = time.monotonic()
            read.elapsed_s = time.monotonic() - started
            read.brokers = {f"{broker.host}:{broker.port}" for broker in reading.finish()}
        return read

    @abstractmethod
    def _write(self, order: Order) -> None:
        """See produce."""

    @abstractmethod
    def _reading(self, access: Access, topic: str, read: Read) -> AbstractContextManager[Reading]:
        """Open a consumer; it tells `read` of its assignments."""


def _group() -> str:
    return f"group-{next(_names)}"


def _python_options(access: Access) -> dict[str, Any]:
    """Return what both clients in Python call the same."""
    options: dict[str, Any] = {
        "bootstrap_servers": access.bootstrap,
        "client_id": access.client_id,
        "security_protocol": access.protocol,
        "ssl_context": access.tls,
    }
    if access.user:
        options |= {
            "sasl_mechanism": "PLAIN",
            "sasl_plain_username": access.user,
            "sasl_plain_password": access.password,
        }
    return options


def _python_consumer_options(access: Access) -> dict[str, Any]:
    return {**_python_options(access), "group_id": _group(), "auto_offset_reset": "earliest"}


def _listener(base: type, read: Read) -> Any:
    """Make the listener of a client in Python, which must be of a class of its own."""

    class Listener(base):  # type: ignore[misc]
        def on_partitions_assigned(self, assigned: Any) -> None:
            read.assigned(assigned)

        def on_partitions_revoked(self, revoked: Any) -> None: ...

    return Listener()


def _known_brokers(consumer: Any) -> Iterable[Any]:
    """Return the brokers that a client knows, of kafka-python and aiokafka."""
    return consumer._client.cluster.brokers()  # noqa: SLF001 - neither has a public name for it


def _records(batches: Mapping[Any, Iterable[Any]]) -> Iterator[Record]:
    """Take apart what a client in Python has polled."""
    for partition, messages in batches.items():
        for message in messages:
            yield partition.partition, message.value


class KafkaPython(Client):
    """kafka-python."""

    name = "kafka-python"

    def _write(self, order: Order) -> None:
        producer = kafka.KafkaProducer(
            **_python_options(order.access),
            acks="all" if order.is_disturbed else order.acks,
            enable_idempotence=order.is_disturbed,
            compression_type=order.compression,
            max_request_size=MAX_RECORD_BYTES,
            linger_ms=5,
            batch_size=BATCH_BYTES,
        )
        with closing(producer):
            sent = [
                producer.send(order.topic, value, partition=partition)
                for partition, value in order.records
            ]
            producer.flush(WAIT_S)
            for future in sent:
                future.get(WAIT_S)

    @contextmanager
    def _reading(self, access: Access, topic: str, read: Read) -> Iterator[Reading]:
        def finish() -> Iterable[Any]:
            consumer.commit()
            return _known_brokers(consumer)

        with closing(kafka.KafkaConsumer(**_python_consumer_options(access))) as consumer:
            consumer.subscribe([topic], listener=_listener(kafka.ConsumerRebalanceListener, read))
            yield Reading(lambda: _records(consumer.poll(POLL_MS)), finish)


class Aiokafka(Client):
    """aiokafka."""

    name = "aiokafka"

    def _write(self, order: Order) -> None:
        async def run() -> None:
            producer = aiokafka.AIOKafkaProducer(
                **_python_options(order.access),
                acks=order.acks,
                compression_type=order.compression,
                max_request_size=MAX_RECORD_BYTES,
                max_batch_size=BATCH_BYTES,
            )
            async with producer:
                sent = [
                    await producer.send(order.topic, value, partition=partition)
                    for partition, value in order.records
                ]
                await asyncio.gather(*sent)

        asyncio.run(asyncio.wait_for(run(), WAIT_S))

    @contextmanager
    def _reading(self, access: Access, topic: str, read: Read) -> Iterator[Reading]:
        async def start() -> Any:
            consumer = aiokafka.AIOKafkaConsumer(**_python_consumer_options(access))
            consumer.subscribe([topic], listener=_listener(AiokafkaListener, read))
            await consumer.start()
            return consumer

        def run(work: Coroutine[Any, Any, Any]) -> Any:
            """Run it with a limit, which this client sets to none of its retries."""
            return runner.run(asyncio.wait_for(work, WAIT_S))

        def poll() -> Iterable[Record]:
            return _records(run(consumer.getmany(timeout_ms=POLL_MS)))

        def finish() -> Iterable[Any]:
            run(consumer.commit())
            return _known_brokers(consumer)

        with asyncio.Runner() as runner:
            consumer = run(start())
            try:
                yield Reading(poll, finish)
            finally:
                # It lets go of a fetch that waits for a retry with this error, now and then.
                with suppress(asyncio.CancelledError):
                    run(consumer.stop())


class Librdkafka(Client):
    """confluent-kafka; `settings` beside its defaults."""

    name = "librdkafka"

    def __init__(self, settings: Mapping[str, Any] = {}) -> None:
        self._settings = settings

    def _options(self, access: Access, errors: list[str]) -> dict[str, Any]:
        options = {
            "bootstrap.servers": access.bootstrap,
            "client.id": access.client_id,
            "security.protocol": access.protocol,
            "ssl.ca.location": access.ca_file,
            "ssl.certificate.location": access.cert_file,
            "ssl.key.location": access.key_file,
            "sasl.mechanism": "PLAIN" if access.user else None,
            "sasl.username": access.user,
            "sasl.password": access.password,
            "error_cb": lambda error: errors.append(str(error)),
            **self._settings,
        }
        return {key: value for key, value in options.items() if value is not None}

    def _write(self, order: Order) -> None:
        errors: list[str] = []
        told: list[str] = [] if order.is_disturbed else errors
        producer = confluent_kafka.Producer(
            {
                **self._options(order.access, told),
                "acks": "all" if order.is_disturbed else order.acks,
                "enable.idempotence": order.is_disturbed,
                "compression.type": order.compression or "none",
                "message.max.bytes": MAX_RECORD_BYTES,
                "linger.ms": 5,
                "batch.size": BATCH_BYTES,
            }
        )

        def delivered(error: Any, _message: Any) -> None:
            if error is not None:
                errors.append(str(error))

        for partition, value in order.records:
            producer.produce(order.topic, value, partition=partition, on_delivery=delivered)
            producer.poll(0)
        assert (producer.flush(WAIT_S), errors) == (0, [])

    @contextmanager
    def _reading(self, access: Access, topic: str, read: Read) -> Iterator[Reading]:
        errors: list[str] = []
        consumer = confluent_kafka.Consumer(
            {
                **self._options(access, errors),
                "group.id": _group(),
                "auto.offset.reset": "earliest",
                "fetch.message.max.bytes": 1 << 20,
            }
        )

        def assigned(_consumer: Any, partitions: Any) -> None:
            read.assigned(partitions)

        def poll() -> Iterator[Record]:
            for message in consumer.consume(1000, timeout=0.2):
                if message.error() is None:
                    yield message.partition(), message.value()
                else:
                    errors.append(str(message.error()))

        def finish() -> Iterable[Any]:
            try:
                consumer.commit(asynchronous=False)
            except confluent_kafka.KafkaException as error:
                # It commits by itself too: every five seconds, and before a rebalance.
                if error.args[0].name() != "_NO_OFFSET":
                    raise
            positions = consumer.position(consumer.assignment())
            committed = consumer.committed(positions, timeout=WAIT_S)
            for position, commit in zip(positions, committed, strict=True):
                assert commit.offset >= position.offset
            return consumer.list_topics(topic, timeout=WAIT_S).brokers.values()

        with closing(consumer):
            consumer.subscribe([topic], on_assign=assigned)
            yield Reading(poll, finish)
        assert errors == [] or read.is_disturbed


CLIENTS: tuple[Client, ...] = (Aiokafka(), KafkaPython(), Librdkafka())
