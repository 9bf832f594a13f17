"""The stream from a real broker to Parquet: killed, started again, and each record there once."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile

import pytest
from confluent_kafka import Producer
from metered.messages import record
from parts.usage_driver import until_stored, usage_driver
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from examples.devkit.broker import EmbeddedBroker
from proxy.spark.usage import usage_stream
from proxy.spark.usage.command_line import UsageInputError
from proxy.spark.usage.usage_stream import WriterLock, usage_query

pytestmark = pytest.mark.slow

PARTITIONS = 3
RECORDS, DAYS = 3000, 5
FILES = 2
"""So many batches are stored, and one is under way, when the driver is killed."""
FLUSH_S, COPY_S = 60, 240


def write(bootstrap: str, topic: str, numbers: range) -> None:
    """Write records, a third of them twice; those of each run of a member to one partition."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in numbers:
        text = json.dumps(record(number, day=number * DAYS // RECORDS, bytes=1000 + number))
        for _ in range(2 if number % 3 == 0 else 1):
            producer.produce(topic, text, partition=number % PARTITIONS)
        producer.poll(0)
    assert producer.flush(FLUSH_S) == 0


def leave_unfinished(out: Path) -> None:
    """Leave what a driver does that is killed when its tasks have written, and its job has not."""
    stored = next(out.glob("usage/*/*.parquet"))
    task = out / "usage" / "_temporary" / "0" / "task_202611260000000000000000000_0001_m_000000"
    unfinished = task / stored.parent.name / f"unfinished-{stored.name}"
    unfinished.parent.mkdir(parents=True)
    copyfile(stored, unfinished)


def test_each_record_is_stored_once_whenever_the_driver_is_killed(
    kafka: EmbeddedBroker, topic: Callable[..., str], spark: SparkSession, tmp_path: Path
) -> None:
    name, out = topic(PARTITIONS), tmp_path / "usage"
    write(kafka.bootstrap, name, range(RECORDS))
    with usage_driver(kafka.bootstrap, name, out) as driver:
        until_stored(driver, out, FILES)
        with pytest.raises(UsageInputError, match="another query writes to it"):
            usage_query(spark, {"kafka.bootstrap.servers": kafka.bootstrap}, str(out), name)
    leave_unfinished(out)

    def copied() -> tuple[int, int]:
        options = {"kafka.bootstrap.servers": kafka.bootstrap}
        query = usage_query(spark, options, str(out), name, {"availableNow": True})
        assert query.awaitTermination(COPY_S)
        stored = spark.read.parquet(str(out / "usage"))
        assert stored.count() == stored.select("sequence").distinct().count()
        row = stored.selectExpr("count(*)", "sum(bytes)").first()
        assert row is not None
        return row[0], row[1]

    whole = RECORDS, sum(1000 + number for number in range(RECORDS))
    assert copied() == whole
    (out / "checkpoint").rename(tmp_path / "lost")  # all comes again, however late
    assert copied() == whole


def test_who_was_taken_for_dead_stores_nothing_more(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage_stream, "DEAD_AFTER_S", 0.1)
    monkeypatch.setattr(WriterLock, "keep", lambda *_: None)  # this driver hangs
    name, out = topic(PARTITIONS), str(tmp_path / "usage")
    options = {"kafka.bootstrap.servers": kafka.bootstrap}
    query = usage_query(spark, options, out, name, {"processingTime": "0 seconds"})
    WriterLock(spark, out).take()
    write(kafka.bootstrap, name, range(PARTITIONS))
    with pytest.raises(StreamingQueryException, match="another query writes to it now"):
        query.awaitTermination(COPY_S)
