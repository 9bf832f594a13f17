"""Clients that behave like the stages of a pipeline, without Spark: fast, and exact."""

import itertools
import struct
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient
from parts.reports import ReportingDriver, batch_document
from support.operating import Answer, call
from support.proxy_process import ProxyProcess
from support.raw import TIMEOUT_S, RawClient, api_versions, fetch, message, produce

from proxy.wire.apis import LIST_OFFSETS
from proxy.wire.list_offsets import LATEST

API_VERSIONS_VERSION = 3
FETCH_VERSION = 12
LOOKUP_VERSION = 9
"""What Spark's driver asks in."""

LAST_VERSION_WITH_NAMES = 12
"""Of Produce."""

TOOK_MS = 1000
"""A batch takes so long, unless told otherwise."""

Offsets = Mapping[int, int]
"""By partition."""


class Stage:
    """A query that reads one topic and writes another, through a proxy. A context manager.

    It has a connection of its driver, which looks up ends, and one of its executor. A report says
    what the test says.
    """

    def __init__(self, running: ProxyProcess, name: str, client_id: str | None = None) -> None:
        self.name = name
        self.client_id = client_id or name
        self._running = running
        self._stack = ExitStack()
        ids = (str(uuid.uuid4()) for _ in range(3))
        self._reports = ReportingDriver(self.name, self.client_id, *ids)
        self._batches = itertools.count()
        self.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def connect(self) -> None:
        """Connect, or connect again to a proxy that was started again."""
        self._stack.close()
        address = self._running.bootstrap
        self.driver, self.executor = (
            self._stack.enter_context(RawClient(address, self.client_id)) for _ in range(2)
        )
        for each in (self.driver, self.executor):  # the proxy learns who it is
            each.ask(api_versions(API_VERSIONS_VERSION))

    def end(self, topic: str, partition: int = 0) -> int:
        """Return the end of the log as the driver is told it."""
        topic_of = message(LIST_OFFSETS, LOOKUP_VERSION).ListOffsetsTopic
        part = topic_of.ListOffsetsPartition(partition_index=partition, timestamp=LATEST)
        asked = message(
            LIST_OFFSETS,
            LOOKUP_VERSION,
            replica_id=-1,
            isolation_level=0,
            timeout_ms=TIMEOUT_S * 1000,
            topics=[topic_of(name=topic, partitions=[part])],
        )
        (found,) = self.driver.ask(asked).topics[0].partitions
        assert found.error_code == 0
        return int(found.offset)

    def read(self, topic: str, offset: int = 0, partition: int = 0) -> None:
        """Fetch once."""
        self.executor.ask(fetch(FETCH_VERSION, topic, offset=offset, partition=partition))

    def write(
        self,
        topic: str,
        count: int,
        *,
        partition: int = 0,
        topic_id: uuid.UUID | None = None,
        acks: int = 1,
        size: int = 20,
    ) -> tuple[int, int]:
        """Append a batch of records, by name or by id; return where it is, (0, 0) if unknown."""
        version = LAST_VERSION_WITH_NAMES + (topic_id is not None)
        values = [b"." * size] * count
        asked = produce(version, topic, *values, topic_id=topic_id, partition=partition, acks=acks)
        if acks == 0:
            self.executor.send(asked, answered=False)
            return 0, 0
        (done,) = self.executor.ask(asked).responses[0].partition_responses
        assert done.error_code == 0
        return done.base_offset, done.base_offset + count

    def batch(
        self,
        topic: str,
        start: int | Offsets | None,
        end: int | Offsets,
        *,
        rows: int | None = None,
        took_ms: int = TOOK_MS,
    ) -> Answer:
        """Report a batch that has just ended. Offsets are a number for partition 0, or a map."""
        ends = {0: end} if isinstance(end, int) else end
        starts = {0: start} if isinstance(start, int) else start
        if rows is None:
            rows = sum(ends.values()) - sum((starts or {}).values())
        batch = batch_document(next(self._batches), starts, ends, topic, rows=rows, took_ms=took_ms)
        return self.report("progress", batch=batch)

    def done(self, *arguments: Any, **options: Any) -> None:
        """Report a batch, which must be accepted."""
        answer = self.batch(*arguments, **options)
        assert answer.status == 200, answer

    def report(self, event: str, **more: Any) -> Answer:
        """Post a report, as the listener in a driver does."""
        document = self._reports.document(event, **more)
        return call(self._running, "POST", "/v1/spark/batches", document)


def id_of(bootstrap: str, topic: str) -> uuid.UUID:
    """Return the id of a topic."""
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        found = admin.describe_topics(TopicCollection([topic]))[topic].result(TIMEOUT_S).topic_id
    halves = found.get_most_significant_bits(), found.get_least_significant_bits()
    return uuid.UUID(bytes=struct.pack(">qq", *halves))


def pace(seconds: float, per_s: float) -> Iterable[int]:
    """Yield numbers for so long, so many per second, each at its time."""
    start_s = time.monotonic()
    for number in range(round(seconds * per_s)):
        yield number
        left_s = start_s + (number + 1) / per_s - time.monotonic()
        time.sleep(max(left_s, 0.0))
