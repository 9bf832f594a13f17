"""Streaming queries on the session's Spark whose every record is known, and what a proxy says."""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit, udf
from pyspark.sql.streaming import StreamingQuery
from support.proxy_process import ProxyProcess, until

from proxy.spark import client_options

LOSS = re.compile(r"may (have been|be) (lost|missed)|incorrect offsets|offset was changed from")
"""What Spark says where it finds that records, or ends of logs, are gone."""

END_S = 120
"""How a machine answers whose worker is away."""
POLL_S = 0.1
"""Between two looks at a query: each asks Spark, and more often than not the proxy as well."""

READ_AHEAD_BYTES = 5_000
"""What a consumer of Spark's asks for at a time, of each partition."""

NO_OPTIONS: Mapping[str, str] = MappingProxyType({})

Document = dict[str, Any]


def feed(
    bootstrap: str, topic: str, count: int, size: int, partitions: Iterable[int] = (0, 1)
) -> None:
    """Write `count` records of `size` bytes to each of the partitions.

    Few are in each of Kafka's batches, which a broker sends as a whole: a consumer that asks for
    little gets little then.
    """
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "batch.num.messages": 10})
    for _ in range(count):
        for partition in partitions:
            producer.produce(topic, b"." * size, partition=partition)
    assert producer.flush(END_S) == 0


