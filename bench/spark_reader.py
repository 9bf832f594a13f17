"""A Spark driver in a process of its own: reads a topic as often as it is told.

Each line on stdin is a JSON object of Kafka options, the bootstrap address among them. The answer
is one line, `read SECONDS`, with the wall time of a batch query over the whole topic. Three keys
are no options: `topic` names another one, and `query` makes it a streaming query of that name,
which ends when all has been read; `report_to` is the proxy that it is reported to, if any. The end
of stdin ends the session.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from bench.spark_session import spark_session
from proxy.spark import QuotaListener

CLOSE_TIMEOUT_S = 5.0


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(prog="bench.spark_reader", description=__doc__)
    parser.add_argument("--jars", required=True, help="the Kafka connector's jars, by commas")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--tasks", type=int, default=2, help="how many run at the same time")
    options = parser.parse_args()
    spark = spark_session(options.jars, f"local[{options.tasks}]", {})
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            kafka = json.loads(line)
            topic = kafka.pop("topic", options.topic)
            query, report_to = kafka.pop("query", None), kafka.pop("report_to", None)
            source = {f"kafka.{name}": value for name, value in kafka.items()}
            source |= {"subscribe": topic, "startingOffsets": "earliest"}
            if query is None:
                seconds = _read(spark, source)
            else:
                with _reported(spark, report_to):
                    seconds = _follow(spark, source, query)
            print(f"read {seconds:.4f}", flush=True)
    finally:
        spark.stop()


def _read(spark: SparkSession, source: dict[str, str]) -> float:
    """Read the topic to its end into the sink that drops everything; returns seconds."""
    started_s = time.monotonic()
    (
        spark.read.format("kafka")
        .options(**source)
        .option("endingOffsets", "latest")
        .load()
        .write.format("noop")
        .mode("overwrite")
        .save()
    )
    return time.monotonic() - started_s


def _follow(spark: SparkSession, source: dict[str, str], name: str) -> float:
    """Read the same by a streaming query, from its start to its end; returns seconds."""
    with tempfile.TemporaryDirectory(prefix="quota-proxy-bench-") as checkpoint:
        started_s = time.monotonic()
        query = (
            spark.readStream.format("kafka")
            .options(**source)
            .load()
            .writeStream.format("noop")
            .queryName(name)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return time.monotonic() - started_s


@contextmanager
def _reported(spark: SparkSession, report_to: str | None) -> Iterator[None]:
    """Report the queries of the context to a proxy's admin address; to none without one."""
    if report_to is None:
        yield
        return
    listener = QuotaListener(report_to)
    spark.streams.addListener(listener)
    try:
        yield
    finally:
        # Spark tells of the end a little after it: the last reports are waited for.
        listener.close(CLOSE_TIMEOUT_S)
        spark.streams.removeListener(listener)


if __name__ == "__main__":
    main()
