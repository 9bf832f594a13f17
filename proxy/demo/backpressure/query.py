"""Two queries on one topic, with and without an adaptive bound: an example to copy from.

The code of both is the same. The proxy tells them apart by their client ids, and learns how they
fare from the listener. They print each batch, and at last what they wrote, as one JSON object a
line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.functions import col, concat_ws, count, countDistinct, udf
from pyspark.sql.streaming import StreamingQuery

from proxy.spark import QuotaListener, client_options

POLL_S = 0.5
DRAIN_TIMEOUT_S = 120
CLOSE_TIMEOUT_S = 5.0
MS_PER_SECOND = 1000.0
ROWS_PER_LOOK = 20
"""Rows between two looks whether processing is slow now."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both queries until they have read what the stop file says."""
    options = _parser().parse_args(arguments)
    spark = (
        SparkSession.builder.master("local[8]")  # tasks that sleep need threads, not cores
        .appName("quota-proxy demo of backpressure")
        .config("spark.jars", options.jars)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    listener = QuotaListener(options.proxy)
    spark.streams.addListener(listener)
    try:
        queries = [_start(spark, name, options) for name in options.name]
        _say(ready=len(queries))
        _watch(queries, options.stop_file)
        for query in queries:
            query.stop()
        for name in options.name:
            (totals,) = _written(spark, name, options.bootstrap).collect()
            _say(query=name, rows_out=totals["rows"], distinct_rows_out=totals["distinct"])
    finally:
        spark.streams.removeListener(listener)
        listener.close(CLOSE_TIMEOUT_S)
        spark.stop()


def _start(spark: SparkSession, name: str, options: argparse.Namespace) -> StreamingQuery:
    records = (
        spark.readStream.format("kafka")
        # The proxy in place of the broker, and a client id of the query's own.
        .options(**client_options(name, options.bootstrap))
        .option("subscribe", options.topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    processed = _processing(options.slow_file, options.row_ms, options.slow_row_ms)(col("offset"))
    return (
        records.select(concat_ws("-", "partition", processed).alias("value"))
        .writeStream.queryName(name)
        .format("kafka")
        .options(**client_options(name, options.bootstrap))
        .option("topic", f"{name}-processed")
        .option("checkpointLocation", f"{options.work_dir}/{name}")
        .trigger(processingTime=options.trigger)
        .start()
    )


def _written(spark: SparkSession, name: str, bootstrap: str) -> DataFrame:
    """Return how many rows a query wrote, and how many different ones."""
    rows = spark.read.format("kafka").options(**client_options("count", bootstrap))
    return (
        rows.option("subscribe", f"{name}-processed")
        .load()
        .agg(count("*").alias("rows"), countDistinct("value").alias("distinct"))
    )


def _processing(slow_file: Path, row_ms: float, slow_row_ms: float) -> Callable[..., Column]:
    """Return the work on a record: a sleep, longer while there is a slow file."""
    state = {"rows": 0, "pause_s": 0.0}

    def process(offset: int) -> int:
        if state["rows"] % ROWS_PER_LOOK == 0:
            state["pause_s"] = (slow_row_ms if slow_file.exists() else row_ms) / MS_PER_SECOND
        state["rows"] += 1
        time.sleep(state["pause_s"])
        return offset

    wrapped: Callable[..., Column] = udf(process, "long")
    return wrapped


def _watch(queries: list[StreamingQuery], stop_file: Path) -> None:
    """Print each batch; return when each query has read as many rows as the stop file says."""
    last = dict.fromkeys((query.name for query in queries), -1)
    rows = dict.fromkeys(last, 0)
    deadline_s: float | None = None
    while True:
        for query in queries:
            failure = query.exception()
            if failure is not None:
                raise failure
            for progress in query.recentProgress:
                if progress["batchId"] > last[query.name] and progress["numInputRows"] > 0:
                    last[query.name] = progress["batchId"]
                    rows[query.name] += progress["numInputRows"]
                    _say(
                        query=query.name,
                        batch=progress["batchId"],
                        started=progress["timestamp"],
                        rows=progress["numInputRows"],
                        duration_ms=progress["durationMs"]["triggerExecution"],
                    )
        if stop_file.exists():
            deadline_s = deadline_s or time.monotonic() + DRAIN_TIMEOUT_S
            wanted = int(stop_file.read_text())
            if all(done >= wanted for done in rows.values()):
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{rows} of {wanted} records were read in {DRAIN_TIMEOUT_S} s")
        time.sleep(POLL_S)


def _say(**figures: int | str) -> None:
    sys.stdout.write(f"{json.dumps(figures)}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", required=True, help="HOST:PORT of the proxy")
    parser.add_argument("--proxy", required=True, help="its admin address, http://HOST:PORT")
    parser.add_argument("--name", required=True, action="append", help="of a query; twice")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--trigger", required=True, help="such as '2 seconds'")
    parser.add_argument("--row-ms", type=float, required=True, help="work per record")
    parser.add_argument("--slow-row-ms", type=float, required=True, help="the same while slow")
    parser.add_argument(
        "--slow-file", type=Path, required=True, help="processing is slow while it exists"
    )
    parser.add_argument(
        "--stop-file",
        type=Path,
        required=True,
        help="says after how many rows to stop, once it exists",
    )
    parser.add_argument("--jars", required=True, help="the Kafka connector's jars, by commas")
    parser.add_argument("--work-dir", required=True, help="empty folder for the checkpoints")
    return parser


if __name__ == "__main__":
    main()