def copying(
    spark: SparkSession, running: ProxyProcess, topics: list[str], where: Path, trigger: str
) -> StreamingQuery:
    """Start the query `first`: it writes each record's value to the second topic."""
    options = client_options("first", running.bootstrap)
    records = spark.readStream.format("kafka").options(**options)
    records = records.option("subscribe", topics[0]).option("startingOffsets", "earliest")
    return (
        records.load()
        .select("value")
        .writeStream.format("kafka")
        .options(**options)
        .option("topic", topics[1])
        .option("checkpointLocation", str(where / "first"))
        .queryName("first")
        .trigger(processingTime=trigger)
        .start()
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch read."""

    offsets: dict[int, list[int]]
    """By partition."""
    values: list[str]
    clamp: Document
    """What the proxy told of its `clamp` while the batch was processed: how it was planned."""

    @property
    def rows(self) -> int:
        """How many records it has."""
        return len(self.values)


@dataclass(slots=True)
class Stream:
    """One query, over all its runs from one checkpoint. Its name is its client id, too.

    A batch that is processed again takes the place of its first try, as in a sink that writes each
    batch once.
    """

    spark: SparkSession
    kafka: str
    """Where its topic is."""
    running: ProxyProcess
    name: str
    topic: str
    checkpoint: Path
    row_ms: float = 0.0
    """How long the work on each record takes; it may change from batch to batch."""
    gate: Event = field(default_factory=Event)
    """While it is closed no batch ends."""
    batches: dict[int, Batch] = field(default_factory=dict)
    query: StreamingQuery | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def feed(self, count: int, size: int, partitions: Iterable[int] = (0, 1)) -> None:
        """Write so many records to each of the partitions."""
        feed(self.kafka, self.topic, count, size, partitions)

    def start(
        self,
        trigger: str | None = None,
        options: Mapping[str, str] = NO_OPTIONS,
        *,
        fails: bool = False,
    ) -> StreamingQuery:
        """Begin a run, and see that the proxy knows of the query.

        Either with a trigger such as `1 second`, or of all that is there, once. It `fails` with its
        first batch if so wanted. `options` are further ones of the source.
        """
        records = (
            self.spark.readStream.format("kafka")
            .options(**client_options(self.name, self.running.bootstrap))
            .option("subscribe", self.topic)
            .option("startingOffsets", "earliest")
            .option("kafka.max.partition.fetch.bytes", str(READ_AHEAD_BYTES))
            .options(**dict(options))
            .load()
        )
        if fails:
            records = records.selectExpr("raise_error('no such order')")
            writer = records.writeStream.format("noop")
        else:
            writer = records.writeStream.foreachBatch(self._process)
        writer = writer.queryName(self.name).option("checkpointLocation", str(self.checkpoint))
        if trigger is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=trigger)
        self.query = writer.start()
        until(self.known_now, "it is seen", END_S)
        return self.query

    def finish(self) -> None:
        """Wait for the end of a run that ends by itself."""
        assert self.query is not None
        assert self.query.awaitTermination(END_S), self.query.status

    def stop(self) -> None:
        """End the run, if there is one. A batch in progress is given up."""
        self.gate.set()
        if self.query is not None:
            self.query.stop()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Return the condition's first true value; the query must not fail meanwhile."""
        deadline = time.monotonic() + END_S
        while not (value := condition()):
            failure = self.query.exception() if self.query is not None else None
            assert failure is None, failure
            assert time.monotonic() < deadline, f"not in {END_S} s: {what}; read: {self.sizes()}"
            time.sleep(POLL_S)
        return value

    def until_read(self, ends: dict[int, int]) -> None:
        """Wait until all below these offsets, by partition, was read."""
        self.until(lambda: self.ends().items() >= ends.items(), f"reads to {ends}")

    def sizes(self) -> dict[int, int]:
        """Give the number of records of each batch."""
        return {number: self.batches[number].rows for number in sorted(self.batches)}

    def offsets(self) -> dict[int, list[int]]:
        """Give what was read of each partition, in order."""
        read: dict[int, list[int]] = {}
        for batch in list(self.batches.values()):
            for partition, offsets in batch.offsets.items():
                read.setdefault(partition, []).extend(offsets)
        return {partition: sorted(offsets) for partition, offsets in read.items()}

    def ends(self) -> dict[int, int]:
        """Give the offset behind the last record that was read of each partition."""
        return {partition: offsets[-1] + 1 for partition, offsets in self.offsets().items()}

    def check_all_read(self, ends: dict[int, int]) -> None:
        """Require that everything below these offsets was read, and all of it once."""
        assert self.offsets() == {partition: list(range(end)) for partition, end in ends.items()}

    def known(self) -> Document:
        """Give what the proxy knows of the query."""
        return known(self.running, self.name)

    def known_now(self) -> Document | None:
        """Give it if there is any: the first batch of a run may be quicker than its report."""
        return _known_now(self.running, self.name)

    def _process(self, batch: DataFrame, number: int) -> None:
        clamp: Document = {}
        with suppress(OSError):  # the proxy is away
            clamp = ((self.known_now() or {}).get("adaptive") or {}).get("clamp", {})
        offset = col("offset")
        if self.row_ms:
            offset = _work()(offset, lit(self.row_ms))
        rows = batch.select(
            "partition", offset.alias("offset"), col("value").cast("string")
        ).collect()
        offsets: dict[int, list[int]] = {}
        for partition, read, _ in rows:
            offsets.setdefault(partition, []).append(read)
        self.batches[number] = Batch(offsets, [value for _, _, value in rows], clamp)
        assert self.gate.wait(END_S), "the gate stays closed"


def known(running: ProxyProcess, name: str) -> Document:
    """Give what `/v1/progress` says of a query, as soon as the worker is there that knows it."""
    found: Document = until(lambda: _known_now(running, name), f"{name} is known", END_S)
    return found


def _known_now(running: ProxyProcess, name: str) -> Document | None:
    status, text = running.get(f"/v1/progress?query={quote(name)}")
    if status != 200:
        return None
    (document,) = json.loads(text)["queries"]
    return dict(document)


def partition_of(document: Document, topic: str, partition: int) -> Document:
    """Give a query's progress in one partition."""
    (found,) = (
        each
        for each in document["partitions"]
        if (each["topic"], each["partition"]) == (topic, partition)
    )
    return dict(found)


def _work() -> Callable[..., Any]:
    # Within a function: Spark's workers get its code, for they can't import this module.
    def work(offset: int, row_ms: float) -> int:
        time.sleep(row_ms / 1000)
        return offset

    made: Callable[..., Any] = udf(work, "long")
    return made
