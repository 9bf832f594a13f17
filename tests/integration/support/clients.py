"""Three Kafka clients for Python behind the same calls; each call blocks, run them in threads."""

import asyncio
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import aiokafka
import confluent_kafka
import kafka
from aiokafka.abc import ConsumerRebalanceListener as AiokafkaListener

WAIT_S = 60
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


class Client(Protocol):
    """A client library."""

    name: str

    def produce(
        self, access: Access, topic: str, records: Iterable[Record], **options: Any
    ) -> None:
        """Write all records and wait until they are acknowledged."""

    def consume(self, access: Access, topic: str, wanted: int, *, at: Halt | None = None) -> Read:
        """Read as a group of one, from the start, until there are so many records.

        With `at`, call its function once there are as many as its number.
        """


def _group() -> str:
    return f"group-{next(_names)}"


class KafkaPython:
    """kafka-python."""

    name = "kafka-python"

    def _options(self, access: Access) -> dict[str, Any]:
        return {
            "bootstrap_servers": access.bootstrap,
            "client_id": access.client_id,
            "security_protocol": access.protocol,
            "ssl_context": access.tls,
            "sasl_mechanism": "PLAIN" if access.user else None,
            "sasl_plain_username": access.user,
            "sasl_plain_password": access.password,
        }

    def produce(
        self,
        access: Access,
        topic: str,
        records: Iterable[Record],
        *,
        acks: int = 1,
        compression: str | None = None,
    ) -> None:
        """See Client."""
        producer = kafka.KafkaProducer(
            **self._options(access),
            acks=acks,
            enable_idempotence=False,
            compression_type=compression,
            max_request_size=MAX_RECORD_BYTES,
            linger_ms=5,
            batch_size=BATCH_BYTES,
        )
        with closing(producer):
            sent = [
                producer.send(topic, value, partition=partition) for partition, value in records
            ]
            producer.flush(WAIT_S)
            for future in sent:
                future.get(WAIT_S)

    def consume(self, access: Access, topic: str, wanted: int, *, at: Halt | None = None) -> Read:
        """See Client."""
        read = Read(halt=at)

        class Listener(kafka.ConsumerRebalanceListener):  # type: ignore[misc]
            def on_partitions_assigned(self, assigned: Any) -> None:
                read.assigned(assigned)

            def on_partitions_revoked(self, revoked: Any) -> None: ...

        consumer = kafka.KafkaConsumer(
            **self._options(access), group_id=_group(), auto_offset_reset="earliest"
        )
        with closing(consumer):
            consumer.subscribe([topic], listener=Listener())
            started = time.monotonic()
            while read.count < wanted and time.monotonic() < started + WAIT_S:
                for partition, messages in consumer.poll(500).items():
                    for message in messages:
                        read.add(partition.partition, message.value)
                read.check_halt()
            read.elapsed_s = time.monotonic() - started
            consumer.commit()
            known = consumer._client.cluster.brokers()
            read.brokers = {f"{broker.host}:{broker.port}" for broker in known}
        return read


class Aiokafka:
    """aiokafka."""

    name = "aiokafka"

    def _options(self, access: Access) -> dict[str, Any]:
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

    def produce(
        self,
        access: Access,
        topic: str,
        records: Iterable[Record],
        *,
        acks: int = 1,
        compression: str | None = None,
    ) -> None:
        """See Client."""

        async def run() -> None:
            producer = aiokafka.AIOKafkaProducer(
                **self._options(access),
                acks=acks,
                compression_type=compression,
                max_request_size=MAX_RECORD_BYTES,
                max_batch_size=BATCH_BYTES,
            )
            async with producer:
                sent = [
                    await producer.send(topic, value, partition=partition)
                    for partition, value in records
                ]
                await asyncio.gather(*sent)

        asyncio.run(run())

    def consume(self, access: Access, topic: str, wanted: int, *, at: Halt | None = None) -> Read:
        """See Client."""
        read = Read(halt=at)

        class Listener(AiokafkaListener):  # type: ignore[misc]
            def on_partitions_assigned(self, assigned: Any) -> None:
                read.assigned(assigned)

            def on_partitions_revoked(self, revoked: Any) -> None: ...

        async def run() -> None:
            consumer = aiokafka.AIOKafkaConsumer(
                **self._options(access), group_id=_group(), auto_offset_reset="earliest"
            )
            consumer.subscribe([topic], listener=Listener())
            async with consumer:
                started = time.monotonic()
                while read.count < wanted and time.monotonic() < started + WAIT_S:
                    for partition, messages in (await consumer.getmany(timeout_ms=500)).items():
                        for message in messages:
                            read.add(partition.partition, message.value)
                    read.check_halt()
                read.elapsed_s = time.monotonic() - started
                await consumer.commit()
                known = consumer._client.cluster.brokers()
                read.brokers = {f"{broker.host}:{broker.port}" for broker in known}

        asyncio.run(run())
        return read


class Librdkafka:
    """confluent-kafka."""

    name = "librdkafka"

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
        }
        return {key: value for key, value in options.items() if value is not None}

    def produce(
        self,
        access: Access,
        topic: str,
        records: Iterable[Record],
        *,
        acks: int = 1,
        compression: str | None = None,
    ) -> None:
        """See Client."""
        errors: list[str] = []
        producer = confluent_kafka.Producer(
            {
                **self._options(access, errors),
                "acks": acks,
                "compression.type": compression or "none",
                "message.max.bytes": MAX_RECORD_BYTES,
                "linger.ms": 5,
                "batch.size": BATCH_BYTES,
            }
        )

        def delivered(error: Any, _message: Any) -> None:
            if error is not None:
                errors.append(str(error))

        for partition, value in records:
            producer.produce(topic, value, partition=partition, on_delivery=delivered)
            producer.poll(0)
        assert (producer.flush(WAIT_S), errors) == (0, [])

    def consume(self, access: Access, topic: str, wanted: int, *, at: Halt | None = None) -> Read:
        """See Client."""
        read = Read(halt=at)
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

        with ExitStack() as stack:
            stack.callback(consumer.close)
            consumer.subscribe([topic], on_assign=assigned)
            started = time.monotonic()
            while read.count < wanted and time.monotonic() < started + WAIT_S:
                for message in consumer.consume(1000, timeout=0.2):
                    if message.error() is None:
                        read.add(message.partition(), message.value())
                    else:
                        errors.append(str(message.error()))
                read.check_halt()
            read.elapsed_s = time.monotonic() - started
            consumer.commit(asynchronous=False)
            known = consumer.list_topics(topic, timeout=WAIT_S).brokers.values()
            read.brokers = {f"{broker.host}:{broker.port}" for broker in known}
        assert errors == [] or at is not None
        return read


CLIENTS: tuple[Client, ...] = (Aiokafka(), KafkaPython(), Librdkafka())
