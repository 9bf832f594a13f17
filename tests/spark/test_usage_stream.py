"""The stream from a real broker to Parquet: killed, started again, and each record there once."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest
from confluent_kafka import Producer
from listening.session import finish
from metered.messages import record
from pyspark.sql import SparkSession

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.jars import connector_jars
from proxy.spark.usage import usage_stream
from proxy.spark.usage.usage_stream import usage_query

pytestmark = pytest.mark.slow

PARTITIONS = 3
RECORDS, DAYS = 3000, 5
FILES = 4
"""So many batches are stored, and one is under way, when the driver is killed."""
START_S = 120
POLL_S = 0.1


def write(bootstrap: str, topic: str, numbers: range) -> None:
    """Write records, a third of them twice; those of each run of a member to one partition."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in numbers:
        text = json.dumps(record(number, day=number * DAYS // RECORDS, bytes=1000 + number))
        for _ in range(2 if number % 3 == 0 else 1):
            producer.produce(topic, text, partition=number % PARTITIONS)
        producer.poll(0)
    assert producer.flush(START_S) == 0


@contextmanager
def driver(bootstrap: str, topic: str, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The program on its own, as spark-submit runs it: one that has only pyspark."""
    arguments = ("--jars", ",".join(map(str, connector_jars())), "--master", "local[1]")
    settings = ("--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1")
    process = subprocess.Popen(
        [
            *(Path(pyspark.__file__).parent / "bin" / "spark-submit", *arguments, *settings),
            *(usage_stream.__file__, "--bootstrap-servers", bootstrap, "--topic", topic),
            *("--out", out, "--trigger", "0 seconds", "--option", "maxOffsetsPerTrigger=100"),
        ],
        env={**os.environ, "PYTHONPATH": "", "PYSPARK_PYTHON": sys.executable},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def test_each_record_is_stored_once_whenever_the_driver_is_killed(
    kafka: EmbeddedBroker, topic: Callable[..., str], spark: SparkSession, tmp_path: Path
) -> None:
    name, out = topic(PARTITIONS), tmp_path / "usage"
    write(kafka.bootstrap, name, range(RECORDS))
    with driver(kafka.bootstrap, name, out) as process:
        deadline = time.monotonic() + START_S
        while len([*out.glob("usage/*/*.parquet")]) < FILES:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(POLL_S)

    def copied() -> tuple[int, int]:
        options = {"kafka.bootstrap.servers": kafka.bootstrap}
        finish(usage_query(spark, options, str(out), name, {"availableNow": True}))
        stored = spark.read.parquet(str(out / "usage"))
        assert stored.count() == stored.select("sequence").distinct().count()
        row = stored.selectExpr("count(*)", "sum(bytes)").first()
        assert row is not None
        return row[0], row[1]

    whole = RECORDS, sum(1000 + number for number in range(RECORDS))
    assert copied() == whole
    (out / "checkpoint").rename(tmp_path / "lost")  # all comes again, however late
    assert copied() == whole
