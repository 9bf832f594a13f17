"""Spark, that is the Java client: what it reads and writes through the proxy, and how fast."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.proxy_process import ProxyProcess

from examples.devkit.broker import EmbeddedBroker

pytestmark = pytest.mark.slow

BOUND_BYTES = 1_000_000
BURST_S = 1.1
LARGEST_RESPONSE_BYTES = 3 << 20

PARTITIONS = 3
RECORD_BYTES = 10_000
COUNT = 1200


def source(reader: Any, bootstrap: str, topic: str, client_id: str) -> DataFrame:
    options = {
        "kafka.bootstrap.servers": bootstrap,
        "kafka.client.id": client_id,
        "subscribe": topic,
        "startingOffsets": "earliest",
    }
    frame: DataFrame = reader.format("kafka").options(**options).load()
    return frame


def digest(frame: DataFrame) -> tuple[int, int, int]:
    """Number of records, number of different ones, and a checksum over all values."""
    row = frame.selectExpr(
        "count(*)", "count(distinct value)", "sum(cast(crc32(value) as long))"
    ).first()
    assert row is not None
    return row[0], row[1], row[2]


def check_bound(elapsed_s: float) -> None:
    read_bytes = COUNT * RECORD_BYTES
    assert read_bytes <= BOUND_BYTES * (elapsed_s + BURST_S) + LARGEST_RESPONSE_BYTES


@pytest.mark.parametrize("mode", ["delay", "mute"])
def test_batch_read_is_held_to_its_bound(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
    spark: SparkSession,
    mode: str,
) -> None:
    rules = [{"client-id": "bounded", "consumer_byte_rate": BOUND_BYTES}]
    running = proxy(rules=rules, throttle={"mode": mode})
    name = topic(PARTITIONS)
    fill(name, COUNT, RECORD_BYTES, partitions=PARTITIONS)
    direct = digest(source(spark.read, kafka.bootstrap, name, "direct"))
    assert direct[:2] == (COUNT, COUNT)
    started = monotonic()
    through = digest(source(spark.read, running.bootstrap, name, "bounded"))
    check_bound(monotonic() - started)
    assert through == direct
    metrics = running.metrics()
    assert metrics.value("throttled_responses_total") > 0
    assert metrics.value("bytes_total", client_id="bounded", api="Fetch") > COUNT * RECORD_BYTES


def test_stream_from_topic_to_topic(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    rules = [{"client-id": "stream", "consumer_byte_rate": BOUND_BYTES}]
    running = proxy(rules=rules)
    origin, target = topic(PARTITIONS), topic(PARTITIONS)
    fill(origin, COUNT, RECORD_BYTES, partitions=PARTITIONS)
    started = monotonic()
    query = (
        source(spark.readStream, running.bootstrap, origin, "stream")
        .select("key", "value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", running.bootstrap)
        .option("topic", target)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    check_bound(monotonic() - started)
    written = digest(source(spark.read, kafka.bootstrap, target, "direct"))
    assert written == digest(source(spark.read, kafka.bootstrap, origin, "direct"))
    assert written[:2] == (COUNT, COUNT)
    assert running.metrics().value("bytes_total", api="Produce") > COUNT * RECORD_BYTES
