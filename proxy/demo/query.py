"""A Structured Streaming query that reads a topic through the proxy: an example to copy from.

Nothing in it knows of the proxy. It has a client id, by which the proxy finds its quota, and the
proxy's address where the broker's would be. It prints how far it is, and at last what it wrote, as
one JSON object a line.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, count, countDistinct, length
from pyspark.sql.streaming import StreamingQuery

RECORDS_PER_BATCH = 6000
FETCH_BYTES = 256 * 1024
REPORT_INTERVAL_S = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Read all that is in the topic now, in some batches, and write a row for each record."""
    options = _parser().parse_args(arguments)
    spark = (
        SparkSession.builder.master("local[3]")  # a task for each partition
        .appName("quota-proxy demo")
        .config("spark.jars", options.jars)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "1")
        .getOrCreate()
    )
    try:
        records = (
            spark.readStream.format("kafka")
            # The proxy, in place of the broker.
            .option("kafka.bootstrap.servers", options.bootstrap)
            # Without it Spark makes up a new client id for each run.
            .option("kafka.client.id", options.client_id)
            # Smaller answers than the default of 1 MiB: held for less time each, so evener.
            .option("kafka.max.partition.fetch.bytes", FETCH_BYTES)
            .option("subscribe", options.topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", RECORDS_PER_BATCH)
            .load()
        )
        query = (
            records.select("partition", "offset", length(col("value")).alias("size"))
            .writeStream.format("parquet")
            .option("path", f"{options.work_dir}/rows")
            .option("checkpointLocation", f"{options.work_dir}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        _watch(query)
        written = spark.read.parquet(f"{options.work_dir}/rows").agg(
            count("*").alias("rows"), countDistinct("partition", "offset").alias("distinct")
        )
        (totals,) = written.collect()
        _say(rows_out=totals["rows"], distinct_rows_out=totals["distinct"])
    finally:
        spark.stop()


def _watch(query: StreamingQuery) -> None:
    """Say after each batch how many rows there are so far; raise when the query fails."""
    rows, last_batch, ended = 0, -1, False
    while not ended:
        ended = bool(query.awaitTermination(REPORT_INTERVAL_S))
        for progress in query.recentProgress:
            if progress["batchId"] > last_batch and progress["numInputRows"] > 0:
                last_batch = progress["batchId"]
                rows += progress["numInputRows"]
                _say(batches=last_batch + 1, rows=rows)


def _say(**figures: int) -> None:
    sys.stdout.write(f"{json.dumps(figures)}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="proxy.demo.query", description=__doc__)
    parser.add_argument("--bootstrap", required=True, help="HOST:PORT of the proxy")
    parser.add_argument("--client-id", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--jars", required=True, help="the Kafka connector's jars, by commas")
    parser.add_argument("--work-dir", required=True, help="empty folder for rows and checkpoint")
    return parser


if __name__ == "__main__":
    main()
