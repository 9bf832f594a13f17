"""Queries of a session that read past the proxy: said once, as information, and to be left out."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parts.attached import attaching
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from support.proxy_process import ProxyProcess, until
from support.streams import END_S, feed

from examples.devkit.broker import EmbeddedBroker
from proxy.spark import QuotaListener, client_options

pytestmark = pytest.mark.slow

LOG = "quota_listener"
NAMES = ("ledger", "audit", "orders")
BATCHES = 4


@pytest.fixture
def queries(
    kafka: EmbeddedBroker, spark: SparkSession, topic: Callable[..., str], tmp_path: Path
) -> Iterator[Callable[[], None]]:
    """`queries()` runs queries that read the broker itself, to the end."""
    name, started = topic(1), list[StreamingQuery]()
    feed(kafka.bootstrap, name, 10 * BATCHES, 20, (0,))

    def run() -> None:
        for each in NAMES:
            records = spark.readStream.format("kafka").option("subscribe", name)
            records = records.options(**client_options(each, kafka.bootstrap))
            records = records.option("startingOffsets", "earliest")
            frame = records.option("maxOffsetsPerTrigger", 10).load()
            writer = frame.writeStream.format("noop").queryName(each)
            writer = writer.option("checkpointLocation", str(tmp_path / each))
            started.append(writer.trigger(processingTime="100 milliseconds").start())
        for query in started:
            query.processAllAvailable()

    yield run
    for query in started:
        query.stop()


@pytest.mark.parametrize("named", [None, ["orders"]], ids=["all", "named"])
def test_it_is_said_once(
    *,
    proxy: Callable[..., ProxyProcess],
    spark: SparkSession,
    queries: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    named: list[str] | None,
) -> None:
    caplog.set_level(logging.INFO, LOG)
    running = proxy(rules=[{"client-id": "etl", "consumer_byte_rate": 10**6}])
    with attaching(spark) as attach:
        attach(QuotaListener(running.admin_url, queries=named))
        queries()
        wanted = set(named or NAMES)

        def known() -> dict[str, Any]:
            return {
                each["name"]: each for each in json.loads(running.get("/v1/progress")[1])["queries"]
            }

        until(
            lambda: (
                {name for name, each in known().items() if each["run_batches"] == BATCHES} == wanted
            ),
            "all batches are reported",
            END_S,
        )
        assert known().keys() == wanted
        assert [each["advice"] for each in known().values()] == [[] for _ in wanted]
        said = until(lambda: [record for record in caplog.records if record.name == LOG], "a line")
        (line,) = said
        assert (line.levelname, "queries=[...]" in line.getMessage()) == ("INFO", True)
